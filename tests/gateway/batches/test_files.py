"""OpenAI's files, with the official client and with broken uploads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import FormData

from gateway.batches.uploads import CHAT_PATH, create, upload
from gateway.keys import client, make_key, request
from gateway.serving import KEY, Pool, eventually, serving
from harness.slow_imports import openai as sdk
from shoal.batches.client_files import UPLOADS_MAX
from shoal.domain.errors import QueueFull, TooLarge
from shoal.store.batches import FileFilter, StoredBatch

CONTENT = b"".join(b'{"n": %d}\n' % number for number in range(50_000))


async def test_uploaded_file_is_read_back(
    openai: "sdk.AsyncOpenAI", tmp_path: Path
) -> None:
    file = await openai.files.create(file=("in.jsonl", CONTENT), purpose="batch")

    assert (file.bytes, file.filename, file.purpose) == (
        len(CONTENT),
        "in.jsonl",
        "batch",
    )
    assert await openai.files.retrieve(file.id) == file
    assert (await openai.files.content(file.id)).content == CONTENT
    (path,) = (tmp_path / "files").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


async def test_deleted_file_is_gone(openai: "sdk.AsyncOpenAI", tmp_path: Path) -> None:
    file = await upload(openai, [1])

    assert (await openai.files.delete(file)).deleted

    with pytest.raises(sdk.NotFoundError):
        await openai.files.content(file)
    assert [*(tmp_path / "files").iterdir()] == []


async def test_files_are_listed_in_pages(openai: "sdk.AsyncOpenAI") -> None:
    files = [await upload(openai, [number]) for number in range(5)]

    listed = [each.id async for each in openai.files.list(limit=2)]
    oldest = await openai.files.list(order="asc", after=files[1])
    outputs = await openai.files.list(purpose="batch_output")

    assert listed == files[::-1]
    assert [each.id for each in oldest.data] == files[2:]
    assert outputs.data == []


async def test_files_are_deleted_while_they_are_listed(
    openai: "sdk.AsyncOpenAI",
) -> None:
    files = [await upload(openai, [number]) for number in range(5)]

    deleted = []
    async for each in openai.files.list(limit=2):
        await openai.files.delete(each.id)
        deleted.append(each.id)

    assert deleted == files[::-1]
    assert (await openai.files.list()).data == []


async def test_files_and_batches_of_a_key_are_not_found_by_others(pool: Pool) -> None:
    keys = [await make_key(pool, name) for name in ("ada", "bob")]
    async with client(pool, keys[0]) as ada, client(pool, keys[1]) as bob:
        file = await upload(ada, [1])
        batch = await create(ada, [1])
        deleted = await upload(ada, [2])
        await ada.files.delete(deleted)

        for attempt in (
            bob.files.retrieve(file),
            bob.files.content(file),
            bob.files.delete(file),
            bob.batches.retrieve(batch.id),
            bob.batches.cancel(batch.id),
            bob.batches.create(
                input_file_id=file, endpoint=CHAT_PATH, completion_window="24h"
            ),
            bob.files.list(after=file),
            bob.files.list(after=deleted),
            bob.batches.list(after=batch.id),
        ):
            with pytest.raises(sdk.NotFoundError):
                await attempt
        assert (await bob.files.list()).data == []
        assert (await bob.batches.list()).data == []
        assert (await ada.files.retrieve(file)).id == file


async def test_expired_file_is_gone(pool: Pool, openai: "sdk.AsyncOpenAI") -> None:
    with pytest.raises(sdk.BadRequestError, match="expected 3600 to 2592000"):
        await openai.files.create(
            file=b"1",
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 59},
        )
    file = await openai.files.create(
        file=("f", b"1"),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at == file.created_at + 3600
    assert pool.gateway is not None
    files = pool.gateway.files

    at = float(file.expires_at) + 2.0
    assert await files.find(file.id, at) is None
    assert await files.remove_expired(at) == 1
    assert await files.listed(FileFilter("default"), 9) == []


async def test_file_that_a_batch_takes_as_it_expires_stays(
    pool: Pool, openai: "sdk.AsyncOpenAI", monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = pool.gateway
    assert gateway is not None
    file = await openai.files.create(
        file=("f", b"1"),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    new = StoredBatch("batch_1", "default", "/v1/embeddings", file.id, "24h", 0.0, 9.0)
    store = gateway.store.files
    expired = store.expired

    async def expired_before_the_batch(at: float, limit: int) -> list[str]:
        found = await expired(at, limit)
        if found:
            await gateway.store.batches.add(new, 1000)
        return found

    monkeypatch.setattr(store, "expired", expired_before_the_batch)

    assert await gateway.files.remove_expired(float(file.created_at) + 3601.0) == 0
    assert (await openai.files.retrieve(file.id)).id == file.id


async def test_file_of_another_purpose_is_refused_by_name(
    openai: "sdk.AsyncOpenAI", tmp_path: Path
) -> None:
    with pytest.raises(sdk.BadRequestError) as refused:
        await openai.files.create(file=b"1", purpose="fine-tune")

    assert refused.value.param == "purpose"
    assert [*(tmp_path / "files").iterdir()] == []


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Pool]:
    """A coordinator that takes files of 1,000 bytes, and 1,500 of a key."""
    async with serving(tmp_path, file_limits=(1000, 1500)) as running:
        yield running


@pytest.fixture
async def alice(small: Pool) -> "AsyncIterator[sdk.AsyncOpenAI]":
    async with client(small, await make_key(small)) as each:
        yield each


async def test_files_that_are_arriving_count(small: Pool) -> None:
    assert small.gateway is not None
    files = small.gateway.files
    async with files.uploading("al") as one, files.uploading("bo") as others:
        await one.write(b"x" * 900)
        await others.write(b"x" * 900)
        async with files.uploading("al") as two:
            await two.write(b"x" * 600)
            with pytest.raises(TooLarge, match="limit of 1500"):
                await two.write(b"x")
        with pytest.raises(TooLarge, match="limit of 1500"):
            async with files.uploading("al") as three:
                await three.write(b"x" * 601)

    async with files.uploading("al") as again:  # the others were not kept
        await again.write(b"x" * 1000)


async def test_owner_has_few_uploads_at_a_time(small: Pool) -> None:
    assert small.gateway is not None
    files = small.gateway.files
    async with AsyncExitStack() as uploads:
        for _ in range(UPLOADS_MAX):
            await uploads.enter_async_context(files.uploading("al"))

        with pytest.raises(QueueFull, match="wait for one"):
            await uploads.enter_async_context(files.uploading("al"))
        await uploads.enter_async_context(files.uploading("bo"))

    async with files.uploading("al") as again:  # the others have ended
        await again.write(b"x")


async def test_key_at_its_limit_begins_no_batch(alice: "sdk.AsyncOpenAI") -> None:
    first = await alice.files.create(file=b"x" * 1000, purpose="batch")
    await alice.files.create(file=b"x" * 500, purpose="batch")
    batch = {
        "input_file_id": first.id,
        "endpoint": CHAT_PATH,
        "completion_window": "24h",
    }

    with pytest.raises(sdk.APIStatusError, match="delete some first") as full:
        await alice.post("/batches", body=batch, cast_to=object)

    assert full.value.status_code == 413


async def test_files_beyond_the_limits_are_refused(
    alice: "sdk.AsyncOpenAI", tmp_path: Path
) -> None:
    openai = alice
    folder = tmp_path / "files"

    with pytest.raises(sdk.APIStatusError, match="limit of 1000 bytes") as large:
        await openai.files.create(file=b"x" * 1001, purpose="batch")
    first = await openai.files.create(file=b"x" * 1000, purpose="batch")
    with pytest.raises(sdk.APIStatusError, match="limit of 1500") as total:
        await openai.files.create(file=b"x" * 501, purpose="batch")
    await openai.files.create(file=b"x" * 500, purpose="batch")
    with pytest.raises(sdk.APIStatusError, match="limit of 1500") as full:
        await openai.files.create(file=b"", purpose="batch")

    assert {each.value.status_code for each in (large, total, full)} == {413}
    assert len([*folder.iterdir()]) == 2
    await openai.files.delete(first.id)
    await openai.files.create(file=b"x" * 900, purpose="batch")


BOUNDARY = {"Content-Type": "multipart/form-data; boundary=b"}
PART = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
FILE = PART % (b'file"; filename="f', b"x")


MALFORMED = [
    ({"Content-Type": "application/json"}, b"{}"),
    ({"Content-Type": "multipart/form-data"}, b"--b--"),
    ({"Content-Type": "multipart/form-data; boundary=" + "b" * 80}, b"--b--"),
    (BOUNDARY, b""),
    (BOUNDARY, b"--b--"),
    (BOUNDARY, b"no boundary\r\n"),
    (BOUNDARY, FILE + b"--b--"),
    (BOUNDARY, PART % (b"purpose", b"batch") + b"--b--"),
    (BOUNDARY, FILE + PART % (b"purpose", b"\xff") + b"--b--"),
    (BOUNDARY, FILE + PART % (b"purpose", b"b" * 5000) + b"--b--"),
    (BOUNDARY, FILE + FILE + PART % (b"purpose", b"batch") + b"--b--"),
    (BOUNDARY, FILE + PART % (b"purpose", b"batch") * 2 + b"--b--"),
    (BOUNDARY, FILE + PART % (b"other", b"1") + b"--b--"),
    (BOUNDARY, FILE + b"--b\r\nno header\r\n\r\n--b--"),
    (BOUNDARY, b"".join(PART % (b"%d" % n, b"") for n in range(40)) + b"--b--"),
    (BOUNDARY | {"Content-Encoding": "gzip"}, FILE),
]


async def test_malformed_upload_is_refused_and_leaves_nothing(
    pool: Pool, tmp_path: Path
) -> None:
    for headers, body in MALFORMED:
        async with pool.session.post(
            f"{pool.url}/v1/files", data=body, headers=pool.headers() | headers
        ) as answer:
            assert answer.status == 400, (body, await answer.text())

    assert [*(tmp_path / "files").iterdir()] == []


async def test_upload_that_breaks_off_leaves_nothing(
    pool: Pool, tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    sent = asyncio.Event()

    async def beginning() -> AsyncIterator[bytes]:
        yield CONTENT
        sent.set()
        await asyncio.Event().wait()

    form = FormData()
    form.add_field("file", beginning(), filename="f")
    sending = asyncio.create_task(
        pool.session.post(
            f"{pool.url}/v1/files", data=form, headers=pool.headers()
        ).__aenter__()
    )
    await sent.wait()
    await eventually(lambda: any(folder.iterdir()))
    sending.cancel()
    await asyncio.wait([sending])

    await eventually(lambda: not any(folder.iterdir()))


async def test_start_sets_aside_what_no_file_describes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as pool, client(pool, KEY) as openai:
        file = await upload(openai, [1])
    for stray in ("file-newer", "file-half.part"):
        (tmp_path / "files" / stray).write_bytes(b"1")

    for _ in range(2):  # the second start leaves what the first has set aside
        async with serving(tmp_path) as pool:
            status, _ = await request(pool, "GET", f"/v1/files/{file}")

    aside = tmp_path / "files" / "unknown"
    assert status == 200
    assert {each.name for each in (tmp_path / "files").iterdir()} == {file, "unknown"}
    assert [each.name for each in aside.iterdir()] == ["file-newer"]
    assert aside.stat().st_mode & 0o777 == 0o700
    assert caplog.text.count(f"files=1 are not in the database: moved to {aside}") == 1
