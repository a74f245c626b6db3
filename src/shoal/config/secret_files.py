"""The secrets in the coordinator's data directory, readable only by its user."""

import secrets  # noqa: TID251  # it makes them
import string
from contextlib import suppress
from pathlib import Path

from shoal.config import private_files
from shoal.domain.credentials import without_fingerprint
from shoal.domain.errors import ConfigError

SECRET_SIZE = 20  # bytes; in hex, since an argument must not begin with a dash
KEY_FILE = "api-key"
SEED_FILE = "signing-key"
SIGNING_LOG_FILE = "signing-log"  # of keys that were retired, and what was signed
SEED_SIZE = 32  # bytes
TOKEN_FILE = "join-token"
CERTIFICATE_FILE = "certificate.pem"


def new_secret() -> str:
    """Return a random secret in hexadecimal."""
    return secrets.token_hex(SECRET_SIZE)


def first_key(folder: Path, given: str) -> str:
    """Return the first API key: the one given, or one created at first use.

    Stores it for commands on this machine.

    Raises ConfigError if the given one is invalid, OSError.
    """
    given, _ = without_fingerprint(given)  # the variable may be for clients
    if not given:
        return _load_or_create(folder / KEY_FILE, "sk-shoal-")
    if not given.isascii() or not given.isprintable() or " " in given:
        raise ConfigError("--api-key: expected printable ASCII without spaces")
    private_files.write_private(folder / KEY_FILE, given + "\n")
    return given


def first_token(folder: Path, given: str | None) -> str:
    """Return the join token of workers; empty: none required.

    Raises ConfigError, OSError.
    """
    if given is None:
        return _load_or_create(folder / TOKEN_FILE, "")
    return without_fingerprint(given)[0]


def signing_seed(folder: Path) -> bytes:
    """Return the seed of the coordinator's signing key, 32 bytes.

    Raises ConfigError if it is damaged, OSError.
    """
    file = folder / SEED_FILE
    with suppress(FileExistsError):
        private_files.create_with(file, secrets.token_hex(SEED_SIZE) + "\n")
    kept = _read_private(file)
    if len(kept) != 2 * SEED_SIZE or not set(kept) <= set(string.hexdigits):
        # A new key would make receipts signed with the old one look forged.
        raise ConfigError(
            f"{file} is damaged: restore it from a backup, or delete it to sign later "
            "receipts with a new key"
        )
    return bytes.fromhex(kept)


def new_signing_seed(folder: Path) -> bytes:
    """Replace the signing key by a new one; return its seed.  Raises OSError."""
    seed = secrets.token_bytes(SEED_SIZE)
    private_files.replace_private(folder / SEED_FILE, seed.hex() + "\n")
    return seed


def signing_key_created_at(folder: Path) -> float:
    """Return the Unix time at which the signing key was made: its file never changes.

    Raises OSError if there is none yet.
    """
    return (folder / SEED_FILE).stat().st_mtime


def store_certificate(folder: Path, certificate: str | None) -> None:
    """Store the certificate for commands on this machine; None: delete it.

    Raises OSError.
    """
    file = folder / CERTIFICATE_FILE
    if certificate is None:
        file.unlink(missing_ok=True)
    else:
        private_files.write_private(file, certificate)


def _load_or_create(file: Path, prefix: str) -> str:
    """Return the secret in a file, which is created at first use."""
    with suppress(FileNotFoundError):
        if secret := _read_private(file):
            return secret
        # An empty secret would admit anyone.
        raise ConfigError(f"{file} is empty: delete it to get a new one")
    made = prefix + new_secret()
    private_files.create_with(file, made + "\n")
    return made


def _read_private(file: Path) -> str:
    """Return a secret, which an older version may have left readable to others."""
    private_files.restrict(file)
    return file.read_text().strip()
