"""A worker's name: the host's, and yet of one worker alone."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

WORKERS_MAX = 64  # on one host that are told apart by a small number


@contextmanager
def own_name(folder: Path) -> Iterator[str]:
    """Give a name that no other worker of this user has for the length of the block.

    The first worker on a host is called like it, the second ``HOST-2``, and so on: the
    same names come back after a restart.  Files in ``folder`` are locked for it; where
    that cannot be done, the name ends in the number of the process.
    """
    host = socket.gethostname() or "worker"
    for number in range(1, WORKERS_MAX + 1):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / f"worker-{number}.lock").open("a+b")
        except OSError:
            break
        with file:
            if not _lock(file):
                continue
            yield host if number == 1 else f"{host}-{number}"
            return
    yield f"{host}-{os.getpid()}"


def _lock(file: IO[bytes]) -> bool:
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
