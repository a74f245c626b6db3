"""The outbox: messages and bulks to one peer, and their order."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from shoal.protocols.seam.framing import FramedMessage, FramedSession
from shoal.protocols.seam.session import Bulk, Data
from shoal.transports.link import LinkClosed, OnMessages
from shoal.transports.outbox import (
    BULK_MAX,
    ISSUED_MAX,
    OUTBOX_FULL,
    OUTBOX_MAX,
    Outbox,
)
from simulation import virtual
from transports.memory_links import MemoryLink

LARGE = 1 << 20


class SlowLink(MemoryLink):
    """A link that accepts one item at a time, on demand."""

    def __init__(self) -> None:
        super().__init__()
        self._takes = asyncio.Semaphore(0)

    async def send(self, data: bytes | str) -> None:
        await self._takes.acquire()
        await super().send(data)

    async def accept(self, things: int = 1) -> None:
        """Accept ``things`` items."""
        for _ in range(things):
            self._takes.release()
            await asyncio.sleep(1.0)


def test_message_overtakes_queued_bulks() -> None:
    async def scenario() -> None:
        link = SlowLink()
        outbox = Outbox(link)
        writing = asyncio.create_task(outbox.run())
        outbox.send("before", 1)
        for number in b"12":
            outbox.send_bulk(Bulk((b"head%c" % number, b"body%c" % number)), 1)
        await link.accept(2)
        outbox.send("meanwhile", 1)

        await link.accept(10)
        outbox.close()
        await writing

        first, last = [b"head1", b"body1"], [b"head2", b"body2"]
        assert link.sent == ["before", *first, "meanwhile", *last]

    virtual.run(scenario())


def test_message_interleaves_a_running_bulk() -> None:
    def chunks() -> Iterator[bytes]:
        for number in range(3):
            yield b"%d" % number * 4
            yield b""

    async def scenario() -> None:
        link = SlowLink()
        outbox = Outbox(link)
        writing = asyncio.create_task(outbox.run())
        outbox.send_bulk(Bulk(chunks(), 12), 1)
        await link.accept()
        outbox.send("small", 1)

        await link.accept(10)
        outbox.close()
        await writing

        assert link.sent == [b"0000", b"1111", "small", b"2222"]

    virtual.run(scenario())


def test_parts_are_created_when_written() -> None:
    made = []

    def parts() -> Iterator[bytes]:
        for number in range(4):
            made.append(number)
            yield bytes(LARGE)

    async def scenario() -> None:
        link = SlowLink()
        outbox = Outbox(link)
        writing = asyncio.create_task(outbox.run())
        outbox.send_bulk(Bulk(parts(), 4 * LARGE), 1)
        await link.accept()

        assert made == [0, 1]

        outbox.close()
        await link.accept(3)
        await writing

    virtual.run(scenario())


def test_empty_bulk_does_not_block_others() -> None:
    turns = 0

    def parts() -> Iterator[bytes]:
        for _ in range(10):
            yield b""
        yield b"done"

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def scenario() -> None:
        link = MemoryLink()
        outbox = Outbox(link)
        counting = asyncio.create_task(count())
        outbox.send_bulk(Bulk(parts(), 4), 1)
        outbox.close()
        await outbox.run()
        counting.cancel()

        assert turns >= 10
        assert link.sent == [b"done"]

    virtual.run(scenario())


def test_bulk_of_another_size_is_a_bug() -> None:
    async def scenario() -> None:
        outbox = Outbox(MemoryLink())
        outbox.send_bulk(Bulk(iter([b"12345"]), 6), 1)
        outbox.close()

        with pytest.raises(AssertionError, match="1 bytes smaller"):
            await outbox.run()

    virtual.run(scenario())


def test_bulk_counts_as_unsent_until_written() -> None:
    async def scenario() -> None:
        link = SlowLink()
        outbox = Outbox(link)
        writing = asyncio.create_task(outbox.run())
        outbox.send_bulk(Bulk((bytes(OUTBOX_FULL), b"12")), 1)
        room = asyncio.create_task(outbox.wait_for_bulk_room())
        await asyncio.sleep(1.0)
        await outbox.wait_for_room()  # for messages: they overtake it
        assert not room.done()

        await link.accept()
        assert room.done()

        outbox.close()
        await link.accept()
        await writing

    virtual.run(scenario())


@pytest.mark.parametrize(
    ("patience", "limit"),
    [(1, OUTBOX_MAX), (ISSUED_MAX, OUTBOX_MAX * BULK_MAX)],
    ids=["provoked", "issued"],
)
def test_unread_bulks_exceed_the_limit(patience: int, limit: int) -> None:
    async def scenario() -> None:
        outbox = Outbox(MemoryLink())
        body = memoryview(bytes(4 * OUTBOX_MAX))  # above the limit of unread messages
        posted = 0
        while outbox.send_bulk(Bulk((body,)), patience):
            posted += len(body)

        assert limit < posted <= limit + len(body)

    virtual.run(scenario())


def test_running_bulk_does_not_count_against_messages() -> None:
    async def scenario() -> None:
        outbox = Outbox(MemoryLink())
        body = memoryview(bytes(4 * OUTBOX_MAX))
        assert outbox.send_bulk(Bulk((body,)), ISSUED_MAX)

        assert outbox.send("a heartbeat", 1)

    virtual.run(scenario())


def test_close_ends_a_running_bulk() -> None:
    async def scenario() -> None:
        link = SlowLink()
        outbox = Outbox(link)
        writing = asyncio.create_task(outbox.run())
        outbox.send_bulk(Bulk((b"head", b"body")), 1)
        await link.accept()
        link.cut()
        await link.accept()

        with pytest.raises(LinkClosed):
            await writing

    virtual.run(scenario())


class ImmediateLink(MemoryLink):
    """A link that accepts messages at once while it is ``open``."""

    def __init__(self) -> None:
        super().__init__()
        self.open = True

    def try_send(self, data: Data) -> bool:
        if self.open:
            self.sent.append(data)
        return self.open

    def attach(
        self, framed: FramedSession[object], hear: OnMessages | None = None
    ) -> None:
        raise AssertionError("nothing is read in these tests")

    async def messages(self) -> Sequence[FramedMessage]:
        raise AssertionError("nothing is read in these tests")

    async def write(self, part: bytes | memoryview) -> None:
        await self.send(bytes(part))


def test_message_is_sent_at_once_if_possible() -> None:
    async def scenario() -> None:
        link = ImmediateLink()
        outbox = Outbox(link)
        writing = asyncio.create_task(outbox.run())
        outbox.send(b"before the writer runs", 1)
        await asyncio.sleep(0)

        outbox.send(b"at once", 1)
        assert link.sent == [b"before the writer runs", b"at once"]

        link.open = False
        outbox.send(b"has to wait", 1)
        link.open = True
        outbox.send(b"after it", 1)
        assert len(link.sent) == 2
        outbox.close()
        await writing
        assert link.sent[2:] == [b"has to wait", b"after it"]

    virtual.run(scenario())


class Turns:
    """A bulk of two parts that is written while it is ready."""

    def __init__(self, name: bytes) -> None:
        self.ready = True
        self.bulk = Bulk(self._parts(name), 2 * len(name) + 2, lambda: self.ready)

    def _parts(self, name: bytes) -> Iterator[bytes]:
        yield name + b"1"
        yield b""
        yield name + b"2"


def test_bulks_that_take_turns_are_written_while_they_are_ready() -> None:
    async def scenario() -> None:
        link = MemoryLink()
        outbox = Outbox(link)
        first, second, third = map(Turns, (b"a", b"b", b"c"))
        second.ready = False
        writing = asyncio.create_task(outbox.run())
        for each in (first, second, third):
            outbox.send_bulk(each.bulk, 1)
        await asyncio.sleep(1.0)
        outbox.send(b"small", 1)
        await asyncio.sleep(1.0)

        assert outbox.stalled
        assert link.sent == [b"a1", b"c1", b"a2", b"c2", b"small"]
        second.ready = True
        outbox.resume()
        await asyncio.sleep(1.0)

        assert link.sent[5:] == [b"b1", b"b2"]
        outbox.close()
        await writing

    virtual.run(scenario())


def test_close_drops_what_is_not_ready() -> None:
    async def scenario() -> None:
        link = MemoryLink()
        outbox = Outbox(link)
        waits = Turns(b"a")
        waits.ready = False
        outbox.send_bulk(waits.bulk, 1)
        outbox.send(b"small", 1)
        outbox.close()

        await outbox.run()

        assert link.sent == [b"small"]

    virtual.run(scenario())
