"""The entry point of the commands."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from harness.speed import scaled
from shoal.cli.main import main, shoal

INTERRUPTED = """
import importlib.abc, os, signal, sys
from shoal.cli.main import main

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *rest):
        if name == "shoal.cli.local.program":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
raise SystemExit(main(["version"]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
def test_ctrl_c_during_an_import_is_silent() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_garbage_is_collected_once_a_command_is_imported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["version"]) == 0

    assert gc.isenabled()
    assert capsys.readouterr().out.startswith("shoal")


# What they print is for people, or is a file's content.
WITHOUT_JSON = {"completion", "demo", "help", "run"}


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield all commands below a group, by their names."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def test_every_command_prints_json_on_request() -> None:
    without = {
        name
        for name, command in commands(shoal)
        if not any("--json" in each.opts for each in command.params)
    }

    assert without <= WITHOUT_JSON


def test_every_parameter_says_what_it_is() -> None:
    silent = {
        f"{name} {each.opts[0]}"
        for name, command in commands(shoal)
        for each in command.params
        if isinstance(each, click.Option) and not each.help
    }

    assert silent == set()


def test_help_begins_with_what_the_readme_begins_with() -> None:
    page = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    words = " ".join(page.split())

    shown = CliRunner().invoke(shoal, ["--help"], prog_name="shoal").output

    begin = shown.partition("COMMAND [ARGS]...")[2].partition("Options:")[0]
    assert begin.split()
    for sentence in " ".join(begin.split()).rstrip(".").split(". "):
        assert sentence in words[:400]
