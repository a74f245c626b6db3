"""The queue of items for a client of ``/v1/calls``."""

import asyncio

import msgspec

from shoal.calls.messages import ReplyItem

UNSENT_MAX = 256 << 20  # estimated unread bytes at which the client is disconnected
ITEM_SIZE = 128  # estimated bytes of an item without its value


class SendQueue:
    """Collects items and batches them into messages."""

    def __init__(self) -> None:
        self._items: list[ReplyItem] = []
        self._size = 0  # bytes, including those being written
        self._writing = 0  # bytes being written
        self._wake: asyncio.Future[None] | None = None
        self._closed = False
        self._overflow = asyncio.Event()
        self._encode = msgspec.msgpack.Encoder().encode

    def put(self, item: ReplyItem) -> None:
        """Queue an item, unless the queue is closed."""
        if self._closed:
            return
        self._items.append(item)
        value = item[2]
        self._size += ITEM_SIZE
        if isinstance(value, bytes):
            self._size += len(value)
        if self._size > UNSENT_MAX:
            # Checked here, because a client that does not read blocks the writer.
            self.close()
            self._overflow.set()
            return
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def close(self) -> None:
        """Drop all items, and queue no more."""
        self._closed = True
        self._items.clear()

    async def wait_overflow(self) -> None:
        """Wait until the queue overflows because the client does not read."""
        await self._overflow.wait()

    async def next_message(self) -> bytes:
        """Wait for items; return them as one message.

        The previous message counts as written.
        """
        self._size -= self._writing
        self._writing = 0
        while not self._items:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        items, self._items = self._items, []
        self._writing = self._size
        return self._encode(items)
