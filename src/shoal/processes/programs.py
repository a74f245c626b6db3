"""The output of this machine's own programs, such as those that know its sensors.

A driver that does not answer costs a child process and two seconds.  A library that
calls it here, such as NVIDIA's NVML, would hold a thread that nothing can end.
"""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import TypeAlias

COMMAND_TIMEOUT = 2.0  # seconds for a system program to answer

RunProgram: TypeAlias = Callable[[Sequence[str]], str]
"""Returns the output of a program; empty if it is missing or does not answer."""


def program_output(command: Sequence[str]) -> str:
    """Return the output of a program; empty if it is missing or does not answer."""
    if (program := shutil.which(command[0])) is None:
        return ""
    try:
        done = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
