"""The output of programs."""

import pytest

from shoal.processes import programs
from shoal.processes.programs import program_output


def test_failing_program_has_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "COMMAND_TIMEOUT", 0.1)

    assert program_output(["no-such-program-anywhere"]) == ""
    assert program_output(["false"]) == ""
    assert program_output(["sleep", "60"]) == ""
    assert program_output(["echo", "here"]) == "here\n"
