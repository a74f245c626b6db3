"""The cache of large arguments."""

import asyncio
import tempfile
from pathlib import Path
from typing import IO

import pytest

from shoal.config.private_files import open_lock_file, try_lock
from shoal.domain.errors import Unavailable
from shoal.worker import blob_cache as module
from shoal.worker.blob_cache import BlobCache

ONE, TWO, THREE = (letter * 32 for letter in (b"1", b"2", b"3"))


def unasked(digest: bytes) -> None:
    raise AssertionError("it is there")


async def test_blob_is_in_a_file_until_close() -> None:
    blobs = BlobCache()
    blobs.put(ONE, b"data")
    path = await blobs.get(ONE, unasked)

    assert path.read_bytes() == b"data"
    await blobs.close()
    assert not path.exists()


def test_folder_of_a_killed_worker_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive = BlobCache()
    (others,) = tmp_path.iterdir()
    killed = tmp_path / f"{module.PREFIX}killed"
    killed.mkdir()
    (killed / module.LOCK_FILE).touch()
    (killed / ONE.hex()).write_bytes(b"data")
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / module.LOCK_FILE).touch()
    (tmp_path / f"{module.PREFIX}link").symlink_to(target)

    new = BlobCache()

    assert not killed.exists()
    assert others.exists()
    assert target.exists()
    for cache in (new, alive):
        asyncio.run(cache.close())
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "elsewhere",
        f"{module.PREFIX}link",
    ]


def test_folder_that_another_worker_takes_for_abandoned_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others: list[IO[bytes]] = []

    def open_and_lose(file: Path) -> IO[bytes]:
        lock = open_lock_file(file)
        if not others:
            others.append(open_lock_file(file))
            assert try_lock(others[0])  # it has it first, and deletes all of it next
        return lock

    monkeypatch.setattr(module, "open_lock_file", open_and_lose)
    blobs = BlobCache()

    assert blobs._lock.name != others[0].name
    assert Path(blobs._lock.name).exists()
    with open_lock_file(Path(blobs._lock.name)) as lock:
        assert not try_lock(lock)
    others[0].close()
    asyncio.run(blobs.close())


async def test_blobs_are_kept_where_files_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "try_lock", lambda file: False)
    blobs = BlobCache()
    blobs.put(ONE, b"data")

    path = await blobs.get(ONE, unasked)
    assert path.read_bytes() == b"data"
    await blobs.close()
    assert not path.parent.exists()


async def test_missing_blob_is_requested_once_and_awaited() -> None:
    blobs, requested = BlobCache(), list[bytes]()
    waiting = [asyncio.create_task(blobs.get(ONE, requested.append)) for _ in range(3)]
    await asyncio.sleep(0)
    blobs.put(ONE, memoryview(b"late"))
    paths = await asyncio.gather(*waiting)

    assert requested == [ONE]
    assert len(set(paths)) == 1
    await blobs.close()


async def test_late_blob_is_requested_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BLOB_TIMEOUT", 0.0)
    blobs, requested = BlobCache(), list[bytes]()
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"large argument \(3131"):
            await blobs.get(ONE, requested.append)

    assert requested == [ONE, ONE]
    await blobs.close()


async def test_least_recently_used_blob_is_evicted() -> None:
    blobs = BlobCache(size_max=10)
    paths: dict[bytes, Path] = {}
    for digest in (ONE, TWO):
        blobs.put(digest, b"12345")
        paths[digest] = await blobs.get(digest, unasked)
    await blobs.get(ONE, unasked)
    blobs.put(THREE, b"12345")
    await blobs.get(THREE, unasked)

    assert paths[ONE].exists()
    assert not paths[TWO].exists()
    requested: list[bytes] = []
    lacking = asyncio.create_task(blobs.get(TWO, requested.append))
    await asyncio.sleep(0)
    assert requested == [TWO]
    blobs.put(TWO, b"12345")
    await lacking
    await blobs.close()


async def test_full_disk_is_reported(tmp_path: Path) -> None:
    blobs = BlobCache()
    await asyncio.to_thread(blobs._folder.cleanup)
    waiting = asyncio.create_task(blobs.get(ONE, lambda _: None))
    await asyncio.sleep(0)
    blobs.put(ONE, b"data")

    with pytest.raises(Unavailable, match="cannot be stored"):
        await waiting
    await blobs.close()
