"""The secrets of a pool: files in the data folder, and rows of a database on a server.

Files that are there, such as mounted ones, count; the database has copies, so that
another machine, or this one without its folder, starts as the same pool.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from shoal.app.fleet_files import FILE as FLEET_FILE
from shoal.app.https import FOLDER as TLS_FOLDER
from shoal.config import ServeConfig
from shoal.config.private_files import make_private_folder, replace_private
from shoal.config.secret_files import KEY_FILE, SEED_FILE, SIGNING_LOG_FILE, TOKEN_FILE
from shoal.domain.credentials import digest_of
from shoal.domain.errors import ConfigError
from shoal.store.postgres.secrets import (
    Secret,
    SecretsChanged,
    read_secrets,
    replace_secrets,
)
from shoal.store.signing_keys import retired_seeds
from shoal.transports.local_authority import (
    AUTHORITY_FILE,
    AUTHORITY_KEY_FILE,
    SERVER_FILE,
    SERVER_KEY_FILE,
)

SERVER_KEY = f"{TLS_FOLDER}/{SERVER_KEY_FILE}"
AUTHORITY = (f"{TLS_FOLDER}/{AUTHORITY_FILE}", f"{TLS_FOLDER}/{AUTHORITY_KEY_FILE}")
SIGNING = (SEED_FILE, SIGNING_LOG_FILE)
NAMES = (KEY_FILE, TOKEN_FILE, FLEET_FILE, *SIGNING, SERVER_KEY, *AUTHORITY)

SEEN_FILE = "secrets-in-database"

log = logging.getLogger("shoal.app")


class NodeSecrets:
    """Keeps a data folder's secrets and those in a database alike.

    All methods block.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._url = config.store
        self._folder = config.data_dir
        self._given = {KEY_FILE} if config.api_key else set()
        self._stored: Mapping[str, Secret] = {}
        self._kept: set[str] = set()  # in the folder, and not made by this start
        self.lacked_witness = False
        """Whether the folder did not have the newest checkpoint that was shown.

        The database, with its copy of the key, may have been restored from a backup.
        """

    def fetch(self) -> None:
        """Write the secrets that only the database has into the folder.

        Raises StoreError; ConfigError if the two are of different pools, or the folder
        cannot be read or written.
        """
        self._stored = read_secrets(self._url)
        with self._folder_errors():
            make_private_folder(self._folder)
            found = self._read()
            lacking = self._lacking(found)
            for name in lacking:
                self._write(name, self._stored[name])
            if {*AUTHORITY} & {*lacking}:
                # This machine's certificate, which another authority has signed.
                (self._folder / TLS_FOLDER / SERVER_FILE).unlink(missing_ok=True)
            self._note_seen()
        self._kept = {*found, *lacking}
        self.lacked_witness = SIGNING_LOG_FILE in lacking
        if lacking:
            log.info("secrets from the database: %s", ", ".join(lacking))

    def publish(self) -> None:
        """Store the secrets that the folder has got since ``fetch`` in the database.

        Raises StoreError, also if another coordinator has stored others meanwhile; then
        this one's new ones are deleted.  Raises ConfigError as ``fetch``.
        """
        with self._folder_errors():
            present = self._read()
            if _equal(SEED_FILE, present, self._stored):
                # Checkpoints in it are shown all the time; all else needs a new seed.
                present.pop(SIGNING_LOG_FILE, None)
            try:
                replace_secrets(self._url, self._stored, present)
            except SecretsChanged:
                self.take_back()
                raise
            self._stored = {**self._stored, **present}
            self._note_seen()
        self._kept = {*present}

    def take_back(self) -> None:
        """Delete what this start has made: another may have begun the pool.

        Raises ConfigError as ``fetch``.
        """
        with self._folder_errors():
            for name in {*self._read()} - self._kept:
                (self._folder / name).unlink()

    @contextmanager
    def _folder_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"--data-dir {self._folder}: {error.strerror}") from error

    def _lacking(self, found: Mapping[str, Secret]) -> list[str]:
        """Return the names of those that are to be written into the folder.

        Raises ConfigError if a secret is another one in the database, and nothing says
        which one replaces the other.
        """
        lacking = {*self._stored} - {*found}
        both = {*found} & {*self._stored}
        seen = self._seen()
        for name in NAMES:
            # The seed says whose log it is.
            if name == SIGNING_LOG_FILE or name not in both:
                continue
            ours, theirs = found[name], self._stored[name]
            # No secret: nobody can try values here.
            if ours.value == theirs.value:
                continue
            if seen.get(name) == _digest(ours) or (
                name == SEED_FILE and _is_retired(ours, self._stored)
            ):
                lacking.add(name)  # another machine has replaced it
            elif seen.get(name) == _digest(theirs) or (
                name in self._given
                or (name == SEED_FILE and _is_retired(theirs, found))
            ):
                continue  # this one has
            elif name in AUTHORITY:
                lacking.add(name)  # of the same key as the server's, which comes before
            else:
                raise ConfigError(
                    f"{self._folder / name} is not the one in the database of --store: "
                    "if this is another pool, give it a database of its own; else "
                    "delete the file to use the one in the database, or run there: "
                    f"DELETE FROM secrets WHERE name = '{name}'"
                )
        if SEED_FILE in lacking:
            lacking |= {*SIGNING} & {*self._stored}
        return [each for each in NAMES if each in lacking]

    def _seen(self) -> dict[str, str]:
        """Return the digests of the secrets that the database had the last time."""
        try:
            text = (self._folder / SEEN_FILE).read_text()
            return msgspec.json.decode(text, type=dict[str, str])
        except (FileNotFoundError, ValueError):
            return {}

    def _note_seen(self) -> None:
        seen = {name: _digest(each) for name, each in self._stored.items()}
        text = msgspec.json.encode(seen, order="sorted").decode()
        replace_private(self._folder / SEEN_FILE, text + "\n")

    def _read(self) -> dict[str, Secret]:
        found = {}
        for name in NAMES:
            file = self._folder / name
            if file.exists():
                found[name] = Secret(file.read_text().strip(), file.stat().st_mtime)
        return found

    def _write(self, name: str, secret: Secret) -> None:
        file = self._folder / name
        make_private_folder(file.parent)
        replace_private(file, secret.value + "\n")
        os.utime(file, (secret.made_at, secret.made_at))


def _equal(name: str, some: Mapping[str, Secret], others: Mapping[str, Secret]) -> bool:
    # No secret: nobody can try values here.
    return name in some and name in others and some[name].value == others[name].value


def _digest(secret: Secret) -> str:
    return digest_of(secret.value).hex()


def _is_retired(seed: Secret, others: Mapping[str, Secret]) -> bool:
    """Return whether other secrets have replaced a signing key."""
    record = others.get(SIGNING_LOG_FILE)
    # No secret: nobody can try values here.
    return record is not None and seed.value in retired_seeds(record.value)
