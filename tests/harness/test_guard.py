"""Tests that hang, each in its own way, between two that do not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from harness.leftovers import VARIABLE
from harness.speed import scaled

TESTS = Path(__file__).parents[1]
HEAD = """
import asyncio, threading, time
import pytest

def test_before():
    pass

def test_after():
    pass
"""
HANGS = {
    "a thread that never ends": """
def test_hangs():
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    thread.join()
""",
    "a loop": """
def test_hangs():
    while True:
        pass
""",
    "a task that waits": """
async def test_hangs():
    await asyncio.Event().wait()
""",
    # Most exceptions that a signal raises are this task's.
    "a task that nobody waits for": """
async def test_hangs():
    async def spin():
        while True:
            await asyncio.sleep(0)

    spinning = asyncio.create_task(spin())
    await asyncio.Event().wait()
""",
    "a task that cannot be cancelled": """
async def test_hangs():
    async def stubborn():
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass

    async with asyncio.TaskGroup() as group:
        group.create_task(stubborn())
""",
    "tear-down": """
@pytest.fixture
def hangs():
    yield
    threading.Event().wait()

def test_hangs(hangs):
    pass
""",
    "what no signal ends": """
import signal

def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    threading.Event().wait()
""",
}
LEAVES = """
import subprocess, sys

def test_leaves_a_process(tmp_path):
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    with open("left", "w") as file:
        print(left.pid, file=file)
"""


def run(folder: Path, test: str, *flags: str) -> str:
    """Run a module of tests as the suite runs; return what was printed."""
    file = folder / "test_hanging.py"
    file.write_text(HEAD + test)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
    words = [
        *(sys.executable, "-m", "pytest", "-p", "conftest", "--noconftest"),
        *("--rootdir", str(folder), "-c", str(TESTS.parent / "pyproject.toml")),
        *("--numprocesses", "1", "--dist", "loadfile", *flags, str(file)),
    ]
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    return done.stdout


@pytest.mark.parametrize("kind", HANGS)
def test_a_test_that_hangs_is_the_only_one_that_fails(
    tmp_path: Path, kind: str
) -> None:
    said = run(tmp_path, HANGS[kind], "--hang-after", "1")

    passed = 3 if kind == "tear-down" else 2
    assert re.search(rf"= (1 failed, )?{passed} passed(, 1 error)? in ", said), said
    assert re.search(r"^(FAILED|ERROR) .*::test_hangs", said, re.MULTILINE), said
    assert "test_hanging.py" in said  # the stack


@pytest.mark.parametrize("end", ["", "import os; os.kill(os.getpid(), 9)"])
def test_a_process_that_a_test_left_ends_with_the_run(tmp_path: Path, end: str) -> None:
    run(tmp_path, f"{LEAVES}    {end}\n")

    pid = int((tmp_path / "left").read_text())
    assert not psutil.pid_exists(pid)


def test_the_tag_of_this_process_is_inherited() -> None:
    assert os.environ[VARIABLE].endswith(f"/{os.getpid()}")
