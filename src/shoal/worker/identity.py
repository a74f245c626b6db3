"""A worker's identity: its Ed25519 key, kept in a file, and its name.

The file is JSON: ``publicKey``, 32 numbers, and ``secretKey``, the 32 of the seed and
once more those of the public key.  That is how workers of other programs keep theirs
(TweetNaCl's key pair), so that a worker may come over from there as who it was.
"""

import logging
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

import msgspec

from shoal.config.file_lock import try_lock
from shoal.domain.errors import ConfigError
from shoal.ledger.keys import KEY_SIZE, Signer

FILE_MAX = 4096  # bytes that are read of it; it has about 500


class KeyPair(msgspec.Struct):
    """What is in the file."""

    publicKey: list[int]  # noqa: N815  # the file's words
    secretKey: list[int]  # noqa: N815


def identity_file(name: str, folder: Path) -> Path:
    """Return the file for a worker of this name: each has a key of its own.

    For a coordinator knows workers by their keys, and two with one key would take each
    other's place.
    """
    return folder / f"{quote(name, safe='', errors='surrogatepass')}.json"


def load_identity(file: Path) -> Signer:
    """Return the identity that a file holds; if there is no file, one is made.

    Raises ConfigError naming the file and what to do about it.
    """
    try:
        with suppress(FileNotFoundError):
            return _read(file)
        _make(file)
        return _read(file)
    except OSError as error:
        raise ConfigError(
            f"the worker's key cannot be kept in {file}: {error.strerror}; name "
            "another file with --identity"
        ) from error


def _read(file: Path) -> Signer:
    with file.open("rb") as kept:
        mode = stat.S_IMODE(os.fstat(kept.fileno()).st_mode)
        # Windows has no such bits.
        if os.name != "nt" and mode & 0o077:
            raise ConfigError(
                f"{file} can be read by others (mode {mode:04o}): chmod 600 {file}, "
                "or, if somebody may have read it, delete it and have a new key"
            )
        data = kept.read(FILE_MAX)
    try:
        pair = msgspec.json.decode(data, type=KeyPair)
        seed, public_key = bytes(pair.secretKey[:KEY_SIZE]), bytes(pair.publicKey)
        signer = Signer.from_seed(seed)
        whole = bytes(pair.secretKey) == seed + public_key
    except (ValueError, RecursionError) as error:
        raise ConfigError(_damaged(file)) from error
    if not whole or signer.public_key != public_key:
        raise ConfigError(_damaged(file))
    return signer


def _damaged(file: Path) -> str:
    return (
        f"{file} holds no whole key: put back a copy of it; if there is none, delete "
        "it, and the worker gets a new key, which coordinators do not know yet"
    )


def _make(file: Path) -> None:
    """Write a new key, whole or not at all; one that came meanwhile stays."""
    seed = os.urandom(KEY_SIZE)
    public_key = Signer.from_seed(seed).public_key
    pair = KeyPair(list(public_key), list(seed + public_key))
    file.parent.mkdir(parents=True, exist_ok=True)
    # Such files are readable to their owner alone.
    number, name = tempfile.mkstemp(prefix=f".{file.name[:100]}.", dir=file.parent)
    try:
        with open(number, "wb") as new:
            new.write(msgspec.json.encode(pair))
            new.flush()
            os.fsync(number)
        try:
            os.link(name, file)
        except FileExistsError:
            pass
        except OSError:
            # Some file systems, and Android, have no links.
            os.replace(name, file)
    finally:
        Path(name).unlink(missing_ok=True)


WORKERS_MAX = 64  # on one host that are told apart by a small number


NAME_TAKEN = (
    "another worker on this machine is called %s and joins %s as well: the coordinator "
    "keeps the one that came last; give one another --name"
)

log = logging.getLogger("shoal.worker")


@contextmanager
def chosen_name(folder: Path, name: str, joins: str) -> Iterator[str]:
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
        if not try_lock(file):
            log.warning(NAME_TAKEN, name, joins)
        yield name


@contextmanager
def unique_name(folder: Path) -> Iterator[str]:
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
            if not try_lock(file):
                continue
            yield host if number == 1 else f"{host}-{number}"
            return
    yield f"{host}-{os.getpid()}"
