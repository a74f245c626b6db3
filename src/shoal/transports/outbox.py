"""The send queue of one connection: messages in order, which overtake bulk data."""

import asyncio
from collections.abc import Sequence

from shoal.protocols.seam.session import Bulk, Data
from shoal.transports.link import FramingLink, JoiningLink, Link

OUTBOX_MAX = 16 << 20  # unread bytes of replies
ISSUED_MAX = 16  # times as much for commands: long prompts, in all slots
BULK_MAX = 64  # times as much for bulk data, which is not copied
OUTBOX_FULL = 1 << 20  # unread bytes from which senders wait
TURN = 1 << 20  # bytes of bulk data between messages


class Outbox:
    """Messages in order, and bulk data behind all messages, in order or in turns.

    One task writes.  A message waits at most for the current part of the bulk data that
    has begun, and for what the system has buffered.

    ``stalled``: there is bulk data, and none of it was ready: see ``resume``.
    """

    __slots__ = (
        "_bulk_size",
        "_bulks",
        "_closed",
        "_finishing",
        "_framing",
        "_joining",
        "_link",
        "_messages",
        "_size",
        "_waiting",
        "_writer",
        "stalled",
    )

    def __init__(self, link: Link) -> None:
        # Plain lists and futures: events and deques would be a tenth of what an idle
        # worker takes.
        self._link = link
        self._framing = link if isinstance(link, FramingLink) else None
        self._joining = link if isinstance(link, JoiningLink) else None
        self._messages: list[Data] = []
        self._bulks: list[_QueuedBulk] = []
        self._size = 0  # bytes of messages, with those that are being sent
        self._bulk_size = 0  # the same of bulks, which messages do not wait for
        self._writer: asyncio.Future[None] | None = None  # waits for something to send
        self._waiting: list[asyncio.Future[None]] = []  # for room
        self._finishing = self._closed = False
        self.stalled = False

    def send(self, data: Data, patience: int) -> bool:
        """Queue a message; return whether the peer keeps up with reading.

        ``patience`` is how many times ``OUTBOX_MAX`` may be unread.
        """
        if self._framing is not None and self._idle and self._framing.try_send(data):
            return True  # written at once: the writer need not wake
        # Never wait here: two peers that both stop reading in order to write would
        # wait for each other for ever.
        self._messages.append(data)
        self._size += len(data)
        if (writer := self._writer) is not None and not writer.done():
            writer.set_result(None)  # as ``_wake`` does, once per message
        return self._size <= OUTBOX_MAX * patience

    def send_bulk(self, bulk: Bulk, patience: int) -> bool:
        """Queue bulk data; return whether the peer keeps up with reading."""
        # Only the data before it counts, so that one of any size fits.
        times = BULK_MAX if patience == ISSUED_MAX else patience
        if self._bulk_size > OUTBOX_MAX * times:
            return False
        queued = _QueuedBulk(bulk)
        self._bulks.append(queued)
        self._bulk_size += queued.remaining
        self._wake()
        return True

    def clear(self) -> None:
        """Drop everything that is not being written yet."""
        self._messages.clear()
        self._bulks.clear()
        self._size = self._bulk_size = 0

    def resume(self) -> None:
        """Look again whether bulk data is ready."""
        self.stalled = False
        self._wake()

    def finish(self) -> bool:
        """Let ``run`` return when all bulk data is written; return if there is any."""
        self._finishing = self._bulk_size > 0
        return self._finishing

    def close(self) -> None:
        """Let ``run`` return when everything is written, and wake waiting senders.

        Bulk data that is not ready is dropped.
        """
        self._closed = True
        self._make_room()
        self._wake()

    async def wait_for_room(self) -> None:
        """Wait until the peer has read most messages, or has left.

        Bulk data does not count, which they overtake.
        """
        while self._size > OUTBOX_FULL and not self._closed:
            await self._until_some_is_written()

    async def wait_for_bulk_room(self) -> None:
        """Wait until the peer has read most of the queue, or has left."""
        while self._size + self._bulk_size > OUTBOX_FULL and not self._closed:
            await self._until_some_is_written()

    async def _until_some_is_written(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    async def run(self) -> None:
        """Write until closed.  Raises LinkClosed."""
        while self._messages or self._bulks or not (self._closed or self._finishing):
            if self._messages:
                await self._write_messages()
            if (bulk := self._take_bulk()) is not None:
                # One only: messages that arrive meanwhile overtake the rest.
                await self._write_bulk(bulk)
            elif not self._messages:
                if self._closed:
                    return
                self.stalled = bool(self._bulks)
                self._writer = asyncio.get_running_loop().create_future()
                await self._writer
                self._writer = None

    async def _write_messages(self) -> None:
        """Write the queued messages."""
        batch, self._messages = self._messages, []
        if len(batch) > 1 and self._joining is not None and self._joining.joined_max:
            batch = joined(batch, self._joining.joined_max)
        for data in batch:
            await self._link.send(data)
            self._size -= len(data)
            if self._waiting and self._size <= OUTBOX_FULL:
                self._make_room()

    def _take_bulk(self) -> "_QueuedBulk | None":
        """Remove the first bulk that is ready from the queue, and return it."""
        for place, queued in enumerate(self._bulks):
            if queued.is_ready is None or queued.is_ready():
                return self._bulks.pop(place)
        return None

    async def _write_bulk(self, queued: "_QueuedBulk") -> None:
        """Write a bulk, or its part of one turn."""
        link, framing = self._link, self._framing
        written = 0  # bytes since others had theirs
        for part in queued.parts:
            size = len(part)
            if not size:
                if queued.is_ready is not None:
                    self._bulks.append(queued)
                    await asyncio.sleep(0)
                    return
                # Making the next one may take long; of many small ones each does not.
                if not written or written >= TURN:
                    written = 0
                    await asyncio.sleep(0)
                if self._messages:
                    await self._write_messages()
            elif framing is not None:
                await framing.write(part)
            else:
                await link.send(bytes(part))
            queued.remaining -= size
            written += size
            self._bulk_size -= size
            if self._waiting and self._size <= OUTBOX_FULL:
                self._make_room()
        remaining = queued.remaining
        assert not remaining, f"a bulk is {remaining} bytes smaller than its size"

    @property
    def _idle(self) -> bool:
        """Whether the writer has written all that there is, and waits for more."""
        return self._writer is not None and not self._writer.done()

    def _make_room(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    def _wake(self) -> None:
        writer = self._writer
        if writer is not None and not writer.done():
            writer.set_result(None)


class _QueuedBulk:
    """What is left of a bulk; ``remaining`` is in bytes."""

    __slots__ = ("is_ready", "parts", "remaining")

    def __init__(self, bulk: Bulk) -> None:
        self.is_ready = bulk.is_ready
        self.parts = iter(bulk.parts)
        self.remaining = _size_of(bulk)


def joined(messages: Sequence[Data], size_max: int) -> list[Data]:
    """Return messages with those joined that have ``size_max`` bytes together."""
    found: list[Data] = []
    together: list[bytes] = []
    size = 0
    for data in messages:
        assert isinstance(data, bytes), "text is not joined"
        if together and size + len(data) > size_max:
            found.append(b"".join(together))
            together, size = [], 0
        together.append(data)
        size += len(data)
    return [*found, b"".join(together)]


def _size_of(bulk: Bulk) -> int:
    """Return how many bytes the parts are together."""
    if bulk.size is not None:
        return bulk.size
    assert isinstance(bulk.parts, tuple), "only a tuple can be iterated twice"
    return sum(map(len, bulk.parts))
