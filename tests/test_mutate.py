"""``make mutate`` on a small project, and the mutants that this one knows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "mutate.py"

GATE = '''
"""Lets in whoever is old enough."""

AGE_MIN = 18


def may_enter(age: int, *, banned: bool) -> bool:
    """Say whether somebody may enter."""
    if banned:
        return False
    return age >= AGE_MIN
'''
TESTS = """
from pond.gate import may_enter


def test_adults_may_enter():
    assert may_enter(30, banned=False)
    assert not may_enter(3, banned=False)
"""
GROUPS = """
[groups.admission]
modules = ["src/pond/gate.py"]
tests = ["tests"]

[[equivalent]]
module = "src/pond/gate.py"
function = "may_enter()"
changes = ["age >= AGE_MIN -> age > AGE_MIN"]
reason = "nobody is exactly 18"
"""
GONE = """
[[equivalent]]
module = "src/pond/gate.py"
function = "may_leave()"
changes = ["banned -> True"]
reason = "it was so once"
"""


def mutate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose tests never look at who is banned."""
    files = {
        "src/pond/__init__.py": "",
        "src/pond/gate.py": GATE,
        "tests/test_gate.py": TESTS,
        "scripts/mutants.toml": GROUPS,
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["long"]\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.lstrip())
    return tmp_path


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a trial is a fork")
def test_mutants_that_no_test_notices_are_reported(project: Path) -> None:
    run = mutate("admission", "--root", str(project))

    _, ignored, unreached, *_, figures = run.stdout.splitlines()
    assert ignored == "SURVIVED src/pond/gate.py:8 may_enter(): banned -> False"
    assert unreached == (
        "UNREACHED src/pond/gate.py:9 may_enter(): False -> True in return False"
    )
    # The tests notice if all are banned, and both constant answers.
    assert figures.split()[:-1] == ["admission", "6", "6", "3", "0", "1", "2"]
    assert run.returncode == 1
    assert (project / "src/pond/gate.py").read_text() == GATE.lstrip()


def test_known_mutant_that_is_gone_is_reported(project: Path) -> None:
    with (project / "scripts" / "mutants.toml").open("a") as groups:
        groups.write(GONE)

    run = mutate("--check", "--root", str(project))

    assert run.stdout == "GONE src/pond/gate.py may_leave() banned -> True\n"
    assert run.returncode == 1


def test_every_known_mutant_of_this_project_can_be_made() -> None:
    run = mutate("--check")

    assert (run.stdout, run.returncode) == ("", 0), run.stderr
