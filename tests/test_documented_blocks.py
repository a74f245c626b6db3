"""The blocks of the pages: data is valid, settings exist, and files are as shown.

``tests/live/test_documentation.py`` runs the README, the quick start and the guides.
"""

import ast
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from harness.documents import PAGES, ROOT, Block, blocks_of
from shoal.cli.local.config import CONFIGS
from shoal.config.loader import check_file, load_settings

BLOCKS = [
    block
    for page in PAGES
    if "decisions" not in page.relative_to(ROOT).parts
    for block in blocks_of(page)
]
DEPLOYED = ("nginx.conf", "shoal.toml", "node.toml", "Caddyfile", "Caddyfile.nodes")
DOCS = ROOT / "docs"
RUN = {
    ROOT / "README.md",
    *(
        DOCS / name
        for name in ("quick-start.md", "upgrade.md", "jobs.md", "clients.md")
    ),
    *(DOCS / "guides").glob("*.md"),
}
"""Pages whose commands run in ``tests/live`` and ``tests/clients``."""
COMMANDS_CHECKED = {"shoal", "curl"}
"""Programs whose lines are checked on all pages, or run where they are shown."""
REASON_MIN = 20  # characters


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def check_settings(file: Path) -> None:
    """Raise ConfigError unless ``shoal serve`` and ``shoal join`` accept a file."""
    file.chmod(0o600)
    check_file(file, CONFIGS)
    for section, config in CONFIGS.items():
        load_settings(config, section, {}, file, {})


def test_json_is_valid(subtests: pytest.Subtests) -> None:
    for block in of("json"):
        with subtests.test(block.place):
            json.loads(block.code)


def test_settings_files_are_accepted(tmp_path: Path, subtests: pytest.Subtests) -> None:
    ours = [each for each in of("toml") if each.page.name != "clients.md"]

    assert len(ours) >= 2
    for block in ours:
        with subtests.test(block.place):
            file = tmp_path / "shoal.toml"
            file.write_text(block.code)
            check_settings(file)


def test_programs_and_data_can_be_parsed(subtests: pytest.Subtests) -> None:
    for block in of("python", "yaml", "toml"):
        with subtests.test(block.place):
            if block.language == "yaml":
                yaml.safe_load(block.code)
            elif block.language == "toml":
                tomllib.loads(block.code)
            else:
                compile(block.code, block.place, "exec", _FLAGS)


def test_blocks_that_are_not_run_have_a_reason() -> None:
    marked = [block for block in BLOCKS if block.mark.startswith("not run")]

    assert marked
    assert not [block.place for block in marked if len(block.not_run) < REASON_MIN]


def test_commands_of_other_programs_are_run_or_say_why_not() -> None:
    silent = [
        block.place
        for block in of("sh")
        if block.page not in RUN
        and not block.not_run
        and not {*_programs(block)} <= COMMANDS_CHECKED
    ]

    assert silent == []


def test_deployment_shows_the_files_of_the_examples() -> None:
    blocks = blocks_of(ROOT / "docs" / "deployment.md")
    shown = {_without_head(block.code) for block in blocks}

    for file in DEPLOYED:
        text = (ROOT / "examples" / "deploy" / file).read_text("utf-8")
        assert _without_head(text) in shown, file


def _programs(block: Block) -> Iterator[str]:
    """Yield the first word of each command."""
    for line in block.code.replace("\\\n", "").splitlines():
        if line and not line.startswith(("#", " ")):
            yield line.split()[0]


_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST


def _without_head(text: str) -> str:
    """Return a file without the comment that begins it."""
    lines = text.strip().splitlines()
    while lines and (lines[0].startswith("#") or not lines[0]):
        lines.pop(0)
    return "\n".join(lines)
