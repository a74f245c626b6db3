"""What is to be written to one peer, and in which order it goes out."""

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
    """Takes one thing at a time, each when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._takes = asyncio.Semaphore(0)

    async def send(self, data: bytes | str) -> None:
        await self._takes.acquire()
        await super().send(data)

    async def take(self, things: int = 1) -> None:
        """Take so many, and see what is sent next."""
        for _ in range(things):
            self._takes.release()
            await asyncio.sleep(1.0)


def test_message_goes_out_before_bulks_that_came_first() -> None:
    async def scenario() -> None:
        link = SlowLink()
        outbox = Outbox(link)
        writing = asyncio.create_task(outbox.run())
        outbox.send("before", 1)
        for number in b"12":
            outbox.send_bulk(Bulk((b"head%c" % number, b"body%c" % number)), 1)
        await link.take(2)
        outbox.send("meanwhile", 1)

        await link.take(10)
        outbox.close()
        await writing

        first, last = [b"head1", b"body1"], [b"head2", b"body2"]
        assert link.sent == ["before", *first, "meanwhile", *last]

    virtual.run(scenario())


def test_message_goes_out_where_a_bulk_has_a_gap() -> None:
    def chunks() -> Iterator[bytes]:
        for number in range(3):
            yield b"%d" % number * 4
            yield b""

    async def scenario() -> None:
        link = SlowLink()
        outbox = Outbox(link)
        writing = asyncio.create_task(outbox.run())
        outbox.send_bulk(Bulk(chunks(), 12), 1)
        await link.take()
        outbox.send("small", 1)

        await link.take(10)
        outbox.close()
        await writing

        assert link.sent == [b"0000", b"1111", "small", b"2222"]

    virtual.run(scenario())


def test_parts_are_made_as_they_are_written() -> None:
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
        await link.take()

        assert made == [0, 1]

        outbox.close()
        await link.take(3)
        await writing

    virtual.run(scenario())


def test_others_have_their_turn_where_a_bulk_is_empty() -> None:
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


def test_bulk_that_is_not_what_it_was_said_to_be_is_a_bug() -> None:
    async def scenario() -> None:
        outbox = Outbox(MemoryLink())
        outbox.send_bulk(Bulk(iter([b"12345"]), 6), 1)
        outbox.close()

        with pytest.raises(AssertionError, match="1 bytes smaller"):
            await outbox.run()

    virtual.run(scenario())


def test_bulk_counts_until_it_is_written() -> None:
    async def scenario() -> None:
        link = SlowLink()
        outbox = Outbox(link)
        writing = asyncio.create_task(outbox.run())
        outbox.send_bulk(Bulk((bytes(OUTBOX_FULL), b"12")), 1)
        room = asyncio.create_task(outbox.wait_for_room())
        await asyncio.sleep(1.0)
        assert not room.done()

        await link.take()
        assert room.done()

        outbox.close()
        await link.take()
        await writing

    virtual.run(scenario())


@pytest.mark.parametrize(
    ("patience", "limit"),
    [(1, OUTBOX_MAX), (ISSUED_MAX, OUTBOX_MAX * BULK_MAX)],
    ids=["provoked", "issued"],
)
def test_bulks_that_nobody_reads_are_too_much_some_day(
    patience: int, limit: int
) -> None:
    async def scenario() -> None:
        outbox = Outbox(MemoryLink())
        body = memoryview(bytes(4 * OUTBOX_MAX))  # more than may be unread of messages
        posted = 0
        while outbox.send_bulk(Bulk((body,)), patience):
            posted += len(body)

        assert limit < posted <= limit + len(body)

    virtual.run(scenario())


def test_message_is_not_too_much_because_a_bulk_is_under_way() -> None:
    async def scenario() -> None:
        outbox = Outbox(MemoryLink())
        body = memoryview(bytes(4 * OUTBOX_MAX))
        assert outbox.send_bulk(Bulk((body,)), ISSUED_MAX)

        assert outbox.send("a heartbeat", 1)

    virtual.run(scenario())


def test_end_of_the_link_ends_a_bulk_that_is_half_written() -> None:
    async def scenario() -> None:
        link = SlowLink()
        outbox = Outbox(link)
        writing = asyncio.create_task(outbox.run())
        outbox.send_bulk(Bulk((b"head", b"body")), 1)
        await link.take()
        link.cut()
        await link.take()

        with pytest.raises(LinkClosed):
            await writing

    virtual.run(scenario())


class PromptLink(MemoryLink):
    """Takes messages without waiting while it is ``open``, and cuts some."""

    certificate = b""

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


def test_message_that_needs_no_waiting_is_said_at_once() -> None:
    async def scenario() -> None:
        link = PromptLink()
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
