"""What a client of ``/v1/calls`` is to be told, until it is written."""

import asyncio

import msgspec

from shoal.calls.messages import ReplyItem

UNSENT_MAX = 256 << 20  # bytes that a client may leave unread, about; then it is over
ITEM_SIZE = 128  # bytes of an item beside its value, about


class SendQueue:
    """Collects items, so that all that come together are one message."""

    def __init__(self) -> None:
        self._items: list[ReplyItem] = []
        self._size = 0  # bytes, with those that are being written
        self._writing = 0  # bytes of those
        self._wake: asyncio.Future[None] | None = None
        self._closed = False
        self._overflow = asyncio.Event()
        self._encode = msgspec.msgpack.Encoder().encode

    def put(self, item: ReplyItem) -> None:
        """Have an item written, unless nobody is there any more."""
        if self._closed:
            return
        self._items.append(item)
        value = item[2]
        self._size += ITEM_SIZE
        if isinstance(value, bytes):
            self._size += len(value)
        if self._size > UNSENT_MAX:
            # Here, and not when it is written: whoever does not read holds that up.
            self.close()
            self._overflow.set()
            return
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def close(self) -> None:
        """Collect nothing more."""
        self._closed = True
        self._items.clear()

    async def wait_overflow(self) -> None:
        """Wait until it is too much, for the client does not read."""
        await self._overflow.wait()

    async def next_message(self) -> bytes:
        """Wait for something to write; return it as one message.

        What was taken before counts as written.
        """
        self._size -= self._writing
        self._writing = 0
        while not self._items:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        items, self._items = self._items, []
        self._writing = self._size
        return self._encode(items)
