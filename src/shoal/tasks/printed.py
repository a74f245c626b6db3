"""What tasks print, in a process that makes one call after the other.

All of it goes to standard error.  A mark stands there where a call begins, so that the
worker quotes of one that crashes what that one said, and never what others did.
"""

import io
import os
import sys
from contextlib import suppress

MARK = b"\0"
"""One byte, which no read of a pipe can cut, and which texts do not have."""

_STDERR = 2


class Printed:
    """Python's streams of this process, which are replaced by ones that take notice."""

    def __init__(self) -> None:
        self._out, self._err = _Stream(1, "replace"), _Stream(2, "backslashreplace")
        sys.stdout = self._out
        sys.stderr = self._err

    @property
    def something(self) -> bool:
        """Whether Python has written anything since the last mark.

        What is written beside Python is not seen: by libraries in C, or by programs
        that a task starts.
        """
        return self._out.used or self._err.used

    def begin(self) -> None:
        """Write a mark, for what comes is of another call."""
        for stream in (self._out, self._err):
            # A task may have closed them.
            with suppress(OSError, ValueError):
                stream.flush()
            stream.used = False
        with suppress(OSError):
            os.write(_STDERR, MARK)


def of_the_last(log: bytes, data: bytes) -> bytes:
    """Return what the latest call has printed, of a log and what was read after it."""
    _, mark, after = data.rpartition(MARK)
    return after if mark else log + data


class _Stream(io.TextIOWrapper):
    """A standard stream that notes whether it was used."""

    def __init__(self, number: int, errors: str) -> None:
        # Asking the stream that is there would not do: it may be none.
        raw = os.fdopen(number, "wb", closefd=False)
        super().__init__(raw, encoding="utf-8", errors=errors, line_buffering=True)
        self.used = False

    def write(self, text: str, /) -> int:
        self.used = True
        return super().write(text)
