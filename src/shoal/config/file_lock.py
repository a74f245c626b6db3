"""Advisory file locks, on every platform."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

from shoal.config.private_files import open_private


def open_lock_file(file: Path) -> IO[bytes]:
    """Open a file to lock it; creates it for its owner alone.  Raises OSError."""
    return open(file, "a+b", opener=open_private)


def try_lock(file: IO[bytes]) -> bool:
    """Lock a file until it is closed; return False if another process has it."""
    if sys.platform == "win32":
        import msvcrt

        with suppress(OSError):
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            return True
        return False
    import fcntl

    with suppress(OSError):
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
