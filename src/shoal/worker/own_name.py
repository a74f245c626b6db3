"""A worker's name: the host's, and yet of one worker alone."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.runtime.file_locks import lock

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
            if not lock(file):
                continue
            yield host if number == 1 else f"{host}-{number}"
            return
    yield f"{host}-{os.getpid()}"
