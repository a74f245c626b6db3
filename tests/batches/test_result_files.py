"""The files of a batch have every result that the store has."""

from pathlib import Path

import pytest

from harness.databases import put_new_database
from shoal.batches.batch_run import ResultFiles
from shoal.store import batches
from shoal.store.batches import (
    BATCH_ID_LENGTH,
    FilePurpose,
    LineResult,
    StoredBatch,
    StoredFile,
)
from shoal.store.contents import ContentStore
from shoal.store.sqlite.database import SqliteStore

BATCH = StoredBatch(
    "batch_".ljust(BATCH_ID_LENGTH, "0"), "al", "/v1/embeddings", "in", "24h", 1.0, 9.0
)


async def test_results_beyond_the_first_page_are_written(
    tmp_path: Path, contents: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "RESULTS_AT_ONCE", 1)  # one line in a page
    put_new_database(tmp_path / "shoal.db")
    store = SqliteStore(tmp_path / "shoal.db")
    results = [LineResult(line, b"%d" % line, failed=line == 3) for line in range(1, 6)]
    names = iter(("output", "error"))
    files = ResultFiles(contents, BATCH, lambda: next(names), 2.0)
    await store.open()
    try:
        sent = StoredFile("in", "al", "in.jsonl", FilePurpose.BATCH, 9, 1.0, None)
        await store.files.add(sent, 1000)
        await store.batches.add(BATCH, 1000)
        await store.batches.record(BATCH.id, results)

        await files.write_recorded(store.batches)
    finally:
        await store.close()

    files.finish()
    with contents.read("output") as output, contents.read("error") as error:
        assert output.read() == b"1\n2\n4\n5\n"
        assert error.read() == b"3\n"
