"""The secrets in the coordinator's data directory, readable only by its user."""

import os
import secrets
import string
from contextlib import suppress
from pathlib import Path

from shoal.domain.errors import ConfigError

SECRET_SIZE = 20  # bytes; in hex, for a token that begins with a dash is no argument
KEY_FILE = "api-key"
SEED_FILE = "signing-key"
SEED_SIZE = 32  # bytes
TOKEN_FILE = "join-token"
CERTIFICATE_FILE = "certificate.pem"


def new_secret() -> str:
    """Return a secret that nobody guesses, in letters and digits."""
    return secrets.token_hex(SECRET_SIZE)


def first_key(folder: Path, given: str) -> str:
    """Return the first API key.

    One that was given is kept, for commands on this machine.

    Raises ConfigError if it cannot be one, OSError.
    """
    if not given:
        return _load_or_create(folder / KEY_FILE, "sk-shoal-")
    if not given.isascii() or not given.isprintable() or " " in given:
        raise ConfigError("--api-key: expected printable ASCII without spaces")
    write_private(folder / KEY_FILE, given + "\n")
    return given


def first_token(folder: Path, given: str | None) -> str:
    """Return what workers present; empty: anything.

    Raises ConfigError, OSError.
    """
    return _load_or_create(folder / TOKEN_FILE, "") if given is None else given


def signing_seed(folder: Path) -> bytes:
    """Return what the coordinator signs receipts with, 32 bytes.

    Raises ConfigError if it is damaged, OSError.
    """
    file = folder / SEED_FILE
    made = secrets.token_hex(SEED_SIZE)
    with suppress(FileExistsError), open(file, "x", opener=_open_private) as new:
        new.write(made + "\n")
    kept = file.read_text().strip()
    if len(kept) != 2 * SEED_SIZE or not set(kept) <= set(string.hexdigits):
        # Not made anew: receipts signed with it could not be told from forged ones.
        raise ConfigError(
            f"{file} is damaged: put back a copy of it; if there is none, delete it, "
            "and receipts are signed with a new key from now on"
        )
    return bytes.fromhex(kept)


def store_certificate(folder: Path, certificate: str | None) -> None:
    """Keep the certificate for commands on this machine, or forget the last one.

    Raises OSError.
    """
    file = folder / CERTIFICATE_FILE
    if certificate is None:
        file.unlink(missing_ok=True)
    else:
        write_private(file, certificate)


def write_private(file: Path, text: str) -> None:
    """Write a file that only its user may read.  Raises OSError."""
    with open(file, "w", opener=_open_private) as kept:
        kept.write(text)


def _load_or_create(file: Path, prefix: str) -> str:
    """Return the secret that a file holds, made at first use."""
    with suppress(FileNotFoundError):
        if secret := file.read_text().strip():
            return secret
        # Not taken as "no secret": that would open the door to anyone.
        raise ConfigError(f"{file} is empty: delete it, and a new one is made")
    made = prefix + new_secret()
    with open(file, "x", opener=_open_private) as new:
        new.write(made + "\n")
    return made


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
