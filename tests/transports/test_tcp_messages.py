"""Messages split by TCP links, over real sockets, plain and with TLS."""

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from shoal.domain.errors import LimitExceeded
from shoal.protocols.seam.framing import FramedMessage
from shoal.protocols.seam.session import Bulk
from shoal.transports.dialer import connect_tcp
from shoal.transports.link import LinkClosed
from shoal.transports.message_splitter import UNTAKEN_MAX
from shoal.transports.outbox import Outbox
from shoal.transports.tcp import UNSENT_MAX, TcpLink
from shoal.transports.tls import ServerTls, self_signed_tls
from transports.links import ended, serving
from transports.numbered import HEAD, Numbered, message

MIB = 1 << 20


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest) -> ServerTls | None:
    return self_signed_tls("node") if request.param == "tls" else None


def open_to_any(url: str) -> str:
    return url.replace("tls:", "tls-any:")


@asynccontextmanager
async def pair(
    tls: ServerTls | None, limit: int = 256 * MIB
) -> AsyncIterator[tuple[TcpLink, TcpLink]]:
    """Yield both ends of a connection; the second one splits messages."""
    async with (
        serving(tls) as (url, links),
        connect_tcp(url.replace("tls:", "tls-any:")) as ours,
    ):
        theirs = await links.get()
        theirs.attach(Numbered(limit))
        yield ours, theirs


async def read(link: TcpLink, count: int) -> list[FramedMessage]:
    got: list[FramedMessage] = []
    while len(got) < count:
        got += await link.messages()
    return got


def test_messages_of_all_sizes_arrive_complete_and_verified(
    run: Any, tls: ServerTls | None
) -> None:
    source = random.Random(1)
    sizes = (0, 10, 5 * MIB, 64 << 10, 3, 300_000, 20 * MIB, 1, 70_000, 0)
    sent = [source.randbytes(size) for size in sizes]

    async def test() -> None:
        async with pair(tls) as (ours, theirs), asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read(theirs, len(sent)))
            for number, body in enumerate(sent):
                await ours.write(HEAD.pack(number, len(body)))
                await ours.write(memoryview(body))

            got = await reading
            assert [bytes(each.body) for each in got] == sent
            for each in got:
                assert each.checksum in (None, zlib.crc32(each.body))

    run(test)


def test_early_data_is_split(run: Any, tls: ServerTls | None) -> None:
    body = bytes(range(256)) * 8192

    async def test() -> None:
        async with (
            serving(tls) as (url, links),
            connect_tcp(open_to_any(url)) as ours,
        ):
            theirs = await links.get()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ours.send(message(1, body) + message(2, b"small")))
                while not theirs._reading_paused:  # noqa: ASYNC110  # none tells
                    await asyncio.sleep(0)
                theirs.attach(Numbered())

                one, two = await read(theirs, 2)
            assert (bytes(one.body), bytes(two.body)) == (body, b"small")

    run(test)


def test_messages_before_a_rejected_one_arrive(run: Any, tls: ServerTls | None) -> None:
    async def test() -> None:
        async with pair(tls, limit=1000) as (ours, theirs):
            await ours.send(message(1, b"good") + HEAD.pack(2, 1001))

            (good,) = await read(theirs, 1)
            assert bytes(good.body) == b"good"
            with pytest.raises(LimitExceeded):
                await theirs.messages()

    run(test)


def test_slow_receiver_stops_the_sender(run: Any, tls: ServerTls | None) -> None:
    one = message(1, bytes(100_000))

    async def test() -> None:
        async with pair(tls) as (ours, theirs):
            sending = asyncio.create_task(_send_forever(ours, one))
            while not (ours._writing_paused and theirs._reading_paused):  # noqa: ASYNC110  # none tells
                await asyncio.sleep(0)

            held = await theirs.messages()
            assert len(held) * len(one) <= 2 * UNTAKEN_MAX
            # It resumes when they are received.
            await read(theirs, 200)
            assert not sending.done()
            sending.cancel()
            await asyncio.wait([sending])

    run(test)


