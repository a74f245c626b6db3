"""The pipes between a child process and its parent, and the child's exit code."""

import os
import signal


def claim_pipes() -> tuple[int, int]:
    """Return the file descriptors of a child's input and output, for messages only.

    Native code and tasks may print.  From here on, standard output is redirected to
    standard error, and standard input is empty.
    """
    messages_in, messages_out = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return messages_in, messages_out


def write_all(pipe: int, data: bytes) -> None:
    """Write to a pipe, blocking while it is full.  Raises OSError if it is closed."""
    unsent = memoryview(data)
    while unsent:
        unsent = unsent[os.write(pipe, unsent) :]


def describe_exit(code: int | None) -> str:
    """Describe an exit code, as the end of a sentence; None: it is unknown."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
