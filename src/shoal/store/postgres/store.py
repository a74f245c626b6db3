"""The store in a PostgreSQL database."""

from shoal.store.blobs import BlobStore
from shoal.store.postgres.database import PostgresDatabase
from shoal.store.sql.store import SqlStore


class PostgresStore(SqlStore):
    """Stores everything in one database, which one coordinator at a time may use."""

    def __init__(self, url: str, blobs: BlobStore | None = None) -> None:
        """Name the database; values too large for a row go to ``blobs``.

        Raises StoreError if the URL is none.
        """
        super().__init__(PostgresDatabase(url), blobs)