async def _send_forever(link: TcpLink, data: bytes) -> None:
    while True:
        await link.write(data)


def test_messages_before_the_end_are_delivered(run: Any, tls: ServerTls | None) -> None:
    async def test() -> None:
        async with pair(tls) as (ours, theirs):
            await ours.send(message(1, b"last words") + HEAD.pack(2, 10) + b"cut")
            await ours.close(1000, "")

            (last,) = await read(theirs, 1)
            assert bytes(last.body) == b"last words"
            with pytest.raises(LinkClosed):
                await theirs.messages()

    run(test)


def test_messages_go_directly_to_a_waiting_receiver(
    run: Any, tls: ServerTls | None
) -> None:
    async def test() -> None:
        async with serving(tls) as (url, links), connect_tcp(open_to_any(url)) as ours:
            theirs = await links.get()
            heard: list[FramedMessage] = []
            some = asyncio.Event()

            def hear(messages: Sequence[FramedMessage]) -> None:
                heard.extend(messages)
                some.set()

            theirs.attach(Numbered(limit=1000), hear)
            waiting = asyncio.create_task(theirs.messages())
            await asyncio.sleep(0)
            await ours.send(message(1, b"small"))
            await some.wait()
            await ours.send(HEAD.pack(2, 1001))

            # Rejections reach the waiting receiver, as the end does.
            with pytest.raises(LimitExceeded):
                await waiting
            assert [bytes(each.body) for each in heard] == [b"small"]

    run(test)


def test_end_within_a_large_message_is_an_end(run: Any, tls: ServerTls | None) -> None:
    async def test() -> None:
        async with pair(tls) as (ours, theirs):
            await ours.send(HEAD.pack(1, 64 * MIB) + bytes(MIB))
            waiting = asyncio.create_task(theirs.messages())
            await ours.close(1000, "")

            with pytest.raises(LinkClosed):
                await waiting
            assert (await ended(ours)).code

    run(test)


def test_large_message_does_not_starve_other_tasks(
    run: Any, tls: ServerTls | None
) -> None:
    body = memoryview(bytes(200 * MIB))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def test() -> None:
        async with pair(tls) as (ours, theirs):
            counting = asyncio.create_task(count())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ours.write(HEAD.pack(1, len(body))))
                tasks.create_task(ours.write(body))
                (whole,) = await read(theirs, 1)
            counting.cancel()

            assert len(whole.body) == len(body)
            # At most 8 MiB are written or read at once.
            assert turns >= 25

    run(test)


def test_sending_does_not_copy(run: Any, tls: ServerTls | None) -> None:
    body = memoryview(bytes(200 * MIB))

    async def test() -> None:
        async with pair(tls) as (ours, _):
            before = psutil.Process().memory_info().rss
            sending = asyncio.create_task(ours.write(body))
            while not ours._writing_paused:  # noqa: ASYNC110  # none tells
                await asyncio.sleep(0)

            assert ours.transport.get_write_buffer_size() <= 4 * UNSENT_MAX
            assert psutil.Process().memory_info().rss - before < 50 * MIB
            sending.cancel()
            await asyncio.wait([sending])
            ours.abort()

    run(test)


def test_small_message_overtakes_large_ones(run: Any, tls: ServerTls | None) -> None:
    chunk = bytes(256 << 10)

    def chunks(count: int) -> Iterator[bytes]:
        for _ in range(count):
            yield HEAD.pack(1, len(chunk))
            yield chunk
            yield b""

    async def test() -> None:
        async with pair(tls) as (ours, theirs):
            outbox = Outbox(ours)
            count = 256
            whole = count * (HEAD.size + len(chunk))
            outbox.send_bulk(Bulk(chunks(count), whole), 1)
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(outbox.run())
                got = [*await theirs.messages()]
                outbox.send(message(2, b"small"), 1)
                posted = len(got)
                while not any(len(each.body) == 5 for each in got):
                    got += await theirs.messages()
                outbox.close()
                await read(theirs, count + 1 - len(got))
                await writing

            # It waited for the bytes before it that were already in the kernel only.
            assert len(got) - posted < count / 2

    run(test)
