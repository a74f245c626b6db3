"""Clients of calls that exceed limits, send garbage, or do not read."""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from io import BytesIO
from pathlib import Path

import pytest
from aiohttp import ClientResponse, WSMsgType, WSServerHandshakeError

from attacks.raw import BINARY, frame, request, upgrade, wire
from attacks.siege import besieged
from calls.function_workers import FunctionWorker, pack
from gateway.serving import KEY, WAIT_MAX, Pool, eventually
from gateway.test_calls import FUNCTIONS, caller, item
from shoal.calls.messages import ITEMS_MAX, CallItem, InvalidItem
from shoal.calls.session import OPEN_MAX, CallSession
from shoal.domain.vocabulary import CancelJob
from shoal.gateway.calls import ITEMS_AT_ONCE, MESSAGE_MAX
from shoal.store.blobs import BLOB_MAX

pytestmark = pytest.mark.asyncio(loop_scope="module")

MEBI = 1 << 20
AUTHORIZED = f"Authorization: Bearer {KEY}"
DIGEST = hashlib.sha256(b"a value").digest()


@pytest.fixture
def pool(shared_pool: Pool) -> Pool:
    return shared_pool


async def worker(pool: Pool, *, holds: bool = False) -> FunctionWorker:
    functions = FunctionWorker(pool.hub, FUNCTIONS, holds=holds)
    await pool.wait_joined()
    return functions


async def leave(pool: Pool, functions: FunctionWorker) -> None:
    functions.drop()
    await pool.wait_joined(0)


# Too much.


