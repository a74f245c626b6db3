"""The contract of stores for files and batches."""

from dataclasses import replace

import pytest

from shoal.domain.errors import InvalidRequest, NotFound, QueueFull, TooLarge
from shoal.domain.facts import JobFailed, JobSubmitted
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.work import Chat
from shoal.store.batches import (
    BATCH_ID_LENGTH,
    BATCHES_OPEN_MAX,
    RESULT_COST,
    BatchChange,
    BatchError,
    BatchStatus,
    FileFilter,
    FilePurpose,
    LineResult,
    StoredBatch,
    StoredFile,
    line_key,
)
from shoal.store.port import Store

BATCH = StoredBatch(
    "batch_".ljust(BATCH_ID_LENGTH, "0"),
    "al",
    "/v1/embeddings",
    "file-in",
    "24h",
    10.0,
    99.0,
    {"a": "b"},
)
OUTPUT = StoredFile(
    "file-out", "al", "out.jsonl", FilePurpose.BATCH_OUTPUT, 7, 20.0, None
)
OPEN = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


def file(name: str, owner: str = "al", expires_at: float | None = None) -> StoredFile:
    return StoredFile(name, owner, "in.jsonl", FilePurpose.BATCH, 100, 1.0, expires_at)


async def add_batch(store: Store, batch: StoredBatch = BATCH) -> None:
    """Add a batch, and before it its input file if it is not there."""
    if await store.files.find(batch.input_file) is None:
        await store.files.add(file(batch.input_file), 1000)
    await store.batches.add(batch, 1000)


async def test_files_of_an_owner_are_listed_in_order(store: Store) -> None:
    for name in "abc":
        await store.files.add(file(name), 1000)
    await store.files.add(file("d", "bob"), 1000)
    await store.files.add(OUTPUT, 1000)
    inputs = FileFilter("al", FilePurpose.BATCH)

    newest = await store.files.listed(inputs, 2)
    place = await store.files.place("b")
    assert place is not None
    older = await store.files.listed(replace(inputs, after=place.number), 2)
    oldest = await store.files.listed(FileFilter("al", newest_first=False), 9)

    assert [each.id for each in newest] == ["c", "b"]
    assert older == [file("a")]
    assert [each.id for each in oldest] == ["a", "b", "c", "file-out"]
    assert await store.files.size_of("al") == 307
    assert await store.files.find("d") == file("d", "bob")
    assert await store.files.known(["a", "none"]) == {"a"}


async def test_deleted_file_leaves_its_place_in_the_list(store: Store) -> None:
    for name in "abcd":
        await store.files.add(file(name), 1000)
    before = await store.files.place("c")
    for name in "cd":
        assert await store.files.remove(name)

    place = await store.files.place("c")

    assert place is not None
    assert place == before
    older = await store.files.listed(FileFilter("al", after=place.number), 9)
    assert [each.id for each in older] == ["b", "a"]
    assert await store.files.place("none") is None
    place = await store.files.place("d")
    assert place is not None
    await store.files.add(file("new"), 1000)
    later = FileFilter("al", after=place.number, newest_first=False)
    assert await store.files.listed(later, 9) == [file("new")]


async def test_pruned_batch_leaves_its_place_in_the_list(store: Store) -> None:
    await add_batch(store, BATCH)
    before = await store.batches.place(BATCH.id)
    await store.batches.change(BATCH.id, BatchChange(BatchStatus.FAILED, 11.0), OPEN)
    assert await store.batches.drop_results(1000)
    await store.prune(12.0)
    assert await store.batches.find(BATCH.id) is None

    place = await store.batches.place(BATCH.id)

    assert place is not None
    assert place == before


async def test_file_beyond_the_limit_of_its_owner_is_not_added(store: Store) -> None:
    await store.files.add(file("a"), 199)
    await store.files.add(file("b", "bob"), 199)

    with pytest.raises(TooLarge):
        await store.files.add(file("c"), 199)

    assert await store.files.find("c") is None


async def test_batch_of_an_owner_at_its_limit_is_not_added(store: Store) -> None:
    await store.files.add(file("file-in"), 100)

    with pytest.raises(TooLarge, match="limit of 100 bytes: delete some first"):
        await store.batches.add(BATCH, 100)

    assert await store.batches.find(BATCH.id) is None
    await store.batches.add(BATCH, 101)


