"""Answers peers' queries about the library, and sends them its models.

A refusal is a ``ModelAnswer`` without the model: messages have no field for the reason.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from shoal.domain.errors import Unavailable
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelMessage,
    ModelPull,
    ModelQuery,
    ModelRequest,
    SendModelMessage,
    WaitUntilWritable,
)
from shoal.models.forwarding import ForwardedTransfers, Receiver
from shoal.models.library import (
    FilePiece,
    Library,
    NotShareable,
    SharedModel,
    read_pieces,
)
from shoal.models.sources import FoundModel, ModelSource, ModelSources

SENDING_MAX = 8  # models at a time
SENDING_TO_PEER_MAX = 2  # of them
QUERIES_MAX = 16  # pending queries of a peer; it may repeat dropped ones
STALL_TIMEOUT = 60.0  # seconds for a peer to read a piece
ID_MAX = 64  # characters of a transfer id
LOGGED_MAX = 1000  # logged refusals that are not repeated

log = logging.getLogger("shoal.models")


class _Pace:
    """The number of bytes that a transfer may send before its receiver asks for more.

    ``window``: that number at the beginning; 0: without limit.
    """

    def __init__(self, window: int) -> None:
        self._limited = window > 0
        self._allowed = window
        self._changed = asyncio.Event()

    def allow(self, size: int) -> None:
        """Allow more bytes."""
        self._allowed += size
        self._changed.set()

    async def take(self, size: int) -> None:
        """Wait until something may be sent, and count it: the last piece may exceed."""
        while self._limited and self._allowed <= 0:
            self._changed.clear()
            await self._changed.wait()
        self._allowed -= size


@dataclass(frozen=True, slots=True)
class _Sending:
    """A transfer to a peer."""

    task: asyncio.Task[None]
    pace: _Pace


class LibraryServer:
    """Shares a library with any number of peers within an ``async with`` block.

    Leaving the block aborts all transfers.  ``sources`` are the peers that may share
    models themselves; those of some are passed on to the others.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self.sources = ModelSources()
        self._forwarded = ForwardedTransfers()
        self._tasks = asyncio.TaskGroup()
        self._queries: Counter[str] = Counter()  # by peer
        self._sending: dict[tuple[str, str], _Sending] = {}  # by peer, number
        self._logged: set[tuple[str, str]] = set()

    async def __aenter__(self) -> "LibraryServer":
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for sending in self._sending.values():
            sending.task.cancel()
        await self._tasks.__aexit__(kind, error, trace)

    def on_message(
        self,
        peer: str,
        message: ModelMessage,
        send: SendModelMessage,
        wait_writable: WaitUntilWritable,
    ) -> None:
        """Process a message of a peer, without waiting; the answer follows.

        ``peer`` identifies the peer.
        """
        requester = Receiver(peer, send, wait_writable)
        match message:
            case ModelQuery():
                self._query(requester, message)
            case ModelRequest():
                self._request(requester, message)
            case ModelPull(transfer_id, size):
                self._pull(peer, transfer_id, size)
            case ModelChunk() | ModelDone() if self.sources.passes_on(peer):
                self._forwarded.receive(peer, message)
            case ModelChunk() | ModelDone():
                self._log_refusal(peer, "it sends a model without a request")
            case ModelAnswer(model, available):
                if not self.sources.receive(peer, message):
                    self._log_refusal(peer, "it answers without a query")
                if not available:
                    self._forwarded.on_unavailable(peer, model)
            case _:
                raise AssertionError(f"unknown message {type(message).__name__}")

    def on_peer_joined(
        self, peer: str, send: SendModelMessage, *, passed_on: bool = False
    ) -> None:
        """Add a peer that may share models; ``passed_on``: see ``ModelSource``."""
        self.sources.add(ModelSource(peer, send, passed_on))

    def on_peer_left(self, peer: str) -> None:
        """Abort transfers to a peer at once, not only at the next piece."""
        self.sources.remove(peer)
        self._forwarded.on_source_left(peer)
        for (name, _), sending in self._sending.items():
            if name == peer:
                sending.task.cancel()

    async def own_size(self, model: str) -> int | None:
        """Return the size of a model of the library in bytes; None if it has none."""
        try:
            found = await asyncio.to_thread(self._library.find, model)
        except NotShareable:
            return None
        return None if found is None else found.size

    def _query(self, requester: Receiver, query: ModelQuery) -> None:
        if self._queries[requester.name] >= QUERIES_MAX:
            self._log_refusal(requester.name, f"it has {QUERIES_MAX} queries pending")
            return
        self._queries[requester.name] += 1
        task = self._tasks.create_task(self._answer(requester, query.model))
        task.add_done_callback(lambda _: self._on_answered(requester.name))

    async def _answer(self, requester: Receiver, name: str) -> None:
        found = await self._find(requester, name)
        copy = await self._find_copy(requester, name) if found is None else found
        size = None if copy is None else copy.size
        requester.send(ModelAnswer(name, copy is not None, size))

    def _on_answered(self, peer: str) -> None:
        self._queries[peer] -= 1
        if not self._queries[peer]:
            del self._queries[peer]

    def _request(self, requester: Receiver, request: ModelRequest) -> None:
        if (
            reason := self._refusal_reason(requester.name, request.transfer_id)
        ) is not None:
            self._log_refusal(requester.name, reason)
            requester.send(ModelAnswer(request.model, available=False))
            return
        key = requester.name, request.transfer_id
        pace = _Pace(request.window)
        task = self._tasks.create_task(self._send(requester, request, pace))
        self._sending[key] = _Sending(task, pace)
        task.add_done_callback(lambda _: self._sending.pop(key))

    def _pull(self, peer: str, transfer_id: str, size: int) -> None:
        sending = self._sending.get((peer, transfer_id))
        if sending is None:
            return  # it has ended
        if size:
            sending.pace.allow(size)
        else:
            sending.task.cancel()

    def _refusal_reason(self, peer: str, number: str) -> str | None:
        """Return why a transfer is refused, or None if it is not."""
        if len(number) > ID_MAX:
            return f"a transfer id has more than {ID_MAX} characters"
        if (peer, number) in self._sending:
            return "it uses the id of a running transfer"
        if sum(name == peer for name, _ in self._sending) >= SENDING_TO_PEER_MAX:
            return f"it has {SENDING_TO_PEER_MAX} transfers running"
        if len(self._sending) >= SENDING_MAX:
            return f"{SENDING_MAX} transfers are running"
        return None

    async def _send(
        self, requester: Receiver, request: ModelRequest, pace: "_Pace"
    ) -> None:
        name, forwarded = request.model, self._forwarded
        sending: Awaitable[bool]
        if (found := await self._find(requester, name)) is not None:
            origin, size = "here", found.size
            sending = _send_pieces(requester, request, found, pace)
        elif (
            copy := await self._find_copy(requester, name)
        ) is None or forwarded.is_busy(copy.source):
            requester.send(ModelAnswer(name, available=False))
            return
        else:
            origin, size = copy.source.name, copy.size or 0
            sending = forwarded.forward(copy.source, request, requester)
        message = "sending model=%s peer=%r from=%r bytes=%d"
        log.info(message, name, requester.name, origin, size)
        try:
            complete = await sending
        except (NotShareable, Unavailable, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                error = NotShareable(f"it read nothing for {STALL_TIMEOUT:g} s")
            self._log_refusal(requester.name, f"{name} was aborted: {error}")
            requester.send(ModelAnswer(name, available=False))
            return
        end = "sent" if complete else "stopped"
        log.info("%s model=%s peer=%r", end, name, requester.name)

    async def _find_copy(self, requester: Receiver, name: str) -> FoundModel | None:
        """Return a model that another peer shares and that may be passed on."""
        among = [
            source
            for source in self.sources.all
            if source.passed_on and source.name != requester.name
        ]
        found = await self.sources.find(name, among, first=True)
        return found[0] if found else None

    async def _find(self, requester: Receiver, name: str) -> SharedModel | None:
        try:
            return await asyncio.to_thread(self._library.find, name)
        except NotShareable as error:
            self._log_refusal(requester.name, f"{name} cannot be shared: {error}")
            return None

    def _log_refusal(self, peer: str, text: str) -> None:
        """Log a refusal, once: a flood would fill the disk."""
        if (peer, text) in self._logged:
            return
        if len(self._logged) >= LOGGED_MAX:
            self._logged.clear()
        self._logged.add((peer, text))
        log.warning("refused peer=%r reason=%r", peer, text)


async def _send_pieces(
    requester: Receiver, request: ModelRequest, model: SharedModel, pace: _Pace
) -> bool:
    """Send a model as fast as the peer reads; return False if it disconnected.

    Raises NotShareable, and TimeoutError if the peer does not read.
    """
    pieces = read_pieces(model)
    try:
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            # A peer that reads nothing must not hold a transfer slot for ever.
            async with asyncio.timeout(STALL_TIMEOUT):
                await requester.wait_writable()
                await pace.take(len(piece.data))
            if not requester.send(_chunk(request, piece)):
                return False
    finally:
        # After a cancellation, a thread may be in it still: it is closed after that.
        with suppress(ValueError):
            pieces.close()
    return requester.send(ModelDone(request.transfer_id, request.model))


def _chunk(request: ModelRequest, piece: FilePiece) -> ModelChunk:
    return ModelChunk(
        request.transfer_id, piece.file_name, piece.offset, piece.data, piece.last
    )
