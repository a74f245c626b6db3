"""Advisory file locks, on every platform."""

from contextlib import suppress
from pathlib import Path
from typing import IO

from filelock import lock_descriptor

from shoal.config.private_files import open_private


def open_lock_file(file: Path) -> IO[bytes]:
    """Open a file to lock it; creates it for its owner alone.  Raises OSError."""
    return open(file, "a+b", opener=open_private)


def try_lock(file: IO[bytes]) -> bool:
    """Lock a file until it is closed; return False if another process has it."""
    with suppress(OSError):  # a file system without locks
        return lock_descriptor(file.fileno(), blocking=False)
    return False
