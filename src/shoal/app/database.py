"""Which database a coordinator uses: a file of its own, or one on a server."""

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import ServeConfig
from shoal.config.installation import install_extra
from shoal.domain.errors import ConfigError, StoreError
from shoal.store.blobs import BlobStore
from shoal.store.contents import ContentStore
from shoal.store.file_folder import FILES_FOLDER, FileFolder
from shoal.store.lease import Lease, SharedStore
from shoal.store.port import Store
from shoal.store.sqlite.database import DATABASE
from shoal.store.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from shoal.app.node_secrets import NodeSecrets

SCHEMES = ("postgresql://", "postgres://")
EXAMPLE = "postgresql://USER@HOST/DATABASE"


def store_at(url: str, data_dir: Path, blobs: BlobStore | None = None) -> Store:
    """Return the store at a URL; without one, that in the data folder.

    Raises ConfigError.
    """
    return (
        shared_store_at(url, blobs) if url else SqliteStore(data_dir / DATABASE, blobs)
    )


def shared_store_at(
    url: str, blobs: BlobStore | None = None, node: str = ""
) -> SharedStore:
    """Return the store on a server; ``node``: as in ``PostgresDatabase``.

    Raises ConfigError.
    """
    if not url.startswith(SCHEMES):
        raise ConfigError(f"--store: expected {EXAMPLE}, without it a file is used")
    try:
        from shoal.store.postgres.store import PostgresStore
    except ImportError as error:
        raise ConfigError(
            f"--store: PostgreSQL needs psycopg ({error}): {install_extra('postgres')}"
        ) from error
    try:
        return PostgresStore(url, blobs, node)
    except StoreError as error:
        raise ConfigError(f"--store: {error}") from error


def lease_at(url: str) -> Lease:
    """Return the lease of the database at a URL that ``shared_store_at`` takes."""
    from shoal.store.postgres.lease import PostgresLease

    return PostgresLease(url)


def contents_at(url: str, data_dir: Path) -> ContentStore:
    """Return where the contents of files are: beside the database, in either case."""
    if not url:
        return FileFolder(data_dir / FILES_FOLDER)
    from shoal.store.postgres.contents import FILES, ContentRows  # late: with psycopg

    return ContentRows(url, FILES)


def shared_secrets(config: ServeConfig) -> "NodeSecrets | None":
    """Return the secrets that a database on a server has, too; None: there is none.

    The store must have been opened or named by ``store_at`` before.
    """
    if not config.store:
        return None
    from shoal.app.node_secrets import NodeSecrets  # late: with psycopg and x509

    return NodeSecrets(config)