async def test_calls_beyond_the_limit_are_rejected_and_cancellations_processed(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 1000
    monkeypatch.setattr("shoal.calls.session.OPEN_MAX", most)
    functions = await worker(pool, holds=True)
    async with caller(pool) as client:
        await client.ask(*(item(n, "add", n, 1, kept=False) for n in range(most)))
        await client.call(most, "add", 1, 1)
        refused = await client.end(most)

        await client.ask([2, 7])
        cancelled = await client.end(7)
        await client.call(most + 1, "add", 1, 1, kept=False)
        await client.ask([2, most + 1])
        completed = await client.end(most + 1)

    assert refused[2] == "busy"
    assert f"{OPEN_MAX} calls" in refused[3]
    assert cancelled[2] == completed[2] == "cancelled"
    await leave(pool, functions)


async def test_arguments_beyond_the_limit_are_rejected(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.calls.session.OPEN_SIZE_MAX", MEBI)
    functions = await worker(pool, holds=True)
    async with caller(pool) as client:
        for number in range(3):
            await client.call(number, "add", b"x" * (MEBI // 2), kept=False)

        assert (await client.end(2))[2] == "busy"
    await leave(pool, functions)


async def test_calls_of_one_message_are_handled_a_few_at_a_time(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: list[int] = []
    receive = CallSession.receive

    def counted(session: CallSession, items: Sequence[CallItem | InvalidItem]) -> None:
        at_once.append(len(items))
        receive(session, items)

    monkeypatch.setattr(CallSession, "receive", counted)
    functions = await worker(pool)
    count = 2 * ITEMS_AT_ONCE + 3
    async with caller(pool) as client:
        await client.ask(*(item(n, "add", n, 1, kept=False) for n in range(count)))
        for number in range(count):
            assert await client.value(number) == number + 1

    assert at_once == [ITEMS_AT_ONCE, ITEMS_AT_ONCE, 3]
    await leave(pool, functions)


async def test_oversized_message_ends_only_its_connection(
    pool: Pool,
) -> None:
    functions = await worker(pool)
    async with wire(pool) as greedy, caller(pool) as other:
        await greedy.send(upgrade("/v1/calls", AUTHORIZED))
        await greedy.head()
        await greedy.send(frame(BINARY, length=MESSAGE_MAX + 1))
        closing = await greedy.rest()
        await other.call(1, "add", 1, 1)

        assert (1009).to_bytes(2, "big") in closing
        assert await other.value(1) == 2
    await leave(pool, functions)


async def test_client_that_does_not_read_is_disconnected(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.calls.messages.UNSENT_MAX", 8 * MEBI)
    monkeypatch.setattr("shoal.gateway.calls.CLOSE_TIMEOUT", 0.1)
    functions = await worker(pool)

    async with wire(pool, deaf=True) as deaf:
        await deaf.send(upgrade("/v1/calls", AUTHORIZED))
        for number in range(64):
            items = pack([item(number, "big", MEBI // 2, kept=False)])
            await deaf.send(frame(BINARY, items))
        await eventually(lambda: bool(functions.received(CancelJob)))
        await deaf.rest()
    async with caller(pool) as other:
        await other.call(1, "add", 1, 1, kept=False)

        assert await other.value(1) == 2
    await leave(pool, functions)


# Nonsense.

NUMBERED = {
    "an unknown kind": [9, 1],
    "a call without a name": [1, 1],
    "an empty name": item(1, ""),
    "a name of 257 characters": item(1, "x" * 257),
    "a name that is no text": [1, 1, 7, b"", b"", {}],
    "arguments that are no bytes": [1, 1, "add", [1], {}, {}],
    "options that are none": [1, 1, "add", b"", b"", 7],
    "an unknown option": item(1, "add", sooner=True),
    "a digest of 31 bytes": item(1, "add", blobs=[bytes(31)]),
    "too many blobs": item(1, "add", blobs=[DIGEST] * 1025),
    "a timeout of nothing": item(1, "add", timeout=0),
    "a timeout of years": item(1, "add", timeout=1e9),
    "a timeout that is no number": item(1, "add", timeout=float("nan")),
    "a key that is too long": item(1, "add", key="k" * 256),
}


@pytest.mark.parametrize("nonsense", NUMBERED.values(), ids=NUMBERED.keys())
async def test_invalid_item_is_answered_under_its_number(
    pool: Pool, nonsense: list[object]
) -> None:
    async with caller(pool) as client:
        await client.ask(nonsense)

        assert (await client.end(1))[:3] == [3, 1, "invalid"]


UNNUMBERED = {
    "no item": pack([7]),
    "an empty item": pack([[]]),
    "a number that is none": pack([[1, "one", "add", b"", b"", {}]]),
    "an array without end": b"\xdd\xff\xff\xff\xff",
    "too many items": b"\xdd" + (ITEMS_MAX + 1).to_bytes(4) + bytes(ITEMS_MAX + 1),
    "depths": b"\x91" * 100_000,
    "depths in an item": b"\x91\x96\x01\x01" + b"\x91" * 100_000,
    "a map": pack({1: 2}),
    "nothing": b"",
}


@pytest.mark.parametrize("data", UNNUMBERED.values(), ids=UNNUMBERED.keys())
async def test_malformed_message_ends_its_connection_with_a_reason(
    pool: Pool, data: bytes
) -> None:
    async with caller(pool) as client:
        await client.socket.send_bytes(data)
        message = await client.socket.receive(timeout=WAIT_MAX)

    assert (message.type, message.data) == (WSMsgType.CLOSE, 1007)
    assert message.extra


async def test_text_message_ends_its_connection_with_a_reason(pool: Pool) -> None:
    async with caller(pool) as client:
        await client.socket.send_str("[]")
        message = await client.socket.receive(timeout=WAIT_MAX)

    assert (message.data, message.extra) == (
        1007,
        "expected MessagePack in binary messages",
    )


async def test_negative_and_huge_numbers_are_answered_or_rejected(pool: Pool) -> None:
    async with caller(pool) as client:
        await client.ask(item(-1, "add"), item(2**53, "add"))

        assert (await client.end(-1))[2] == "invalid"
        assert (await client.end(2**53))[2] == "invalid"


async def test_duplicate_number_is_an_error(pool: Pool) -> None:
    functions = await worker(pool, holds=True)
    async with caller(pool) as client:
        await client.call(1, "add", 1, 1, kept=False)
        await client.call(1, "add", 1, 1, kept=False)

        assert "number each anew" in (await client.end(1))[3]
    await leave(pool, functions)


async def test_malformed_arguments_are_judged_by_the_worker(
    pool: Pool,
) -> None:
    functions = await worker(pool, holds=True)
    async with caller(pool) as client:
        await client.ask([1, 1, "add", b"\xc1", b"\xc1", {}])
        await eventually(lambda: len(functions.calls) == 1)
        functions.return_all(1)

        assert await client.value(1) == 1
    await leave(pool, functions)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-wrong"}])
async def test_upgrade_without_a_valid_key_is_rejected(
    pool: Pool, headers: dict[str, str]
) -> None:
    with pytest.raises(WSServerHandshakeError) as caught:
        await pool.session.ws_connect(f"{pool.url}/v1/calls", headers=headers)

    assert caught.value.status == 401


# Large values.


def path_of(digest: bytes) -> str:
    return f"/v1/blobs/{digest.hex()}"


def put(pool: Pool, data: bytes) -> AbstractAsyncContextManager[ClientResponse]:
    url = pool.url + path_of(hashlib.sha256(data).digest())
    return pool.session.put(url, data=BytesIO(data), headers=pool.headers())


async def test_aborted_upload_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    announced = request(
        f"PUT {path_of(DIGEST)} HTTP/1.1", AUTHORIZED, "Content-Length: 100000"
    )
    async with besieged(tmp_path, caplog) as pool:
        async with wire(pool) as cut:
            await cut.send(announced + b"a value")
            cut.abort()

        url, headers = pool.url + path_of(DIGEST), pool.headers()
        async with pool.session.head(url, headers=headers) as answer:
            assert answer.status == 404
        assert files_in(tmp_path / "blobs") == []


async def test_oversized_value_is_rejected_before_its_body(
    pool: Pool,
) -> None:
    async with wire(pool) as greedy:
        await greedy.send(
            request(
                f"PUT {path_of(DIGEST)} HTTP/1.1",
                AUTHORIZED,
                f"Content-Length: {BLOB_MAX + 1}",
            )
        )

        assert b" 413 " in await greedy.head()


@pytest.mark.parametrize(
    "name",
    ["..%2F..%2Fshoal.db", "%2Fetc%2Fpasswd", DIGEST.hex().upper(), "a" * 63, "%00"],
)
async def test_value_is_named_only_by_its_digest(pool: Pool, name: str) -> None:
    for method in ("GET", "PUT"):
        async with wire(pool) as curious:
            line = f"{method} /v1/blobs/{name} HTTP/1.1"
            await curious.send(request(line, AUTHORIZED, "Content-Length: 0"))

            assert b" 400 " in await curious.head()


def files_in(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file()]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Prevent files from growing, as on a full disk."""
    import resource  # which Windows does not have

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
async def test_value_without_disk_space_is_an_error_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = bytes(8 * MEBI)
    async with besieged(tmp_path, caplog) as pool:
        with files_of_at_most(4 * MEBI):
            async with put(pool, data) as answer:
                status, error_text = answer.status, await answer.text()

        assert status == 503
        assert "File too large" in error_text
        assert files_in(tmp_path / "blobs") == []
        async with put(pool, data) as answer:
            assert answer.status == 204
