"""Commands that install more, by how this copy was installed."""

import json
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from shoal.config.installation import install_extra, installation_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="other quotes")

METADATA = """Metadata-Version: 2.4
Name: shoal
Version: 0.2.0
Requires-Dist: click>=8
Requires-Dist: uvloop>=0.22; sys_platform != 'win32'
Provides-Extra: llm
Requires-Dist: hub>=2; extra == 'llm'
Requires-Dist: x402[httpx]>=2.25; extra == "x402"
Requires-Dist: engine>=2026.10; (sys_platform != 'win32') and extra == 'llm'
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"
RECEIPT = """
[tool]
requirements = [
    { name = "shoal", extras = ["demo"], directory = "FOLDER" },
    { name = "openai", specifier = ">=2" },
    { name = "tool", directory = "/tool" },
]
"""


class Environment:
    """An environment in which this distribution is installed."""

    def __init__(self, folder: Path) -> None:
        self.prefix = folder / "env"
        self.info = self.prefix / "shoal-0.2.0.dist-info"
        self.info.mkdir(parents=True)
        (self.info / "METADATA").write_text(METADATA)
        (self.info / "INSTALLER").write_text("pip\n")
        self.python = str(self.prefix / "bin" / "python")

    def came_from(self, url: str, **about: Any) -> None:
        (self.info / "direct_url.json").write_text(json.dumps({"url": url} | about))

    def add(self, extra: str = "llm") -> str:
        """Return the command, with ``python`` and ``env`` for their paths."""
        found = installation_of(Distribution.at(self.info), self.prefix, self.python)
        return self._short(found.add_extra(extra))

    def add_packages(self, *packages: str, **how: bool) -> str:
        found = installation_of(Distribution.at(self.info), self.prefix, self.python)
        return self._short(found.add_packages(*packages, **how))

    def same_elsewhere(self) -> str:
        found = installation_of(Distribution.at(self.info), self.prefix, self.python)
        return self._short(found.same_elsewhere("0.2.0"))

    def _short(self, command: str) -> str:
        command = command.replace(self.python, "python")
        return command.replace(str(self.prefix), "env")


@pytest.fixture
def env(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "my checkout"
    folder.mkdir()
    return folder


def test_without_a_source_the_packages_of_the_extra_are_named(env: Environment) -> None:
    assert env.add() == "python -m pip install 'hub>=2' 'engine>=2026.10'"
    assert env.add("x402") == "python -m pip install 'x402[httpx]>=2.25'"
    assert env.add("none") == "install the packages of Shoal's extra none"
    assert env.same_elsewhere() == "Shoal 0.2.0"


def test_checkout_is_installed_again_with_the_extra(
    env: Environment, folder: Path
) -> None:
    env.came_from(folder.as_uri(), dir_info={"editable": True})
    assert env.add() == f"python -m pip install -e '{folder}[llm]'"

    env.came_from(folder.as_uri(), dir_info={})
    assert env.add() == f"python -m pip install '{folder}[llm]'"
    assert env.same_elsewhere() == f"Shoal 0.2.0, from a copy of {folder}"


def test_file_is_installed_again_if_it_is_still_there(
    env: Environment, tmp_path: Path
) -> None:
    wheel = tmp_path / "shoal-0.2.0-py3-none-any.whl"
    env.came_from(wheel.as_uri(), archive_info={})
    assert env.add() == "python -m pip install 'hub>=2' 'engine>=2026.10'"

    wheel.touch()

    assert env.add() == f"python -m pip install '{wheel}[llm]'"


def test_url_is_installed_again_at_the_same_commit(env: Environment) -> None:
    vcs = {"vcs": "git", "commit_id": COMMIT, "requested_revision": "main"}
    env.came_from("https://forge.example/shoal.git", vcs_info=vcs)
    url = f"git+https://forge.example/shoal.git@{COMMIT}"
    assert env.add() == f"python -m pip install 'shoal[llm] @ {url}'"
    assert env.same_elsewhere() == f"pip install 'shoal @ {url}'"

    env.came_from("https://e.example/all.zip", archive_info={}, subdirectory="shoal")

    url = "https://e.example/all.zip#subdirectory=shoal"
    assert env.add() == f"python -m pip install 'shoal[llm] @ {url}'"


def test_pip_is_called_by_its_name_if_that_is_the_one(
    env: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Path(env.python).with_name("pip")
    pip.parent.mkdir()
    pip.touch(0o755)
    monkeypatch.setenv("PATH", str(pip.parent))

    assert env.add() == "pip install 'hub>=2' 'engine>=2026.10'"


def test_pipx_injects_packages(env: Environment, folder: Path) -> None:
    env.came_from(folder.as_uri(), dir_info={})
    (env.prefix / "pipx_metadata.json").touch()

    assert env.add() == "pipx inject env 'hub>=2' 'engine>=2026.10'"
    alone = env.add_packages("weights", alone=True)
    assert alone == "pipx runpip env install --no-deps weights"


def test_uv_installs_into_the_environment(env: Environment, folder: Path) -> None:
    env.came_from(folder.as_uri(), dir_info={})
    (env.info / "INSTALLER").write_text("uv")

    assert env.add() == f"uv pip install --python env '{folder}[llm]'"
    again = env.add_packages("weights", alone=True, again=True)
    assert again == "uv pip install --python env --no-deps --reinstall weights"


def test_uv_tool_keeps_what_it_was_asked_for_before(
    env: Environment, folder: Path
) -> None:
    env.came_from(folder.as_uri(), dir_info={})
    receipt = env.prefix / "uv-receipt.toml"
    receipt.write_text(RECEIPT.replace("FOLDER", str(folder)))

    withs = "--with 'openai>=2' --with /tool"
    assert env.add() == f"uv tool install {withs} '{folder}[demo,llm]'"
    assert env.add("demo") == f"uv tool install {withs} '{folder}[demo]'"

    receipt.write_text("[tool]\nother = 1\n")
    assert env.add() == f"uv tool install '{folder}[llm]'"


def test_uv_tool_from_an_index_gets_the_packages(env: Environment) -> None:
    (env.prefix / "uv-receipt.toml").touch()

    added = "uv pip install --python env 'hub>=2' 'engine>=2026.10'"
    assert env.add() == added


def test_this_copy_has_a_command() -> None:
    assert "install" in install_extra("llm")
    assert "pip install 'shoal[" not in install_extra("llm")
