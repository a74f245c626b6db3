"""A worker's Ed25519 identity: the file that holds it.

The file is JSON: ``publicKey``, 32 numbers, and ``secretKey``, the 32 of the seed and
once more those of the public key.  That is how workers of other programs keep theirs
(TweetNaCl's key pair), so that a worker may come over from there as who it was.
"""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from shoal.domain.errors import ConfigError
from shoal.ledger.keys import KEY_SIZE, Signer

FILE_MAX = 4096  # bytes that are read of it; it has about 500


class KeyPair(msgspec.Struct):
    """What is in the file."""

    publicKey: list[int]  # noqa: N815  # the file's words
    secretKey: list[int]  # noqa: N815


def identity_of(name: str, folder: Path) -> Path:
    """Return the file for a worker of this name: each has a key of its own.

    For a coordinator knows workers by their keys, and two with one key would take each
    other's place.
    """
    return folder / f"{quote(name, safe='', errors='surrogatepass')}.json"


def identity(file: Path) -> Signer:
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
