"""What only an S3-compatible store does: it is far away, and asks for keys."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.ports import free_port
from shoal.domain.errors import StoreError
from shoal.store.contents import ContentStore
from shoal.store.file_folder import FILES_FOLDER


@pytest.fixture
def opened(bucket: str) -> Callable[[str], ContentStore]:
    from shoal.store.content_objects import ContentObjects

    return lambda url: ContentObjects(url or bucket, FILES_FOLDER)


def test_pools_of_one_bucket_are_apart(
    bucket: str, opened: Callable[[str], ContentStore]
) -> None:
    for pool in ("one", "another"):
        writer = opened(f"{bucket}/{pool}/").begin("file-a")
        writer.write(pool.encode())
        writer.finish()

    with opened(f"{bucket}/one").read("file-a") as file:
        assert file.read() == b"one"
    assert opened(f"{bucket}/another").open() == {"file-a": 7}


def test_missing_bucket_is_named(opened: Callable[[str], ContentStore]) -> None:
    contents = opened("s3://none/pool")
    writer = contents.begin("file-a")
    writer.write(b"x")

    for call in (contents.open, writer.finish):
        with pytest.raises(StoreError, match="404 Not Found") as missing:
            call()
        assert missing.value.located.startswith("s3://none/pool/files: ")
    writer.discard()


def test_lost_server_is_an_error_that_may_pass(
    opened: Callable[[str], ContentStore],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr("shoal.store.content_objects.RETRIES_MAX", 0)
    contents = opened("")

    for call in (contents.open, lambda: contents.has("a"), lambda: contents.read("a")):
        with pytest.raises(StoreError) as lost:
            call()
        assert lost.value.temporary
        assert "\n" not in str(lost.value)
    contents.remove("a")
    assert "a could not be deleted" in caplog.text


def test_full_disk_of_temporary_files_is_an_error(
    opened: Callable[[str], ContentStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.store.content_objects.SPOOLED_MAX", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    writer = opened("").begin("file-a")

    with pytest.raises(StoreError, match="No such file or directory") as full:
        writer.write(b"xx")

    assert full.value.temporary
    monkeypatch.undo()
    writer.discard()
