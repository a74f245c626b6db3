"""Completion of the command line, as a shell asks for it."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from click.shell_completion import BashComplete

from harness.speed import PATIENCE
from shoal.cli.main import PLACES, shoal


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["ke"], ["keys"]),
        (["j"], ["join", "join-line", "jobs"]),
        (["swim"], []),
        (["--ver"], ["--version"]),
        (["jobs", "ex"], ["explain"]),
        (["keys", "create", "--sc"], ["--scope"]),
        (["keys", "create", "--scope", "a"], ["admin"]),
        (["jobs", "submit", "--privacy", ""], ["public", "private"]),
    ],
)
def test_words_are_completed(words: list[str], completed: list[str]) -> None:
    complete = BashComplete(shoal, {}, "shoal", "_SHOAL_COMPLETE")

    found = complete.get_completions(words[:-1], words[-1])

    assert [each.value for each in found] == completed


def test_all_commands_are_listed_without_importing_one() -> None:
    imported = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "shoal"],
        env={
            **os.environ,
            **{"COMP_WORDS": "shoal ", "COMP_CWORD": "1"},
            "_SHOAL_COMPLETE": "bash_complete",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )

    assert imported.stdout.split() == [f"plain,{name}" for name in PLACES]
    modules = {place.partition(":")[0] for place in PLACES.values()}
    assert not [name for name in modules if name in imported.stderr]


@pytest.fixture
def bash(tmp_path: Path) -> "Iterator[pexpect.spawn[str]]":
    """An interactive bash with ``shoal`` and its completion."""
    program = tmp_path / "shoal"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shoal "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    shell = pexpect.spawn(
        "bash",
        ["--norc", "--noprofile", "-i"],
        encoding="utf-8",
        timeout=PATIENCE,
        dimensions=(24, 100),
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PS1": "ready>"},
    )
    shell.sendline('eval "$(shoal completion bash)" && echo comp""leted')
    shell.expect_exact("completed")
    yield shell
    shell.close(force=True)


@pytest.mark.long
@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("bash") is None,
    reason="completion needs bash 4.4",
)
def test_tab_completes_a_command_and_its_option(bash: "pexpect.spawn[str]") -> None:
    bash.send("shoal ke\t")
    bash.expect_exact("shoal keys ")
    bash.send("cr\t--prio\t")

    bash.expect_exact("create --priority-max ")
