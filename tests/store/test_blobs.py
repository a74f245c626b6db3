"""Large values in files and in memory."""

import asyncio
import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest

from harness.contents import with_tables
from harness.postgres import PostgresServer
from harness.synced import needs_folder_sync, synced_files
from shoal.domain.errors import InvalidRequest, NotFound, StoreError
from shoal.domain.facts import JobCancelled, JobCompleted, JobLeased, JobSubmitted
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job
from shoal.domain.outcome import Outcome
from shoal.domain.work import Call, Feature, JobKind
from shoal.store.blobs import BLOBS_FOLDER, BlobFiles, BlobStore, MemoryBlobs
from shoal.store.codec import LARGE_FROM
from shoal.store.contents import ContentStore, write_contents
from shoal.store.port import JobFilter
from shoal.store.postgres.contents import BLOBS, ContentRows, ContentSessions
from shoal.store.shared_blobs import SharedBlobs
from shoal.store.sqlite.database import SqliteStore

LARGE = b"x" * LARGE_FROM


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blobs"


def opened(folder: Path, size_max: int = 1 << 30) -> BlobFiles:
    files = BlobFiles(folder, size_max)
    files.open()
    return files


Opening: TypeAlias = Callable[[int], BlobStore]


@pytest.fixture(params=["files", "rows", "objects"])
def opening(request: pytest.FixtureRequest, folder: Path) -> Iterator[Opening]:
    """Return what opens a store of so many bytes, with what the last one left."""
    if request.param == "files":
        yield partial(opened, folder)
        return

    def open_shared(contents: ContentStore, size_max: int) -> BlobStore:
        blobs = SharedBlobs(contents, BlobFiles(folder, size_max), size_max)
        blobs.open()
        return blobs

    if request.param == "objects":
        url = request.getfixturevalue("bucket")
        from shoal.store.content_objects import ContentObjects

        yield partial(open_shared, ContentObjects(url, BLOBS_FOLDER))
        return
    url = with_tables(request.getfixturevalue("postgres"))
    with closing(ContentSessions(url)) as sessions:
        yield partial(open_shared, ContentRows(sessions, BLOBS))


@pytest.fixture
def blobs(opening: Opening) -> BlobStore:
    return opening(1 << 30)


def test_memory_keeps_values_until_the_process_ends() -> None:
    blobs = MemoryBlobs()
    blobs.open()

    assert blobs.keep(LARGE) == digest(LARGE)
    assert bytes(blobs.read(digest(LARGE))) == LARGE
    assert not blobs.has(digest(b"x"))
    with pytest.raises(NotFound, match=digest(b"x").hex()):
        blobs.read(digest(b"x"))
    with pytest.raises(InvalidRequest, match="expected"):
        blobs.keep(b"x", digest(b"y"))


@pytest.mark.parametrize("data", [b"", b"small", LARGE])
def test_stored_value_can_be_read(blobs: BlobStore, data: bytes) -> None:
    assert blobs.keep(data) == digest(data)
    assert blobs.keep(memoryview(data), digest(data)) == digest(data)

    assert blobs.has(digest(data))
    assert bytes(blobs.read(digest(data))) == data


@needs_folder_sync
def test_value_and_its_name_are_synced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = opened(folder)
    synced = synced_files(monkeypatch)

    files.keep(LARGE)

    name = digest(LARGE).hex()
    assert synced == {name[:2], name[2:]}


def test_missing_value_is_named_by_its_digest(blobs: BlobStore) -> None:
    assert not blobs.has(digest(b"x"))
    with pytest.raises(NotFound, match=digest(b"x").hex()):
        blobs.read(digest(b"x"))


def test_value_with_a_wrong_digest_is_rejected(blobs: BlobStore) -> None:
    with pytest.raises(InvalidRequest, match="expected"):
        blobs.keep(b"x", digest(b"y"))
    assert not blobs.has(digest(b"x"))


