"""Peers that nobody has admitted, who make the coordinator hold and do much."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import count, pairwise
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from attacks.lan import dialled
from attacks.raw import (
    BINARY,
    CLOSE,
    PING,
    TEXT,
    Wire,
    frame,
    request,
    upgrade,
    upgraded,
    wire,
)
from attacks.siege import address, besieged
from attacks.test_relay import registration
from gateway.providers import committed, connect, provider, shown
from gateway.serving import KEY, Pool
from harness.speed import scaled
from protocols.dispatch.recorded import SIGNERS
from shoal.cli.log import STRANGER_INTERVAL, StrangerFilter
from shoal.peers.relay import HELD_BY_GUESTS_MAX
from shoal.protocols.dispatch import Config
from shoal.protocols.seam.framing import LENGTH
from shoal.transports.strangers import Strangers

pytestmark = pytest.mark.asyncio(loop_scope="module")

CROWD = 10
MIB = 1 << 20
LARGE = 31 * MIB
KNOCK = "/knock"  # a path that no wire claims but Dispatch, which claims all
TIMEOUT = scaled(0.2)  # seconds for a message of a stranger, in some tests
TOOK_TOO_LONG = f"took over {TIMEOUT:g} s".encode()
MEMORY_MAX = 96 * MIB  # what a crowd of strangers may add, with what the test takes
REGISTER = {
    "type": "register",
    "provider_pubkey": SIGNERS["A"].public_key.hex(),
    "provider_type": "DESKTOP",
    "capabilities": ["TASK"],
}


@pytest.fixture
def pool(shared_pool: Pool) -> Pool:
    return shared_pool


@pytest_asyncio.fixture(loop_scope="module")
async def open_pool(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Pool]:
    """A coordinator that admits every Dispatch worker once it registers."""
    async with besieged(
        tmp_path, caplog, wires={"dispatch": Config(open=True)}
    ) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def open_relay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Pool]:
    """A coordinator whose relay any node may use."""
    async with besieged(tmp_path, caplog, relay_open=True) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def small_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pool]:
    """A coordinator at which strangers may hold 200 kB."""
    budget = Strangers(200_000)
    monkeypatch.setattr("shoal.app.server.bounded_strangers", lambda *_: budget)
    async with besieged(tmp_path, caplog) as running:
        yield running


async def grown(
    stack: AsyncExitStack, begin: Callable[[AsyncExitStack], Awaitable[None]]
) -> int:
    """Return by how many bytes the process grows while a crowd does something."""
    before = psutil.Process().memory_info().rss
    await asyncio.gather(*(begin(stack) for _ in range(CROWD)))
    return psutil.Process().memory_info().rss - before


async def pour(bare: Wire, size: int, beginning: bytes = b"") -> None:
    """Send so many bytes, unless the other end disconnects before."""
    bare.writer.write(beginning)
    piece = bytes(MIB)
    for _ in range(size // MIB):
        await bare.send(piece)
        if bare.reader.at_eof() or bare.writer.is_closing():
            return


@pytest.mark.parametrize("size", [0, LARGE], ids=["control", "attack"])
async def test_unfinished_messages_of_strangers_take_little_memory(
    pool: Pool, size: int
) -> None:
    async def begin(stack: AsyncExitStack) -> None:
        bare = await stack.enter_async_context(upgraded(pool, KNOCK))
        await pour(bare, size, frame(BINARY, length=LARGE + 1))

    async with AsyncExitStack() as stack:
        assert await grown(stack, begin) < MEMORY_MAX


@pytest.mark.parametrize("size", [0, 15 * MIB], ids=["control", "attack"])
async def test_unfinished_messages_to_the_relay_take_little_memory(
    open_relay: Pool, size: int
) -> None:
    pool = open_relay
    seeds = count(1)

    async def begin(stack: AsyncExitStack) -> None:
        bare = await stack.enter_async_context(upgraded(pool, "/ws?node=x"))
        joining = json.dumps(registration(next(seeds)))
        await bare.send(frame(TEXT, joining.encode()))
        await bare.reader.readuntil(b"registerAck")
        await pour(bare, size, frame(TEXT, length=size + 1))

    async with AsyncExitStack() as stack:
        assert await grown(stack, begin) < MEMORY_MAX + HELD_BY_GUESTS_MAX


@pytest.mark.parametrize("size", [0, LARGE], ids=["control", "attack"])
@pytest.mark.parametrize(
    "headers",
    [
        (f"Content-Length: {2 * LARGE}",),
        ("Transfer-Encoding: chunked",),
    ],
    ids=["length", "chunked"],
)
async def test_bodies_of_strangers_take_little_memory(
    pool: Pool, size: int, headers: tuple[str, ...]
) -> None:
    async def begin(stack: AsyncExitStack) -> None:
        bare = await stack.enter_async_context(wire(pool))
        head = request("POST /v1/chat/completions HTTP/1.1", *headers)
        await pour(bare, size, head + b"ffffffff\r\n")

    async with AsyncExitStack() as stack:
        assert await grown(stack, begin) < MEMORY_MAX


async def test_fragments_and_pings_do_not_evade_the_limit(pool: Pool) -> None:
    part = frame(0, bytes(1 << 10), fin=False)
    async with upgraded(pool, KNOCK) as bare:
        await bare.send(frame(TEXT, b"x", fin=False))
        await pour_until_closed(bare, (part + frame(PING, b"ping")) * 100)

        assert b"over 65536 bytes" in await bare.rest()


async def test_message_sent_with_the_upgrade_counts(pool: Pool) -> None:
    async with wire(pool) as bare:
        await bare.send(upgrade(KNOCK) + frame(TEXT, bytes(50 << 10), length=LARGE))
        await bare.head()
        await pour_until_closed(bare, bytes(50 << 10))

        assert b"over 65536 bytes" in await bare.rest()


async def test_upgrade_after_a_request_with_a_key_makes_a_stranger_again(
    pool: Pool,
) -> None:
    async with wire(pool) as bare:
        await bare.send(
            request("GET /v1/models HTTP/1.1", f"Authorization: Bearer {KEY}")
        )
        await bare.head()
        await bare.send(upgrade(KNOCK))
        await pour_until_closed(bare, frame(TEXT, bytes(50 << 10), length=LARGE))
        await pour_until_closed(bare, bytes(50 << 10))

        assert b"over 65536 bytes" in await bare.rest()


async def test_large_messages_of_an_admitted_worker_arrive(open_pool: Pool) -> None:
    output = {"text": "x" * MIB}
    async with provider(open_pool) as worker:
        await open_pool.wait_joined()
        job_id = await committed(open_pool)
        await worker.job()
        await worker.complete(job_id, output)

        assert (await shown(open_pool, job_id, 5))["result"] == output


async def test_registration_of_64_kib_is_read(open_pool: Pool) -> None:
    text = json.dumps(REGISTER | {"padding": "x" * 60_000})
    async with connect(open_pool) as worker:
        await worker.send(text)
        await open_pool.wait_joined()


async def test_strangers_share_a_budget(small_budget: Pool) -> None:
    pool = small_budget
    unfinished = frame(TEXT, bytes(40_000), length=60_000)
    async with AsyncExitStack() as stack:
        crowd = [
            await stack.enter_async_context(upgraded(pool, KNOCK)) for _ in range(20)
        ]
        for each in crowd:
            await each.send(unfinished)
        ended = 0
        for each in crowd[:15]:  # the budget has room for four of them
            ended += (await each.rest()) == b""

        assert ended == 15


async def test_tcp_strangers_share_the_budget(small_budget: Pool) -> None:
    async with AsyncExitStack() as stack:
        crowd = [
            await stack.enter_async_context(dialled(small_budget)) for _ in range(9)
        ]
        for each in crowd:
            each.writer.write(LENGTH.pack(60_000) + bytes(50_000))

        for each in crowd[:5]:
            await each.hung_up()


@pytest.mark.parametrize("finished", [True, False], ids=["control", "attack"])
async def test_message_of_a_stranger_has_a_timeout(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    monkeypatch.setattr("shoal.transports.strangers.MESSAGE_TIMEOUT", TIMEOUT)
    text = b"x" * 10_000
    length = len(text) + (not finished)
    async with upgraded(pool, KNOCK) as bare, upgraded(pool, KNOCK) as witness:
        await bare.send(frame(TEXT, text, length=length))
        await witness.send(frame(TEXT, text, length=len(text) + 1))
        assert TOOK_TOO_LONG in await witness.rest()

        if finished:
            await bare.send(frame(PING, b"there"))
            assert b"there" in await bare.reader.readuntil(b"there")
        else:
            assert TOOK_TOO_LONG in await bare.rest()


async def test_first_head_has_a_short_timeout(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.transports.strangers.MESSAGE_TIMEOUT", TIMEOUT)
    async with wire(pool) as bare:
        await bare.send(b"GET / HTTP/1.1\r\nHost: x")

        assert (await bare.rest()).startswith(b"HTTP/1.1 408 ")


async def test_first_head_has_a_limit(pool: Pool) -> None:
    field = b"X: " + b"x" * 8_000 + b"\r\n"
    async with wire(pool) as bare:
        await bare.send(b"GET / HTTP/1.1\r\nHost: x\r\n")
        await pour_until_closed(bare, field)

        assert (await bare.rest()).startswith(b"HTTP/1.1 431 ")


async def pour_until_closed(bare: Wire, piece: bytes) -> None:
    """Send a piece again and again, until the other end says something or leaves."""
    for _ in range(200):
        await bare.send(piece)
        await asyncio.sleep(0)
        if bare.writer.is_closing():
            return


async def test_strangers_cause_one_log_line_a_second(pool: Pool) -> None:
    lines = RecordList()
    lines.addFilter(StrangerFilter())
    logging.getLogger().addHandler(lines)
    try:
        for visit in (pass_by_wire, pass_by_http, pass_by_tcp, pass_by_relay) * 3:
            await visit(pool)
    finally:
        logging.getLogger().removeHandler(lines)

    times = [each.created for each in lines.records]
    assert all(b - a >= STRANGER_INTERVAL for a, b in pairwise(times))
    assert lines.records  # the first says what happens


async def pass_by_wire(pool: Pool) -> None:
    for path in (address(model=""), KNOCK):
        async with upgraded(pool, path) as bare:
            await bare.send(frame(TEXT, json.dumps(REGISTER).encode()))
            await bare.rest()


async def pass_by_http(pool: Pool) -> None:
    for line in ("GET /v1/models HTTP/1.1", "GET /no/such/path HTTP/1.1", "nonsense"):
        async with wire(pool) as bare:
            await bare.send(request(line, "Sec-WebSocket-Protocol: x"))
            await bare.head()


async def pass_by_tcp(pool: Pool) -> None:
    async with dialled(pool) as stranger:
        await stranger.send_messages(*[b"null"] * 200)
        await stranger.hung_up()


async def pass_by_relay(pool: Pool) -> None:
    async with upgraded(pool, "/ws?node=x") as bare:
        await bare.send(frame(TEXT, b"null") + frame(CLOSE, b"\x03\xe8"))
        await bare.rest()


class RecordList(logging.Handler):
    """Keeps what a coordinator logs by default."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
