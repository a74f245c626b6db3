"""A flipped bit of the database is harmless, or noticed as damage: never a crash."""

from pathlib import Path
from random import Random

import pytest

from harness.profiles import some_long
from shoal.domain.errors import StoreBroken, StoreError
from shoal.domain.facts import JobSubmitted
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.work import Chat
from shoal.store.port import JobFilter
from shoal.store.sqlite.database import SqliteStore
from store.test_ledger import StoredLog

JOBS = [JobId(f"job-{number}") for number in range(20)]


async def write(path: Path) -> None:
    store = SqliteStore(path)
    await store.open()
    log = StoredLog(store)
    for number, job_id in enumerate(JOBS):
        # Every other one is long enough to be compressed.
        text = Random(number).randbytes(20 + number % 2 * 200).hex()
        chat = Chat("m", ({"role": "user", "content": text},))
        await store.append([JobSubmitted(Job(job_id, chat))], 1.0)
        await log.add(job_id)
    await store.close()


async def read(path: Path) -> list[object]:
    store = SqliteStore(path)
    await store.open()
    try:
        found: list[object] = [await store.recent(JobFilter(), len(JOBS))]
        for job_id in JOBS:
            found.append(await store.job(job_id))
            found.append(await store.history(job_id))
            found.append(await store.ledger.receipts_of(job_id))
    finally:
        await store.close()
    return found


def assert_schema(error: StoreError) -> None:
    assert str(error).startswith("no such"), error


def flip(data: bytes, bit: int, path: Path) -> None:
    """Write a database with one bit changed, and nothing beside it."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.write_bytes(changed)


@pytest.mark.parametrize("flips", some_long([30, 500], short=1))
async def test_each_flipped_bit_is_harmless_or_damage(
    tmp_path: Path, flips: int
) -> None:
    path = tmp_path / "shoal.db"
    await write(path)
    whole = await read(path)
    data, random = path.read_bytes(), Random(1)
    # Most pages are those of empty tables; those of rows are the last ones.
    begin = len(data) * 8 // 2
    damaged = harmless = 0

    for _ in range(flips):
        flip(data, random.randrange(begin, len(data) * 8), path)
        try:
            harmless += await read(path) == whole
        except StoreBroken as error:
            damaged += error.path == str(path)
        except StoreError as error:
            # A table's definition is changed, which looks like a query's fault.
            assert_schema(error)

    assert damaged
    assert harmless
