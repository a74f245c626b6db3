"""A worker's name: the host's, and yet of one worker alone."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from shoal.runtime.file_locks import lock

WORKERS_MAX = 64  # on one host that are told apart by a small number


TAKEN = (
    "another worker on this machine is called %s and joins %s as well: the coordinator "
    "keeps the one that came last; give one another --name"
)

log = logging.getLogger("shoal.worker")


@contextmanager
def given_name(folder: Path, name: str, joins: str) -> Iterator[str]:
    """Give a name that was chosen, and warn if another worker has it where it joins.

    Only the coordinator knows for certain, and keeps the one that came last.  Where no
    files can be locked, nothing is said.
    """
    digest = sha256(f"{name}\n{joins}".encode(errors="replace")).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"worker-{digest[:16]}.lock").open("a+b")
    except OSError:
        yield name
        return
    with file:
        if not lock(file):
            log.warning(TAKEN, name, joins)
        yield name


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
