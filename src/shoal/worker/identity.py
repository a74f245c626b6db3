"""A worker's identity: its Ed25519 key in a file, its name, and who knows it.

The file is JSON: ``publicKey``, 32 numbers, and ``secretKey``, the 32 numbers of the
seed followed by those of the public key.  Other programs store TweetNaCl's key pair in
the same form, so that their workers can keep their identity.

The coordinators that have admitted this machine are known by their URLs.  A worker
proves its own key to such a coordinator, and expects this key of it, so that neither
needs the join token again.
"""

import json
import logging
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

import msgspec

from shoal.config import private_files
from shoal.config.private_files import make_private_folder, replace_private
from shoal.domain.errors import ConfigError
from shoal.ledger.keys import KEY_SIZE, Signer

FILE_MAX = 4096  # bytes; it has about 500
COORDINATORS = "coordinators.json"
IDENTITIES = "identities"  # the folder of workers' keys


class KeyPair(msgspec.Struct):
    """The content of the file."""

    publicKey: list[int]  # noqa: N815  # the file's words
    secretKey: list[int]  # noqa: N815


def identity_file(name: str, folder: Path) -> Path:
    """Return the key file for a worker's name.

    Each worker has its own key: two with one key would replace each other at the
    coordinator.
    """
    return folder / f"{quote(name, safe='', errors='surrogatepass')}.json"


def load_identity(file: Path) -> Signer:
    """Return the identity in a file, which is created if it does not exist.

    Raises ConfigError naming the file and what to do about it.
    """
    try:
        with suppress(FileNotFoundError):
            return _read(file)
        _create(file)
        return _read(file)
    except OSError as error:
        raise ConfigError(
            f"the worker's key cannot be stored in {file}: {error.strerror}; give "
            "another file with --identity"
        ) from error


def created_at(file: Path | None) -> float | None:
    """Return the Unix time at which a key was made: its file never changes.

    None without a file.
    """
    return None if file is None or not file.exists() else file.stat().st_mtime


def _read(file: Path) -> Signer:
    with file.open("rb") as stream:
        mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
        # Windows has no such permission bits.
        if sys.platform != "win32" and mode & 0o077:
            raise ConfigError(
                f"{file} is readable by other users (mode {mode:04o}): chmod 600 "
                f"{file}, or delete it to get a new key if it may have leaked"
            )
        data = stream.read(FILE_MAX)
    try:
        pair = msgspec.json.decode(data, type=KeyPair)
        seed, public_key = bytes(pair.secretKey[:KEY_SIZE]), bytes(pair.publicKey)
        signer = Signer.from_seed(seed)
        consistent = bytes(pair.secretKey) == seed + public_key
    except (ValueError, RecursionError) as error:
        raise ConfigError(_damaged(file)) from error
    if not consistent or signer.public_key != public_key:
        raise ConfigError(_damaged(file))
    return signer


def _damaged(file: Path) -> str:
    return (
        f"{file} is damaged: restore it from a backup, or delete it to get a new key, "
        "which coordinators do not know yet"
    )


def _create(file: Path) -> None:
    """Write a new key atomically; an existing file stays."""
    seed = os.urandom(KEY_SIZE)
    public_key = Signer.from_seed(seed).public_key
    pair = KeyPair(list(public_key), list(seed + public_key))
    file.parent.mkdir(mode=private_files.FOLDER_MODE, parents=True, exist_ok=True)
    # mkstemp creates files that only their owner can read.
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
            # Some file systems, and Android, have no hard links.
            os.replace(name, file)
        private_files.sync_folder(file.parent)
    finally:
        Path(name).unlink(missing_ok=True)


WORKERS_MAX = 64  # on one host, with numbered names


NAME_TAKEN = (
    "another worker on this machine is named %s and joins %s as well; the coordinator "
    "keeps the last one: give one another --name"
)

log = logging.getLogger("shoal.worker")


@contextmanager
def chosen_name(folder: Path, name: str, target: str) -> Iterator[str]:
    """Hold a chosen name, and warn if another worker here joins under it.

    Detects workers of this machine only, and only where files can be locked.
    """
    digest = sha256(f"{name}\n{target}".encode(errors="replace")).hexdigest()
    try:
        folder.mkdir(mode=private_files.FOLDER_MODE, parents=True, exist_ok=True)
        file = private_files.open_lock_file(folder / f"worker-{digest[:16]}.lock")
    except OSError:
        yield name
        return
    with file:
        if not private_files.try_lock(file):
            log.warning(NAME_TAKEN, name, target)
        yield name


@contextmanager
def unique_name(folder: Path) -> Iterator[str]:
    """Hold a name that no other worker of this user has.

    The first worker has the name of the host, the second ``HOST-2``, and so on, also
    after a restart.  Locks a file in ``folder``; where that fails, the name ends in the
    process id.
    """
    host = socket.gethostname() or "worker"
    for number in range(1, WORKERS_MAX + 1):
        try:
            folder.mkdir(mode=private_files.FOLDER_MODE, parents=True, exist_ok=True)
            file = private_files.open_lock_file(folder / f"worker-{number}.lock")
        except OSError:
            break
        with file:
            if not private_files.try_lock(file):
                continue
            yield host if number == 1 else f"{host}-{number}"
            return
    yield f"{host}-{os.getpid()}"


@dataclass(frozen=True, slots=True)
class KnownCoordinator:
    """A coordinator: its public key and the fingerprint of its TLS key, as hexadecimal.

    The fingerprint is empty without TLS, or if a certificate authority is trusted.
    """

    key: str
    fingerprint: str = ""


def known_coordinators(folder: Path) -> dict[str, KnownCoordinator]:
    """Return the coordinators that have admitted this machine, by their URLs."""
    return _read_known(folder / COORDINATORS)


def known_coordinator(folder: Path, url: str) -> KnownCoordinator | None:
    """Return the coordinator at a URL; None if it has not admitted this machine."""
    return known_coordinators(folder).get(url)


def remember_coordinator(folder: Path, url: str, known: KnownCoordinator) -> None:
    """Write down a coordinator that has admitted this machine.  Raises OSError."""
    coordinators = known_coordinators(folder)
    if coordinators.get(url) == known:
        return
    coordinators[url] = known
    make_private_folder(folder)
    listed = {each: asdict(its) for each, its in coordinators.items()}
    replace_private(folder / COORDINATORS, json.dumps(listed, indent=1) + "\n")


def _read_known(file: Path) -> dict[str, KnownCoordinator]:
    """Return the coordinators in a file; none if it cannot be read."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        listed = json.loads(file.read_text())
        return {url: KnownCoordinator(**its) for url, its in listed.items()}
    return {}