def test_values_are_found_after_reopening(opening: Opening) -> None:
    opening(30).keep(b"1" * 10)
    opening(30).keep(b"2" * 10)

    values = opening(10)

    assert bytes(values.read(digest(b"1" * 10))) == b"1" * 10
    assert bytes(values.read(digest(b"2" * 10))) == b"2" * 10
    values.keep(b"3" * 5)  # not before this are there too many bytes
    assert not values.has(digest(b"1" * 10))
    assert not opening(30).has(digest(b"1" * 10))
    assert opening(30).has(digest(b"3" * 5))


def test_unfinished_files_are_deleted(folder: Path) -> None:
    opened(folder).keep(b"x")
    (folder / "ab").mkdir()
    (folder / "ab" / "half.part").write_bytes(b"y")

    files = opened(folder)

    assert bytes(files.read(digest(b"x"))) == b"x"
    assert not (folder / "ab" / "half.part").exists()


def test_unknown_file_in_the_folder_is_named(folder: Path) -> None:
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "notes.txt").write_bytes(b"y")

    with pytest.raises(StoreError) as caught:
        opened(folder)

    assert "blobs: " in caught.value.located


def test_least_recently_used_values_are_evicted_first(opening: Opening) -> None:
    files = opening(30)
    one, two, three, four = (bytes([number]) * 10 for number in range(4))
    for data in (one, two, three):
        files.keep(data)

    assert files.has(digest(one))  # which counts as a use
    files.keep(four)

    assert not files.has(digest(two))
    assert all(files.has(digest(data)) for data in (one, three, four))
    again = opening(30)
    assert not again.has(digest(two))
    assert all(again.has(digest(data)) for data in (one, three, four))


def test_evicted_files_are_deleted(folder: Path) -> None:
    files = opened(folder, size_max=20)
    for number in range(3):
        files.keep(bytes([number]) * 10)

    assert len([*folder.glob("??/*")]) == 2


def test_owner_of_the_most_bytes_makes_room(opening: Opening) -> None:
    files = opening(30)
    small, flood = b"b" * 6, [bytes([n]) * 8 for n in range(9)]
    files.keep(small, owner="bob")

    for each in flood:
        files.keep(each, owner="alice")

    assert files.has(digest(small))
    kept = [each for each in flood if files.has(digest(each))]
    assert kept == flood[-3:]
    files.keep(b"c" * 20, owner="carol")
    assert files.has(digest(small))
    assert not any(files.has(digest(each)) for each in flood)


class CountedPins(Counter[bytes]):
    """Pins, and how often one was looked up."""

    looked_up = 0

    def __contains__(self, digest: object) -> bool:
        self.looked_up += 1
        return super().__contains__(digest)


def test_each_value_is_examined_once_to_make_room_for_a_large_one(
    folder: Path,
) -> None:
    files = opened(folder, size_max=60)
    pins = files._index._pins = CountedPins()
    for number in range(60):
        files.keep(bytes([number]), owner="alice")
        if number < 40:
            files.pin(digest(bytes([number])))

    files.keep(bytes(15), owner="bob")

    assert pins.looked_up <= 60
    kept = [number for number in range(60) if files.has(digest(bytes([number])))]
    assert kept == [*range(40), *range(55, 60)]


def test_pinned_value_is_not_evicted(opening: Opening) -> None:
    files = opening(15)
    files.keep(b"1" * 10)
    files.pin(digest(b"1" * 10))
    files.pin(digest(b"1" * 10))
    files.unpin(digest(b"1" * 10))

    files.keep(b"2" * 10)
    files.keep(b"3" * 10)
    assert files.has(digest(b"1" * 10))
    assert not files.has(digest(b"2" * 10))

    files.unpin(digest(b"1" * 10))
    files.keep(b"4" * 10)
    assert not files.has(digest(b"1" * 10))


# Values that other machines can read, too.


