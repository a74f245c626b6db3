"""The calls of one client, over one WebSocket, and over the next if it breaks.

A durable call is sent again under its key, so that it runs once; one that is not is
sent again only if it never left.  Everything here happens on one event loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import islice
from typing import TypeAlias

from aiohttp import ClientError, ClientSession, ClientWebSocketResponse, WSMsgType

from shoal.client import messages
from shoal.client.availability import CALLS_EXAMINED_MAX, StalledCallMonitor
from shoal.client.connection import Blob, BlobClient, CallDialer
from shoal.client.coordinator import CoordinatorAddress
from shoal.client.errors import ConnectionLost
from shoal.client.options import report_progress
from shoal.client.pending_calls import ClientCall
from shoal.client.remote_exceptions import FailedCall, call_error
from shoal.domain.errors import InvalidRequest, PeerError, ShoalError, Unavailable

MESSAGE_ARGUMENTS_MAX = 256 << 10  # bytes of arguments that share a message
ITEMS_MAX = 1024  # of a message

# Limits of unanswered calls, below those of the coordinator, which rejects an excess.
# Further calls wait here.
SENT_MAX = 50_000  # calls
SENT_SIZE_MAX = 48 << 20  # bytes of their arguments

CLOSE_TIMEOUT = 1.0  # seconds for the coordinator to confirm the end

CONNECTION_BROKE = (
    "the connection to the coordinator broke during the call, which may or may not "
    "have run; only durable calls are sent again, or others with "
    "with_options(retry=True)"
)


TRANSFERS = 4  # concurrent transfers
LOST_MAX = 3  # retries of a call whose blobs the coordinator has evicted
KNOWN_MAX = 100_000  # remembered digests

Spawn: TypeAlias = Callable[[Coroutine[None, None, None]], object]
OnReady: TypeAlias = Callable[[ClientCall, Exception | None], None]
OnDownloaded: TypeAlias = Callable[[ClientCall, bytes | None, Exception | None], None]


class BlobTransfers:
    """The blobs of one client's calls.

    ``spawn`` starts a transfer as a task.  ``on_ready`` is called once all blobs of a
    call are uploaded, or with the error.
    """

    def __init__(self, client: BlobClient, spawn: Spawn, on_ready: OnReady) -> None:
        self._client = client
        self._spawn = spawn
        self._on_ready = on_ready
        self._uploaded: set[bytes] = set()
        self._waiting: dict[bytes, list[ClientCall]] = {}
        self._transfers = asyncio.Semaphore(TRANSFERS)

    def upload(self, call: ClientCall) -> None:
        """Upload the blobs of a call that the coordinator lacks."""
        missing = {each.digest: each for each in call.blobs}
        for digest in self._uploaded.intersection(missing):
            del missing[digest]
        call.blobs_missing = len(missing)
        if not missing:
            self._on_ready(call, None)
        for digest, blob in missing.items():
            if digest not in self._waiting:
                self._waiting[digest] = []
                self._spawn(self._upload(blob))
            self._waiting[digest].append(call)

    def upload_again(self, call: ClientCall, digests: str) -> None:
        """Upload blobs that the coordinator has evicted, by their digests in hex.

        Raises PeerError if a digest is invalid.
        """
        try:
            evicted = {bytes.fromhex(each) for each in digests.split()}
        except ValueError as error:
            raise PeerError(f"{digests!r}: expected digests in hex") from error
        call.blobs_lost += 1
        if call.blobs_lost > LOST_MAX or not evicted <= {
            each.digest for each in call.blobs
        }:
            text = f"the coordinator has evicted {digests}: upload the value again"
            self._on_ready(call, Unavailable(text))
            return
        self._uploaded -= evicted
        self.upload(call)

    def forget(self) -> None:
        """Forget uploads: the next connection may reach another coordinator."""
        self._uploaded.clear()

    async def put(self, blob: Blob) -> None:
        """Upload one blob.  Raises as ``BlobClient.upload`` does."""
        async with self._transfers:
            await self._client.upload(blob)

    def download(
        self, call: ClientCall, digest: str, on_downloaded: OnDownloaded
    ) -> None:
        """Download the value of a call, by its digest in hex."""
        self._spawn(self._download(call, digest, on_downloaded))

    async def _upload(self, blob: Blob) -> None:
        failed: ShoalError | None = None
        try:
            await self.put(blob)
        except ShoalError as error:
            failed = error
        else:
            if len(self._uploaded) >= KNOWN_MAX:
                self._uploaded.clear()
            self._uploaded.add(blob.digest)
        for call in self._waiting.pop(blob.digest):
            call.blobs_missing -= 1
            if failed is not None or not call.blobs_missing:
                self._on_ready(call, failed)

    async def _download(
        self, call: ClientCall, digest: str, on_downloaded: OnDownloaded
    ) -> None:
        try:
            async with self._transfers:
                value = await self._client.download(digest)
        except ShoalError as error:
            on_downloaded(call, None, error)
        else:
            on_downloaded(call, value, None)


class CallChannel:
    """Sends all calls of one client, and receives their results."""

    def __init__(self, session: ClientSession, address: CoordinatorAddress) -> None:
        self._dialler = CallDialer(session, address)
        self._blobs = BlobTransfers(
            BlobClient(session, address), self._spawn, self._on_uploaded
        )
        self._open: dict[int, ClientCall] = {}
        self._unsent: deque[ClientCall] = deque()
        # Calls to cancel, and whether they were sent on this connection.
        self._dropped: deque[tuple[ClientCall, bool]] = deque()
        self._sent_count = self._sent_size = 0
        self._event_count = 0  # messages about started, progressed and ended calls
        self._stall_monitor = StalledCallMonitor(
            session, address, self._unstarted, lambda: self._event_count
        )
        self._wake = asyncio.Event()
        self._closing = False
        self._tasks: asyncio.TaskGroup | None = None

    def submit(self, call: ClientCall) -> None:
        """Send a call."""
        self._open[call.number] = call
        if call.blobs:
            self._blobs.upload(call)
        else:
            self._unsent.append(call)
            self._wake.set()

    def drop(self, call: ClientCall) -> None:
        """Cancel a call whose result is not wanted any more."""
        if self._open.pop(call.number, None) is not None:
            if call.sent:
                self._dropped.append((call, True))
                self._mark_unsent(call)
            self._wake.set()

    async def put(self, blob: Blob) -> None:
        """Upload a large value.  Raises as ``BlobClient.upload`` does."""
        await self._blobs.put(blob)

    def close(self) -> None:
        """End once no call is open."""
        self._closing = True
        self._wake.set()

    def abandon(self) -> None:
        """End without the open calls; those that outlive their client go on.

        Cancellations are sent before.
        """
        self._fail_all(ConnectionLost("the program has disconnected"))
        self.close()

    async def run(self) -> None:
        """Serve until ``close``, and then until the last call has ended."""
        async with asyncio.TaskGroup() as self._tasks:
            while await self._wait_for_work():
                try:
                    socket = await self._dialler.dial(lambda: bool(self._open))
                except ShoalError as error:
                    self._dropped.clear()
                    self._fail_all(error)
                else:
                    await self._serve(socket)
                    self._requeue_sent()

    async def _wait_for_work(self) -> bool:
        """Wait until there is something to send; return False at the end."""
        while not self._unsent and not self._dropped:
            if self._closing and not self._open:
                return False
            self._wake.clear()
            await self._wake.wait()
        return True

    async def _serve(self, socket: ClientWebSocketResponse) -> None:
        patience = 0.0  # if this task is cancelled
        try:
            await self._exchange(socket)
            patience = CLOSE_TIMEOUT
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await socket.close()

    async def _exchange(self, socket: ClientWebSocketResponse) -> None:
        """Send and receive messages until the connection ends."""
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(self._write(socket))
            monitor = group.create_task(self._stall_monitor.run())
            try:
                while (message := await socket.receive()).type is WSMsgType.BINARY:
                    for event in messages.decode(message.data):
                        self._receive(event)
                if (
                    message.type is WSMsgType.CLOSE
                    and message.data in messages.REFUSALS
                ):
                    # A repetition would be refused again.
                    raise InvalidRequest(
                        f"the coordinator disconnected: {message.extra}"
                    )
            except (PeerError, InvalidRequest) as error:
                self._dropped.clear()
                self._fail_all(error)
            writer.cancel()
            monitor.cancel()

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

    def _unstarted(self) -> list[ClientCall]:
        """Return calls that were sent and have not started."""
        some = islice(self._open.values(), CALLS_EXAMINED_MAX)
        return [call for call in some if call.sent and not call.started]

    def _items(self) -> list[tuple[object, ...]]:
        """Return the items of the next message."""
        items: list[tuple[object, ...]] = []
        while self._dropped:
            call, was_sent = self._dropped.popleft()
            if not was_sent:
                items.append(call.item)
            items.append(messages.cancel_item(call.number))
        free = min(MESSAGE_ARGUMENTS_MAX, SENT_SIZE_MAX - self._sent_size)
        while self._unsent and free > 0 and len(items) < ITEMS_MAX:
            if self._sent_count >= SENT_MAX:
                break
            call = self._unsent.popleft()
            if call.number in self._open:
                call.sent = True
                self._sent_count += 1
                self._sent_size += call.size
                items.append(call.item)
                free -= call.size
        return items

    def _mark_unsent(self, call: ClientCall) -> None:
        """Count a call as no longer sent."""
        call.sent = call.started = False
        self._sent_count -= 1
        self._sent_size -= call.size
        if self._unsent:
            self._wake.set()

    def _receive(self, event: messages.CallEvent) -> None:
        if not isinstance(event, messages.CallAccepted):
            self._event_count += 1
        call = self._open.get(event.number)
        if call is None:
            return  # it was dropped
        match event:
            case messages.CallDone(_, value, ""):
                self._finish(call, value, None)
            case messages.CallDone(_, _, digest):
                self._blobs.download(call, digest, self._finish)
            case messages.CallFailed(_, "lacks", digests, _):
                self._mark_unsent(call)
                self._blobs.upload_again(call, digests)
            case messages.CallFailed(meta=meta) if (
                "stopping" in meta and call.retryable
            ):
                pass  # it is sent again on the next connection, to the next start
            case messages.CallFailed(_, kind, text, meta):
                failed = FailedCall(text, meta, call.home, call.trust)
                self._finish(call, None, call_error(kind, failed))
            case messages.CallAccepted(_, job_id):
                call.job_id = job_id
            case messages.CallAdvanced(_, share, remark):
                call.started = True
                if call.on_progress is not None:
                    report_progress(call.on_progress, share, remark)
            case messages.CallStarted():
                call.started = True

    def _on_uploaded(self, call: ClientCall, error: Exception | None) -> None:
        if error is not None:
            self._finish(call, None, error)
        else:
            self._unsent.append(call)
            self._wake.set()

    def _finish(
        self, call: ClientCall, value: bytes | None, error: Exception | None
    ) -> None:
        if self._open.pop(call.number, None) is None:
            return
        if call.sent:
            self._mark_unsent(call)
        call.on_ended(value, error)
        if self._closing and not self._open:
            self._wake.set()

    def _requeue_sent(self) -> None:
        """Queue sent calls again after a lost connection, or fail them."""
        sent = [call for call in self._open.values() if call.sent]
        for call in sent:
            if call.retryable:
                self._mark_unsent(call)
                call.mark_retried()
            else:
                self._finish(call, None, ConnectionLost(CONNECTION_BROKE))
        self._unsent.extendleft(reversed([each for each in sent if each.retryable]))
        # An unsent cancellation needs the call sent again, to be found and cancelled.
        dropped = [call for call, _ in self._dropped if call.retryable]
        self._dropped = deque((call, False) for call in dropped)
        for call in dropped:
            call.mark_retried()
        self._blobs.forget()

    def _fail_all(self, error: ShoalError) -> None:
        self._unsent.clear()
        for call in list(self._open.values()):
            self._finish(call, None, error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        assert self._tasks is not None, "calls are sent while `run` runs"
        self._tasks.create_task(work)
