"""The stores of contents, each in turn."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from harness.postgres import PostgresServer
from shoal.store.contents import ContentStore
from shoal.store.file_folder import FILES_FOLDER, FileFolder
from shoal.store.postgres.contents import FILES, ContentRows, ContentSessions
from shoal.store.postgres.schema import migrate
from shoal.store.postgres.session import Session, connect


@pytest.fixture(params=["folder", "rows", "objects"])
def contents(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ContentStore]:
    """Open a store of contents, which is empty."""
    if request.param == "folder":
        folder = FileFolder(tmp_path / "files")
        folder.open()
        yield folder
        return
    if request.param == "objects":
        url = request.getfixturevalue("bucket")
        from shoal.store.content_objects import ContentObjects

        yield ContentObjects(url, FILES_FOLDER)
        return
    url = with_tables(request.getfixturevalue("postgres"))
    with closing(ContentSessions(url)) as sessions:
        yield ContentRows(sessions, FILES)


def with_tables(server: PostgresServer) -> str:
    """Return the URL of a database without contents."""
    session = Session(connect(server.url()))
    with session.connection.transaction():
        migrate(session, create=True)
        session.execute("DELETE FROM contents")
    session.close()
    return server.url()
