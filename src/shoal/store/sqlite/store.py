"""The store in one SQLite file."""

from pathlib import Path

from shoal.store.blobs import BlobStore
from shoal.store.sql.store import SqlStore
from shoal.store.sqlite.database import SqliteDatabase


class SqliteStore(SqlStore):
    """Stores everything in one file, which one process at a time may use."""

    def __init__(self, path: Path, blobs: BlobStore | None = None) -> None:
        """Name the file; values too large for a row go to ``blobs``."""
        super().__init__(SqliteDatabase(path), blobs)
