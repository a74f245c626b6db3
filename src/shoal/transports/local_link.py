"""A link between two sessions in the same process."""

import asyncio
from collections.abc import Sequence

from shoal.protocols.seam.session import Batch, Data
from shoal.transports.link import LinkClosed

ROOM = 1 << 20  # unread bytes from which senders wait


class LocalLink:
    """One end; what it is given, the other end receives."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._other = self
        self._inbox: list[Data] = []
        self._size = 0  # bytes in the inbox
        self._closed: LinkClosed | None = None
        self._reader: asyncio.Future[None] | None = None  # waits for something to read
        self._writers: list[asyncio.Future[None]] = []  # wait for room in the inbox

    async def receive(self) -> Batch:
        while not self._inbox:
            if self._closed is not None:
                raise self._closed
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        batch, self._inbox, self._size = self._inbox, [], 0
        self._make_room()
        return batch

    async def send(self, data: Data) -> None:
        self.write((data,))
        other = self._other
        while other._size > ROOM and other._closed is None:
            room = asyncio.get_running_loop().create_future()
            other._writers.append(room)
            await room

    async def close(self, code: int, text: str) -> None:
        self._end(f"closed here: {text}" if text else "closed here", code, text)
        self._other._end(f"closed by peer: {code} {text}".rstrip(), code, text)

    def pack(self, data: Data) -> Data:
        return data

    def write(self, packs: Sequence[Data]) -> None:
        other = self._other
        if other._closed is not None:
            raise other._closed
        other._inbox += packs
        other._size += sum(map(len, packs))
        other._wake()

    @property
    def unread(self) -> int:
        return self._other._size

    def abort(self) -> None:
        for end in (self, self._other):
            end._inbox, end._size = [], 0
            end._end("cut off", 1006, "")

    def _end(self, reason: str, code: int, text: str) -> None:
        if self._closed is None:
            self._closed = LinkClosed(reason, code, text)
        self._wake()
        self._make_room()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _make_room(self) -> None:
        waiting, self._writers = self._writers, []
        for each in waiting:
            if not each.done():
                each.set_result(None)


def local_links(name: str, other_name: str) -> tuple[LocalLink, LocalLink]:
    """Return the two ends of a connection, named for each other."""
    one, other = LocalLink(other_name), LocalLink(name)
    one._other, other._other = other, one
    return one, other
