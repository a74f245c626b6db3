"""Calls on their way: said over one WebSocket, and again over the next if it breaks.

A durable call is asked again under its key, so that it runs once; one that is not is
asked again only if it never left.  Everything here happens on one event loop.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from itertools import islice

from aiohttp import ClientError, ClientSession, ClientWebSocketResponse, WSMsgType

from shoal.client import wire
from shoal.client.asked import Asked
from shoal.client.blobs import Blob, Shelf
from shoal.client.dialling import Dialler
from shoal.client.failures import ConnectionLost, failure
from shoal.client.freight import Freight
from shoal.client.lookout import LOOKED_AT_MAX, Lookout
from shoal.client.place import Place
from shoal.client.telling import tell
from shoal.domain.errors import InvalidRequest, PeerError, ShoalError

MESSAGE_ROOM = 256 << 10  # bytes of arguments that share a message
ITEMS_MAX = 1024  # that share a message

# What is out at a time: less than what a coordinator takes of one connection, for it
# refuses what is more.  The rest waits here.
OUT_MAX = 50_000  # calls
OUT_SIZE_MAX = 48 << 20  # bytes of their arguments

BROKEN = (
    "the connection to the coordinator broke while the call was out, so that it may "
    "have run or not; durable calls are asked again by themselves, others with "
    "with_options(retry=True)"
)


class Conversation:
    """All calls of one client."""

    def __init__(self, session: ClientSession, place: Place) -> None:
        self._dialler = Dialler(session, place)
        self._freight = Freight(Shelf(session, place), self._spawn, self._loaded)
        self._open: dict[int, Asked] = {}
        self._unsent: deque[Asked] = deque()
        # Calls to be cancelled, and whether the connection knows of them.
        self._dropped: deque[tuple[Asked, bool]] = deque()
        self._out = self._out_size = 0
        self._heard = 0  # words about calls that workers have, or that have ended
        self._lookout = Lookout(session, place, self._waiting, lambda: self._heard)
        self._wake = asyncio.Event()
        self._closing = False
        self._tasks: asyncio.TaskGroup | None = None

    def ask(self, asked: Asked) -> None:
        """Have a function called."""
        self._open[asked.number] = asked
        if asked.blobs:
            self._freight.give(asked)
        else:
            self._unsent.append(asked)
            self._wake.set()

    def drop(self, asked: Asked) -> None:
        """Stop a call: nobody waits for it any more."""
        if self._open.pop(asked.number, None) is not None:
            if asked.sent:
                self._dropped.append((asked, True))
                self._back(asked)
            self._wake.set()

    async def put(self, blob: Blob) -> None:
        """Give a large value to the coordinator.  Raises as ``Shelf.give`` does."""
        await self._freight.put(blob)

    def close(self) -> None:
        """End when nothing is open any more."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Carry calls until ``close``, and then until the last has ended."""
        async with asyncio.TaskGroup() as self._tasks:
            while await self._wanted():
                try:
                    socket = await self._dialler.dial(lambda: bool(self._open))
                except ShoalError as error:
                    self._fail_all(error)
                else:
                    await self._serve(socket)
                    self._part()

    async def _wanted(self) -> bool:
        """Wait until there is something to say; False if there never will be."""
        while not self._unsent and not self._dropped:
            if self._closing and not self._open:
                return False
            self._wake.clear()
            await self._wake.wait()
        return True

    async def _serve(self, socket: ClientWebSocketResponse) -> None:
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(self._write(socket))
            looking = group.create_task(self._lookout.run())
            try:
                while (message := await socket.receive()).type is WSMsgType.BINARY:
                    for news in wire.read(message.data):
                        self._hear(news)
                if message.type is WSMsgType.CLOSE and message.data in wire.REFUSALS:
                    # Asked again, it would be refused again.
                    raise InvalidRequest(f"the coordinator hung up: {message.extra}")
            except (PeerError, InvalidRequest) as error:
                self._fail_all(error)
            writing.cancel()
            looking.cancel()
        await socket.close()

    async def _write(self, socket: ClientWebSocketResponse) -> None:
        with suppress(ClientError, ConnectionError):  # the reader sees the end as well
            while True:
                while items := self._items():
                    await socket.send_bytes(wire.write(items))
                if self._closing and not self._open:
                    break
                self._wake.clear()
                await self._wake.wait()
        await socket.close()

    def _waiting(self) -> list[Asked]:
        """Return calls that are out, and that no worker is known to have."""
        some = islice(self._open.values(), LOOKED_AT_MAX)
        return [asked for asked in some if asked.sent and not asked.begun]

    def _items(self) -> list[tuple[object, ...]]:
        """Return what goes into the next message."""
        items: list[tuple[object, ...]] = []
        while self._dropped:
            asked, known = self._dropped.popleft()
            if not known:
                items.append(asked.item)
            items.append(wire.cancel(asked.number))
        room = min(MESSAGE_ROOM, OUT_SIZE_MAX - self._out_size)
        while self._unsent and room > 0 and len(items) < ITEMS_MAX:
            if self._out >= OUT_MAX:
                break
            asked = self._unsent.popleft()
            if asked.number in self._open:
                asked.sent = True
                self._out += 1
                self._out_size += asked.size
                items.append(asked.item)
                room -= asked.size
        return items

    def _back(self, asked: Asked) -> None:
        """Count a call as no longer out."""
        asked.sent = asked.begun = False
        self._out -= 1
        self._out_size -= asked.size
        if self._unsent:
            self._wake.set()

    def _hear(self, news: wire.News) -> None:
        if not isinstance(news, wire.Accepted):
            self._heard += 1
        asked = self._open.get(news.number)
        if asked is None:
            return  # it was dropped
        match news:
            case wire.Done(_, value, ""):
                self._end(asked, value, None)
            case wire.Done(_, _, digest):
                self._freight.fetch(asked, digest, self._end)
            case wire.Failed(_, "lacks", digests, _):
                self._back(asked)
                self._freight.give_again(asked, digests)
            case wire.Failed(_, kind, text, meta):
                self._end(asked, None, failure(kind, text, meta, asked.home))
            case wire.Accepted(_, job_id):
                asked.job_id = job_id
            case wire.Advanced(_, share, remark):
                asked.begun = True
                if asked.advanced is not None:
                    tell(asked.advanced, share, remark)
            case wire.Begun():
                asked.begun = True

    def _loaded(self, asked: Asked, error: Exception | None) -> None:
        if error is not None:
            self._end(asked, None, error)
        else:
            self._unsent.append(asked)
            self._wake.set()

    def _end(self, asked: Asked, value: bytes | None, error: Exception | None) -> None:
        if self._open.pop(asked.number, None) is None:
            return
        if asked.sent:
            self._back(asked)
        asked.ended(value, error)
        if self._closing and not self._open:
            self._wake.set()

    def _part(self) -> None:
        """Sort what was out when the connection ended."""
        out = [asked for asked in self._open.values() if asked.sent]
        for asked in out:
            if asked.again:
                self._back(asked)
                asked.asked_before()
            else:
                self._end(asked, None, ConnectionLost(BROKEN))
        self._unsent.extendleft(reversed([each for each in out if each.again]))
        # What was not told in time is asked for once more, to be found, and cancelled.
        dropped = [asked for asked, _ in self._dropped if asked.again]
        self._dropped = deque((asked, False) for asked in dropped)
        for asked in dropped:
            asked.asked_before()
        self._freight.forget()

    def _fail_all(self, error: ShoalError) -> None:
        self._unsent.clear()
        self._dropped.clear()
        for asked in list(self._open.values()):
            self._end(asked, None, error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        assert self._tasks is not None, "calls are asked while `run` runs"
        self._tasks.create_task(work)
