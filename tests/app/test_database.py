"""Where a coordinator keeps the contents of files, and large values."""

import asyncio
import hashlib
import shutil
import sys
from pathlib import Path

import pytest
from aiohttp import ClientSession, FormData

from shoal.app.database import contents_at
from shoal.app.server import run_coordinator
from shoal.config import ServeConfig
from shoal.domain.errors import ConfigError, StoreError

VALUE = hashlib.sha256(b"large").hexdigest()


def config(folder: Path, contents: str) -> ServeConfig:
    return ServeConfig(
        port=0, data_dir=folder, contents=contents, no_discovery=True, drain=0.0
    )


async def test_files_and_large_values_can_be_in_a_bucket(
    tmp_path: Path, bucket: str
) -> None:
    async with run_coordinator(config(tmp_path, bucket)) as running:
        headers = {"Authorization": f"Bearer {running.api_key}"}
        form = FormData({"purpose": "batch"})
        form.add_field("file", b"{}\n", filename="in.jsonl")
        async with ClientSession(running.url, headers=headers) as session:
            async with session.post("/v1/files", data=form) as response:
                uploaded = (await response.json())["id"]
            async with session.put(f"/v1/blobs/{VALUE}", data=b"large") as response:
                assert response.status < 300
    assert not (tmp_path / "files").exists()
    await asyncio.to_thread(shutil.rmtree, tmp_path / "blobs")

    async with (
        run_coordinator(config(tmp_path, bucket)) as running,
        ClientSession(running.url, headers=headers) as session,
    ):
        for path, content in (
            (f"/v1/files/{uploaded}/content", b"{}\n"),
            (f"/v1/blobs/{VALUE}", b"large"),
        ):
            async with session.get(path) as response:
                assert await response.read() == content


async def test_missing_bucket_ends_the_start(tmp_path: Path, bucket: str) -> None:
    with pytest.raises(StoreError, match="404 Not Found"):
        async with run_coordinator(config(tmp_path, "s3://none/pool")):
            pass


@pytest.mark.parametrize("url", ["bucket", "https://s3.example.com/bucket", "s3:/x"])
def test_other_places_are_refused(tmp_path: Path, url: str) -> None:
    with (
        pytest.raises(ConfigError, match="expected s3://BUCKET/PREFIX"),
        contents_at(config(tmp_path, url), 1),
    ):
        pass


def test_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "shoal.store.content_objects", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)

    with (
        pytest.raises(ConfigError, match=r"S3 needs obstore .*\[s3\]"),
        contents_at(config(tmp_path, "s3://bucket"), 1),
    ):
        pass