async def test_files_that_open_batches_may_write_count(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.store.batches.FILES_MAX", 4)
    await add_batch(store)
    more = replace(BATCH, id=f"{BATCH.id}1")

    with pytest.raises(TooLarge, match="limit is 4: delete some first"):
        await store.batches.add(more, 1000)
    await store.files.add(file("a"), 1000)
    with pytest.raises(TooLarge, match="limit is 4: delete some first"):
        await store.files.add(file("b"), 1000)

    await store.batches.change(BATCH.id, BatchChange(BatchStatus.FAILED, 11.0), OPEN)
    await store.batches.add(more, 1000)


async def test_file_of_an_open_batch_stays(store: Store) -> None:
    await store.files.add(file("file-in", expires_at=5.0), 1000)
    await store.files.add(file("old", expires_at=5.0), 1000)
    await add_batch(store, BATCH)

    assert await store.files.expired(5.0, 9) == ["old"]
    with pytest.raises(InvalidRequest, match=BATCH.id):
        await store.files.remove("file-in")
    await store.batches.change(BATCH.id, BatchChange(BatchStatus.FAILED, 11.0), OPEN)
    assert await store.files.remove("file-in")
    assert not await store.files.remove("file-in")


async def test_batch_changes_from_an_expected_status_alone(store: Store) -> None:
    await add_batch(store, BATCH)
    begin = BatchChange(BatchStatus.IN_PROGRESS, 11.0, "m", 3)
    done = BatchChange(BatchStatus.COMPLETED, 20.0, output=OUTPUT)

    assert await store.batches.change(BATCH.id, begin, OPEN)
    assert not await store.batches.change(BATCH.id, begin, (BatchStatus.VALIDATING,))
    assert not await store.batches.change("none", begin, OPEN)
    await store.batches.record(BATCH.id, [LineResult(2, b"{}")])
    (opened,) = await store.batches.open()
    assert await store.batches.change(BATCH.id, done, OPEN)

    assert opened == replace(
        BATCH,
        status=BatchStatus.IN_PROGRESS,
        model="m",
        lines=3,
        completed=1,
        times={BatchStatus.IN_PROGRESS: 11.0},
    )
    assert await store.batches.open() == []
    assert await store.batches.listed("al", None, 9) == [
        replace(
            opened,
            status=BatchStatus.COMPLETED,
            output_file="file-out",
            times={BatchStatus.IN_PROGRESS: 11.0, BatchStatus.COMPLETED: 20.0},
        )
    ]
    place = await store.batches.place(BATCH.id)
    assert place is not None
    assert await store.batches.listed("al", place.number, 9) == []
    assert await store.files.find("file-out") == OUTPUT


async def test_errors_of_a_batch_are_kept(store: Store) -> None:
    await add_batch(store, BATCH)
    errors = (BatchError("bad", "line é", 7, "url"), BatchError("worse", ""))

    failed = BatchChange(BatchStatus.FAILED, 11.0, errors=errors)
    await store.batches.change(BATCH.id, failed, OPEN)

    found = await store.batches.find(BATCH.id)
    assert found is not None
    assert found.errors == errors


async def test_result_of_a_line_counts_once(store: Store) -> None:
    await add_batch(store, BATCH)
    results = [LineResult(3, b"c" * 500), LineResult(1, b"a", failed=True)]

    await store.batches.record(BATCH.id, results)
    await store.batches.record(BATCH.id, [*results, LineResult(2, b"b")])

    found = await store.batches.find(BATCH.id)
    assert found is not None
    assert (found.completed, found.failed) == (2, 1)
    assert sorted(await store.batches.recorded(BATCH.id)) == [1, 2, 3]
    assert await store.batches.results(BATCH.id, 0, 2 * RESULT_COST) == [
        results[1],
        LineResult(2, b"b"),
    ]
    assert await store.batches.results(BATCH.id, 2, 1) == [results[0]]


async def test_results_are_dropped_when_the_batch_has_ended(store: Store) -> None:
    await add_batch(store, BATCH)
    results = [LineResult(n, b"0" * 100) for n in range(1, 6)]
    await store.batches.record(BATCH.id, results)
    size = 3 * results[0].size

    assert not await store.batches.drop_results(size)
    done = BatchChange(BatchStatus.COMPLETED, 20.0)
    await store.batches.change(BATCH.id, done, OPEN)

    assert await store.batches.drop_results(size)
    assert sorted(await store.batches.recorded(BATCH.id)) == [4, 5]
    assert await store.batches.drop_results(size)
    assert not await store.batches.drop_results(size)
    assert await store.batches.recorded(BATCH.id) == []
    await store.prune(21.0)
    assert await store.batches.find(BATCH.id) is None


async def test_batch_whose_file_was_deleted_is_not_added(store: Store) -> None:
    await store.files.add(file("file-in"), 1000)
    await store.files.remove("file-in")

    with pytest.raises(NotFound, match="file-in"):
        await store.batches.add(BATCH, 1000)

    assert await store.batches.find(BATCH.id) is None


async def test_owner_has_few_open_batches(store: Store) -> None:
    for number in range(BATCHES_OPEN_MAX):
        await add_batch(store, replace(BATCH, id=f"{BATCH.id}{number}"))

    with pytest.raises(QueueFull):
        await add_batch(store, BATCH)
    await add_batch(store, replace(BATCH, owner="bob"))


async def test_jobs_of_an_open_batch_are_not_pruned(store: Store) -> None:
    await add_batch(store, BATCH)
    work = Chat("m", ({"role": "user", "content": "hi"},))
    batch = replace(BATCH, lines=7)
    keys = [line_key(BATCH.id, 7), line_key(BATCH.id, 8), f"{BATCH.id}/mine", "x", ""]
    for number, key in enumerate(keys):
        job = Job(JobId(f"j{number}"), work, owner="al", idempotency_key=key)
        await store.append([JobSubmitted(job), JobFailed(job.id, "no")], 1.0)

    assert await store.batches.begun(batch) == [7]
    assert await store.prune(2.0) == 2
    assert not await store.delete_job(JobId("j0"))
    assert await store.batches.begun(batch) == [7]

    failed = BatchChange(BatchStatus.FAILED, 11.0)
    await store.batches.change(BATCH.id, failed, OPEN)
    assert await store.delete_job(JobId("j0"))
    assert await store.prune(2.0) == 2
