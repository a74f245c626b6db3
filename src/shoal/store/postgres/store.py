"""The store in a PostgreSQL database."""

from shoal.store.blobs import BlobStore
from shoal.store.postgres.database import PostgresDatabase
from shoal.store.sql.store import SqlStore


class PostgresStore(SqlStore):
    """Stores everything in one database, which one coordinator at a time may use."""

    def __init__(
        self, url: str, blobs: BlobStore | None = None, node: str = ""
    ) -> None:
        """Name the database; values too large for a row go to ``blobs``.

        ``node``: as in ``PostgresDatabase``.  Raises StoreError if the URL is none.
        """
        database = PostgresDatabase(url, node)
        super().__init__(database, blobs)
        self.holder = database.holder
        self.resume = database.resume
