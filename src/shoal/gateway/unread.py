"""What a client of ``/v1/calls`` is to be told, until it is written."""

import asyncio

import msgspec

from shoal.gateway.call_items import Told

UNREAD_MAX = 256 << 20  # bytes that a client may leave unread, about; then it is over
ITEM_SIZE = 128  # bytes of an item beside its value, about


class Unread:
    """Collects items, so that all that come together are one message."""

    def __init__(self) -> None:
        self._items: list[Told] = []
        self._size = 0  # bytes, with those that are being written
        self._taken = 0  # bytes of those
        self._wake: asyncio.Future[None] | None = None
        self._closed = False
        self._full = asyncio.Event()
        self._encode = msgspec.msgpack.Encoder().encode

    def tell(self, item: Told) -> None:
        """Have an item written, unless nobody is there any more."""
        if self._closed:
            return
        self._items.append(item)
        value = item[2]
        self._size += ITEM_SIZE
        if isinstance(value, bytes):
            self._size += len(value)
        if self._size > UNREAD_MAX:
            # Here, and not when it is written: whoever does not read holds that up.
            self.close()
            self._full.set()
            return
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def close(self) -> None:
        """Collect nothing more."""
        self._closed = True
        self._items.clear()

    async def full(self) -> None:
        """Wait until it is too much, for the client does not read."""
        await self._full.wait()

    async def take(self) -> bytes:
        """Wait for something to write; return it as one message.

        What was taken before counts as written.
        """
        self._size -= self._taken
        self._taken = 0
        while not self._items:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        items, self._items = self._items, []
        self._taken = self._size
        return self._encode(items)
