"""Which database a coordinator uses: a file of its own, or one on a server."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import ServeConfig
from shoal.config.installation import install_extra
from shoal.domain.errors import ConfigError, StoreError
from shoal.store.blobs import BLOBS_FOLDER, BlobFiles, BlobStore
from shoal.store.contents import ContentStore
from shoal.store.file_folder import FILES_FOLDER, FileFolder
from shoal.store.lease import Lease, SharedStore
from shoal.store.port import Store
from shoal.store.shared_blobs import SharedBlobs
from shoal.store.sqlite.database import DATABASE, SqliteStore

if TYPE_CHECKING:
    from shoal.app.node_secrets import NodeSecrets

SCHEMES = ("postgresql://", "postgres://")
BUCKET_SCHEME = "s3://"
EXAMPLE = "postgresql://USER@HOST/DATABASE"


def check_store(url: str) -> None:
    """Raise ConfigError if there can be no database at a URL; empty: a file."""
    if not url:
        return
    if not url.startswith(SCHEMES):
        raise ConfigError(f"--store: expected {EXAMPLE}, without it a file is used")
    try:
        from shoal.store.postgres.database import PostgresDatabase
    except ImportError as error:
        raise ConfigError(
            f"--store: PostgreSQL needs psycopg ({error}): {install_extra('postgres')}"
        ) from error
    try:
        PostgresDatabase(url)
    except StoreError as error:
        raise ConfigError(f"--store: {error}") from error


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
    check_store(url)
    from shoal.store.postgres.database import PostgresStore  # late: with psycopg

    return PostgresStore(url, blobs, node)


def lease_at(url: str) -> Lease:
    """Return the lease of the database at a URL that ``shared_store_at`` takes."""
    from shoal.store.postgres.lease import PostgresLease

    return PostgresLease(url)


@contextmanager
def contents_at(
    config: ServeConfig, blobs_max: int
) -> Iterator[tuple[ContentStore, BlobStore]]:
    """Give the contents of files, and large values, where the settings say.

    They can be used in the block, once the store is open.  Raises ConfigError.
    """
    check_store(config.store)
    near = BlobFiles(config.data_dir / BLOBS_FOLDER, blobs_max)
    if config.contents:
        files, blobs = _objects(config.contents)
        yield files, SharedBlobs(blobs, near, blobs_max)
        return
    if not config.store:
        yield FileFolder(config.data_dir / FILES_FOLDER), near
        return
    from shoal.store.postgres.contents import (  # late: with psycopg
        BLOBS,
        FILES,
        ContentRows,
        ContentSessions,
    )

    with closing(ContentSessions(config.store)) as sessions:
        rows = ContentRows(sessions, BLOBS)
        yield ContentRows(sessions, FILES), SharedBlobs(rows, near, blobs_max)


def _objects(url: str) -> tuple[ContentStore, ContentStore]:
    """Return the contents of files and of large values in a bucket.

    Raises ConfigError.
    """
    if not url.startswith(BUCKET_SCHEME):
        raise ConfigError(f"--contents {url}: expected {BUCKET_SCHEME}BUCKET/PREFIX")
    try:
        from shoal.store.content_objects import ContentObjects
    except ImportError as error:
        raise ConfigError(
            f"--contents: S3 needs obstore ({error}): {install_extra('s3')}"
        ) from error
    try:
        return ContentObjects(url, FILES_FOLDER), ContentObjects(url, BLOBS_FOLDER)
    except StoreError as error:
        raise ConfigError(f"--contents: {error}") from error


def shared_secrets(config: ServeConfig) -> "NodeSecrets | None":
    """Return the secrets that a database on a server has, too; None: there is none.

    ``check_store`` must have accepted the URL.
    """
    if not config.store:
        return None
    from shoal.app.node_secrets import NodeSecrets  # late: with psycopg and x509

    return NodeSecrets(config)