def test_value_comes_near_when_it_is_read(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    with closing(ContentSessions(with_tables(postgres))) as sessions:
        rows = ContentRows(sessions, BLOBS)
        first = SharedBlobs(rows, BlobFiles(tmp_path / "a", 50), 50)
        first.open()
        first.keep(b"x" * 10)
        second = SharedBlobs(rows, BlobFiles(tmp_path / "b", 15), 50)
        second.open()
        assert second.has(digest(b"x" * 10))
        assert not second.is_near(digest(b"x" * 10))

        assert bytes(second.read(digest(b"x" * 10))) == b"x" * 10

        assert second.is_near(digest(b"x" * 10))
        second.keep(b"y" * 10)
        assert second.has(digest(b"x" * 10))
        assert not second.is_near(digest(b"x" * 10))
        # Another one has evicted it meanwhile.
        rows.remove(digest(b"x" * 10).hex())
        with pytest.raises(NotFound):
            second.read(digest(b"x" * 10))


def test_damaged_value_is_an_error(tmp_path: Path, postgres: PostgresServer) -> None:
    with closing(ContentSessions(with_tables(postgres))) as sessions:
        rows = ContentRows(sessions, BLOBS)
        write_contents(rows, digest(b"x").hex(), [b"y"])
        blobs = SharedBlobs(rows, BlobFiles(tmp_path / "near"), 50)
        blobs.open()

        with pytest.raises(StoreError, match="is damaged"):
            blobs.read(digest(b"x"))


def test_full_disk_leaves_values_afar(tmp_path: Path, postgres: PostgresServer) -> None:
    with closing(ContentSessions(with_tables(postgres))) as sessions:
        rows, near = ContentRows(sessions, BLOBS), tmp_path / "near"
        blobs = SharedBlobs(rows, BlobFiles(near), 50)
        blobs.open()
        near.rmdir()
        near.write_bytes(b"in the way")

        blobs.keep(b"x")

        assert not blobs.is_near(digest(b"x"))
        assert bytes(blobs.read(digest(b"x"))) == b"x"


def test_one_value_can_be_written_twice_at_a_time(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    with (
        closing(ContentSessions(with_tables(postgres))) as sessions,
        ThreadPoolExecutor(8) as threads,
    ):
        rows = ContentRows(sessions, BLOBS)
        blobs = SharedBlobs(rows, BlobFiles(tmp_path / "near"), 1 << 30)
        blobs.open()

        kept = {*threads.map(blobs.keep, [LARGE] * 16)}

        assert kept == {digest(LARGE)}
        assert rows.open() == {digest(LARGE).hex(): len(LARGE)}


# Calls in the database.

J, LEASE = JobId("j"), LeaseNumber(1)


async def stored(
    tmp_path: Path, files: BlobStore, args: bytes = b"\x90", value: bytes = b"\xc0"
) -> SqliteStore:
    """Return a store with a completed call, and its job."""
    store = SqliteStore(tmp_path / "shoal.db", files)
    await store.open()
    needs = frozenset({Feature.VALUES})
    call = Call("f", args, b"\x80", 2.5, needs, (digest(b"b"),), "3.12")
    await store.append([JobSubmitted(Job(J, call, owner="a"))], 1.0)
    if value:
        leased = JobLeased(J, WorkerId("w"), LEASE, "")
        outcome = Outcome("", value=value, blobs=(digest(b"c"),))
        await store.append([leased, JobCompleted(J, LEASE, outcome)], 2.0)
    return store


async def test_call_and_value_are_stored_unchanged(
    tmp_path: Path, folder: Path
) -> None:
    store = await stored(tmp_path, opened(folder), b"\x91\xc4\x01\xff", b"\xc4\x01\xff")

    job = await store.job(J)

    assert job is not None
    assert job.job.work == Call(
        *("f", b"\x91\xc4\x01\xff", b"\x80", 2.5),
        frozenset({Feature.VALUES}),
        (digest(b"b"),),
        "3.12",
    )
    assert job.outcome == Outcome("", value=b"\xc4\x01\xff", blobs=(digest(b"c"),))
    (listed,) = (await store.recent(JobFilter(kind=JobKind.CALL), 10)).jobs
    assert listed.model == "f"
    assert (await store.keys.usage_of("a", 0)).requests == 1
    await store.close()


async def test_large_value_is_stored_in_a_file(tmp_path: Path, folder: Path) -> None:
    files = opened(folder)
    store = await stored(tmp_path, files, LARGE, LARGE + b"y")

    job = await store.job(J)

    assert job is not None
    assert isinstance(job.job.work, Call)
    assert job.job.work.args == LARGE
    assert job.outcome == Outcome("", blobs=(digest(LARGE + b"y"), digest(b"c")))
    sizes = "SELECT length(function_call) + length(value) FROM jobs"
    ((size,),) = await store.database.transact(
        lambda sql: sql.execute(sizes).fetchall()
    )
    assert size < 300
    assert bytes(files.read(digest(LARGE + b"y"))) == LARGE + b"y"
    await store.close()


async def test_large_values_are_written_outside_of_the_transaction(
    tmp_path: Path,
) -> None:
    within: list[bool] = []

    class Watched(MemoryBlobs):
        def keep(
            self,
            data: bytes | memoryview,
            expected: bytes | None = None,
            owner: str = "",
        ) -> bytes:
            if not self.has(digest(bytes(data))):
                within.append(store.database._opened.in_transaction)
            return super().keep(data, expected, owner)

    store = SqliteStore(tmp_path / "shoal.db", Watched())
    await store.open()
    call = Call("f", LARGE, LARGE + b"x", 2.5, frozenset(), (), "3.12")
    leased = JobLeased(J, WorkerId("w"), LEASE, "")
    outcome = Outcome("", value=LARGE + b"y")

    await store.append([JobSubmitted(Job(J, call, owner="a")), leased], 1.0)
    await store.append([JobCompleted(J, LEASE, outcome)], 2.0)

    assert within == [False] * 3
    await store.close()


@pytest.mark.parametrize("restarted", [False, True])
async def test_arguments_of_an_open_call_are_never_evicted(
    tmp_path: Path, folder: Path, opening: Opening, restarted: bool
) -> None:
    files = opening(2 * LARGE_FROM)
    store = await stored(tmp_path, files, LARGE, value=b"")
    if restarted:
        await store.close()
        if isinstance(files, SharedBlobs):  # it may be on another machine by now
            await asyncio.to_thread(shutil.rmtree, folder)
        files = opening(2 * LARGE_FROM)
        store = SqliteStore(tmp_path / "shoal.db", files)
        await store.open()
        (job,) = await store.open_jobs()
        assert isinstance(job.job.work, Call)
        assert job.job.work.args == LARGE

    for number in range(4):
        files.keep(bytes([number]) * LARGE_FROM)
    assert files.has(digest(LARGE))

    await store.append([JobCancelled(J, "")], 3.0)
    for number in range(4):
        files.keep(bytes([number + 8]) * LARGE_FROM)
    assert not files.has(digest(LARGE))
    job_ = await store.job(J)
    assert job_ is not None
    assert isinstance(job_.job.work, Call)
    assert job_.job.work.args == b""
    await store.close()


async def test_whole_job_in_one_batch_is_stored(tmp_path: Path, folder: Path) -> None:
    store = SqliteStore(tmp_path / "shoal.db", opened(folder))
    await store.open()
    job = Job(J, Call("f", b"\x90", b"\x80"), owner="a", idempotency_key="k")
    again = Job(JobId("again"), job.work, owner="a", idempotency_key="k")

    await store.append(
        [
            JobSubmitted(job),
            JobLeased(J, WorkerId("w"), LEASE, ""),
            JobCancelled(J, "not wanted"),
            JobSubmitted(again),
        ],
        1.0,
    )

    found = await store.job(J)
    assert found is not None
    assert (found.state.value, found.lease, found.error) == (
        "cancelled",
        1,
        "not wanted",
    )
    assert len(await store.history(J)) == 3
    named = await store.by_idempotency_key("a", "k")
    assert named is not None
    assert named.job.id == "again"
    await store.close()


async def test_fact_of_an_unknown_job_rejects_its_batch(
    tmp_path: Path, folder: Path
) -> None:
    store = SqliteStore(tmp_path / "shoal.db", opened(folder))
    await store.open()

    with pytest.raises(StoreError, match="there is no job nobody's"):
        await store.append(
            [
                JobSubmitted(Job(J, Call("f", b"\x90", b"\x80"))),
                JobCancelled(JobId("nobody's"), ""),
            ],
            1.0,
        )

    assert await store.job(J) is None
    await store.close()
