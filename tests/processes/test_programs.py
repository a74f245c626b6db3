"""The output of programs, and the files that this one may open."""

import subprocess
import sys

import pytest

from shoal.processes import programs
from shoal.processes.programs import program_output


def test_failing_program_has_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "COMMAND_TIMEOUT", 0.1)

    assert program_output(["no-such-program-anywhere"]) == ""
    assert program_output(["false"]) == ""
    assert program_output(["sleep", "60"]) == ""
    assert program_output(["echo", "here"]) == "here\n"


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such limit")
def test_program_may_open_as_many_files_as_the_system_allows() -> None:
    found = subprocess.check_output(
        [
            sys.executable,
            "-c",
            "import resource as r\n"
            "from shoal.processes.programs import allow_files\n"
            "r.setrlimit(r.RLIMIT_NOFILE, (64, 2000))\n"
            "allow_files()\n"
            "print(*r.getrlimit(r.RLIMIT_NOFILE))",
        ],
        text=True,
    )

    assert found.split() == ["2000", "2000"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_names_itself() -> None:
    named = subprocess.check_output(
        [
            sys.executable,
            "-c",
            "from shoal.processes.programs import name_process\n"
            "name_process('shoal-hub')\n"
            "print(open('/proc/self/status').readline())",
        ],
        text=True,
    )

    assert named.split() == ["Name:", "shoal-hub"]
