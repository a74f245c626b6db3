"""The calls of one client, over one WebSocket, and over the next if it breaks.

A durable call is sent again under its key, so that it runs once; one that is not is
sent again only if it never left.  Everything here happens on one event loop.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from itertools import islice

from aiohttp import ClientError, ClientSession, ClientWebSocketResponse, WSMsgType

from shoal.client import messages
from shoal.client.availability import EXAMINED_MAX, StalledCallMonitor
from shoal.client.blob_transfers import BlobTransfers
from shoal.client.blobs import Blob, BlobClient
from shoal.client.coordinator import CallDialer, CoordinatorAddress
from shoal.client.errors import ConnectionLost, call_error
from shoal.client.options import report_progress
from shoal.client.pending_calls import ClientCall
from shoal.domain.errors import InvalidRequest, PeerError, ShoalError

MESSAGE_ARGUMENTS_MAX = 256 << 10  # bytes of arguments that share a message
ITEMS_MAX = 1024  # of a message

# Limits of unanswered calls, below those of the coordinator, which rejects an excess.
# Further calls wait here.
OUT_MAX = 50_000  # calls
OUT_SIZE_MAX = 48 << 20  # bytes of their arguments

CONNECTION_BROKE = (
    "the connection to the coordinator broke during the call, which may or may not "
    "have run; only durable calls are sent again, or others with "
    "with_options(retry=True)"
)


class CallChannel:
    """Sends all calls of one client, and receives their results."""

    def __init__(self, session: ClientSession, place: CoordinatorAddress) -> None:
        self._dialler = CallDialer(session, place)
        self._freight = BlobTransfers(
            BlobClient(session, place), self._spawn, self._loaded
        )
        self._open: dict[int, ClientCall] = {}
        self._unsent: deque[ClientCall] = deque()
        # Calls to cancel, and whether they were sent on this connection.
        self._dropped: deque[tuple[ClientCall, bool]] = deque()
        self._out = self._out_size = 0
        self._heard = 0  # messages about started, progressed and ended calls
        self._lookout = StalledCallMonitor(
            session, place, self._waiting, lambda: self._heard
        )
        self._wake = asyncio.Event()
        self._closing = False
        self._tasks: asyncio.TaskGroup | None = None

    def submit(self, asked: ClientCall) -> None:
        """Send a call."""
        self._open[asked.number] = asked
        if asked.blobs:
            self._freight.upload(asked)
        else:
            self._unsent.append(asked)
            self._wake.set()

    def drop(self, asked: ClientCall) -> None:
        """Cancel a call whose result is not wanted any more."""
        if self._open.pop(asked.number, None) is not None:
            if asked.sent:
                self._dropped.append((asked, True))
                self._back(asked)
            self._wake.set()

    async def put(self, blob: Blob) -> None:
        """Upload a large value.  Raises as ``BlobClient.upload`` does."""
        await self._freight.put(blob)

    def close(self) -> None:
        """End once no call is open."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Serve until ``close``, and then until the last call has ended."""
        async with asyncio.TaskGroup() as self._tasks:
            while await self._wanted():
                try:
                    socket = await self._dialler.dial(lambda: bool(self._open))
                except ShoalError as error:
                    self._fail_all(error)
                else:
                    await self._serve(socket)
                    self._requeue_sent()

    async def _wanted(self) -> bool:
        """Wait until there is something to send; return False at the end."""
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
                    for news in messages.decode(message.data):
                        self._receive(news)
                if (
                    message.type is WSMsgType.CLOSE
                    and message.data in messages.REFUSALS
                ):
                    # A repetition would be refused again.
                    raise InvalidRequest(
                        f"the coordinator disconnected: {message.extra}"
                    )
            except (PeerError, InvalidRequest) as error:
                self._fail_all(error)
            writing.cancel()
            looking.cancel()
        await socket.close()

    async def _write(self, socket: ClientWebSocketResponse) -> None:
        with suppress(ClientError, ConnectionError):  # the reader detects the end, too
            while True:
                while items := self._items():
                    await socket.send_bytes(messages.encode(items))
                if self._closing and not self._open:
                    break
                self._wake.clear()
                await self._wake.wait()
        await socket.close()

    def _waiting(self) -> list[ClientCall]:
        """Return calls that were sent and have not started."""
        some = islice(self._open.values(), EXAMINED_MAX)
        return [asked for asked in some if asked.sent and not asked.started]

    def _items(self) -> list[tuple[object, ...]]:
        """Return the items of the next message."""
        items: list[tuple[object, ...]] = []
        while self._dropped:
            asked, known = self._dropped.popleft()
            if not known:
                items.append(asked.item)
            items.append(messages.cancel_item(asked.number))
        room = min(MESSAGE_ARGUMENTS_MAX, OUT_SIZE_MAX - self._out_size)
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

    def _back(self, asked: ClientCall) -> None:
        """Count a call as no longer sent."""
        asked.sent = asked.started = False
        self._out -= 1
        self._out_size -= asked.size
        if self._unsent:
            self._wake.set()

    def _receive(self, news: messages.CallEvent) -> None:
        if not isinstance(news, messages.CallAccepted):
            self._heard += 1
        asked = self._open.get(news.number)
        if asked is None:
            return  # it was dropped
        match news:
            case messages.CallDone(_, value, ""):
                self._end(asked, value, None)
            case messages.CallDone(_, _, digest):
                self._freight.download(asked, digest, self._end)
            case messages.CallFailed(_, "lacks", digests, _):
                self._back(asked)
                self._freight.upload_again(asked, digests)
            case messages.CallFailed(_, kind, text, meta):
                self._end(asked, None, call_error(kind, text, meta, asked.home))
            case messages.CallAccepted(_, job_id):
                asked.job_id = job_id
            case messages.CallAdvanced(_, share, remark):
                asked.started = True
                if asked.on_progress is not None:
                    report_progress(asked.on_progress, share, remark)
            case messages.CallStarted():
                asked.started = True

    def _loaded(self, asked: ClientCall, error: Exception | None) -> None:
        if error is not None:
            self._end(asked, None, error)
        else:
            self._unsent.append(asked)
            self._wake.set()

    def _end(
        self, asked: ClientCall, value: bytes | None, error: Exception | None
    ) -> None:
        if self._open.pop(asked.number, None) is None:
            return
        if asked.sent:
            self._back(asked)
        asked.on_ended(value, error)
        if self._closing and not self._open:
            self._wake.set()

    def _requeue_sent(self) -> None:
        """Queue sent calls again after a lost connection, or fail them."""
        out = [asked for asked in self._open.values() if asked.sent]
        for asked in out:
            if asked.retryable:
                self._back(asked)
                asked.mark_retried()
            else:
                self._end(asked, None, ConnectionLost(CONNECTION_BROKE))
        self._unsent.extendleft(reversed([each for each in out if each.retryable]))
        # An unsent cancellation needs the call sent again, to be found and cancelled.
        dropped = [asked for asked, _ in self._dropped if asked.retryable]
        self._dropped = deque((asked, False) for asked in dropped)
        for asked in dropped:
            asked.mark_retried()
        self._freight.forget()

    def _fail_all(self, error: ShoalError) -> None:
        self._unsent.clear()
        self._dropped.clear()
        for asked in list(self._open.values()):
            self._end(asked, None, error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        assert self._tasks is not None, "calls are sent while `run` runs"
        self._tasks.create_task(work)
