"""Tests that hang, each in its own way, among others that do not."""

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
import asyncio, signal, subprocess, sys, threading
import pytest

def test_before():
    pass
"""
TAIL = """
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
    async def forever():
        await asyncio.Event().wait()

    await asyncio.create_task(forever(), name="waits")
""",
    "a program": """
def test_hangs():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(3600)"])
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
    "tear down": """
@pytest.fixture
def hangs():
    yield
    threading.Event().wait()

def test_hangs(hangs):
    pass
""",
    "what no signal ends": """
def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    threading.Event().wait()
""",
}
LEAVES = """
def test_leaves_a_process_and_a_thread():
    threading.Thread(target=threading.Event().wait).start()
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    with open("left", "w") as file:
        print(left.pid, file=file)
"""
KILLED = "    signal.raise_signal(signal.SIGKILL)\n"
DIES = f"""
def test_dies():
{KILLED}"""


def run(folder: Path, tests: dict[str, str], *flags: str, processes: int = 2) -> str:
    """Run tests, each in a file of its own, as the suite does; return the output."""
    for name, test in tests.items():
        (folder / f"test_{name}.py").write_text(HEAD + test + TAIL)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
    command = [
        *(sys.executable, "-m", "pytest", "-p", "conftest", "--noconftest"),
        *("--rootdir", str(folder), "-c", str(TESTS.parent / "pyproject.toml")),
        *("--processes", str(processes)),
        *(*flags, str(folder)),
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=scaled(100),
        check=False,
    )
    return done.stdout


@pytest.mark.long
def test_only_hanging_tests_fail(tmp_path: Path) -> None:
    hanging = {kind.replace(" ", "_"): test for kind, test in HANGS.items()}

    output = run(tmp_path, hanging, "--hang-after", "1")

    # Also its tear-down hangs, where the event loop waits for a task.
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    assert {*failed} == {f"test_{kind}.py::test_hangs" for kind in hanging}, output
    assert f" {2 * len(hanging) + 1} passed, " in output, (
        output
    )  # and one before tear-down
    assert re.search(r"hung: idle for \d+ seconds", output)
    assert re.search(r"hung: not over after \d+ seconds", output)
    assert re.search(r"^Task 'waits' .*\n.* in forever$", output, re.MULTILINE)
    assert re.search(r"^Process \d+: .*import time; ", output, re.MULTILINE)
    assert f"test_hangs\n    {tmp_path}/test_a_loop.py:" in output, "it ends with where"


@pytest.mark.long
def test_what_a_dead_process_had_before_it_is_run_by_the_next(tmp_path: Path) -> None:
    output = run(tmp_path, {"dies": DIES, "last": ""}, processes=1)

    assert re.findall(r"^FAILED (\S+)", output, re.MULTILINE) == [
        "test_dies.py::test_dies"
    ], output
    assert " 4 passed" in output, output


@pytest.mark.long
@pytest.mark.parametrize("end", ["", KILLED], ids=["with", "before"])
def test_process_left_by_a_test_ends_with_the_run(tmp_path: Path, end: str) -> None:
    run(tmp_path, {"leaves": LEAVES + end})

    pid = int((tmp_path / "left").read_text())
    # Whoever inherited it may not have asked yet how it ended.
    exited = not psutil.pid_exists(pid)
    assert exited or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_tag_of_this_process_is_inherited() -> None:
    assert os.environ[VARIABLE].endswith(f"/{os.getpid()}")
