"""Downloads a model from a peer that sends whole files, as other programs do."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from shoal.domain import errors, model_messages
from shoal.models.staging import UNANNOUNCED_MAX, FileWrite, IncomingModel, Staging

QUERY_TIMEOUT = 5.0  # seconds until the query is repeated: some peers lose the first
QUERIES_MAX = 3  # times
SILENCE_TIMEOUT = 120.0
"""Seconds between chunks: some peers read a whole file before each chunk.

Without their heartbeats the session ends before that.
"""
UNWRITTEN_MAX = 16 << 20  # bytes at which reading pauses
UNWRITTEN_FULL = 64 << 20  # bytes at which the download fails


@dataclass(frozen=True, slots=True)
class DownloadRequest:
    """A model to download into ``folder``; ``replace`` permits replacement.

    A model whose size the peer does not announce may have ``unannounced_max`` bytes.
    """

    model: str
    folder: Path
    replace: bool = False
    unannounced_max: int = UNANNOUNCED_MAX


@dataclass(frozen=True, slots=True)
class DownloadedModel:
    """A downloaded model: its folder, bytes and number of files.

    ``address`` is its content address; empty if it was not copied in chunks.
    """

    path: Path
    size: int
    files: int
    address: str = ""


@dataclass(slots=True, eq=False)
class ModelDownload:
    """The download of one model from one peer, to which ``send`` sends messages.

    ``progress`` receives the bytes so far, and the size if it is known.
    """

    _request: DownloadRequest
    _send: Callable[[model_messages.ModelMessage], bool]
    _progress: Callable[[int, int | None], None] = lambda received, size: None
    _answer: model_messages.ModelAnswer | None = None
    _incoming: IncomingModel | None = None
    _writes: list[FileWrite] = field(default_factory=list)
    _unwritten: int = 0  # bytes, with those that are being written
    _end: model_messages.ModelDone | errors.ShoalError | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _writable: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._writable.set()

    async def run(self) -> DownloadedModel:
        """Download the model; return its location.

        Raises UnknownModel if the peer does not share it, TimedOut if the peer is
        silent, PeerError if it breaks the protocol, and ConfigError if the model cannot
        be stored.  A failed download leaves no files.
        """
        size = await self._query_peer()
        transfer_id = str(uuid4())
        request = self._request
        incoming = IncomingModel(
            transfer_id, request.model, size, request.unannounced_max
        )
        staging = Staging(
            request.folder, request.model, transfer_id, size or 0, request.replace
        )
        loop = asyncio.get_running_loop()
        # One thread, so that removal comes after all writes.
        with ThreadPoolExecutor(1, "fetch") as disk:
            try:
                await loop.run_in_executor(disk, staging.begin)
                self._incoming = incoming
                self._send(model_messages.ModelRequest(transfer_id, request.model))
                await self._write_chunks(incoming, staging, disk)
                path = await loop.run_in_executor(disk, staging.commit)
            finally:
                self._incoming = None
                self._writable.set()
                await asyncio.shield(loop.run_in_executor(disk, staging.remove))
        return DownloadedModel(path, incoming.received, incoming.files)

    def receive(self, message: model_messages.ModelMessage) -> None:
        """Process a message of the peer, without waiting.

        Ignores chunks of other transfers.
        """
        match message:
            case model_messages.ModelAnswer(model=self._request.model):
                self._on_answer(message)
            case model_messages.ModelChunk() | model_messages.ModelDone():
                self._on_data(message)
            case _:
                pass

    def on_disconnect(self, error: errors.ShoalError) -> None:
        """Fail the download: the peer has disconnected."""
        if self._end is None:
            self._finish(error)

    async def wait_for_room(self) -> None:
        """Wait until enough received data is written to read more."""
        await self._writable.wait()

    async def _query_peer(self) -> int | None:
        """Query the model; return its size in bytes, if it is announced."""
        for _ in range(QUERIES_MAX):
            self._send(model_messages.ModelQuery(self._request.model))
            if not await self._wait_for_message(QUERY_TIMEOUT):
                continue
            assert self._answer is not None, "nothing else was received"
            if not self._answer.available:
                raise errors.UnknownModel(
                    f"the peer does not share {self._request.model}: a coordinator "
                    "shares the models of its --share"
                )
            return self._answer.size
        raise errors.TimedOut(
            f"the peer does not answer whether it shares {self._request.model}: it may "
            "not support sharing"
        )

    async def _wait_for_message(self, seconds: float) -> bool:
        """Wait for a message; return False on a timeout, raise the end's error."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        if isinstance(self._end, errors.ShoalError):
            raise self._end
        return True

    def _on_answer(self, answer: model_messages.ModelAnswer) -> None:
        if self._answer is None:
            self._answer = answer
            self._changed.set()
        elif self._incoming is not None and not answer.available:
            self.on_disconnect(
                errors.UnknownModel(
                    f"the peer cannot send {answer.model} now: it is busy, or the "
                    "files have changed; try again later"
                )
            )

    def _on_data(
        self, message: model_messages.ModelChunk | model_messages.ModelDone
    ) -> None:
        incoming = self._incoming
        if incoming is None or self._end is not None or not incoming.belongs(message):
            return
        try:
            match message:
                case model_messages.ModelChunk():
                    self._queue(incoming.add_chunk(message))
                case model_messages.ModelDone():
                    incoming.complete(message)
                    self._finish(message)
        except errors.PeerError as error:
            self._finish(error)

    def _queue(self, write: FileWrite) -> None:
        self._writes.append(write)
        self._unwritten += len(write.data)
        if self._unwritten > UNWRITTEN_FULL:
            raise errors.LimitExceeded(
                "unwritten data", self._unwritten, UNWRITTEN_FULL
            )
        if self._unwritten > UNWRITTEN_MAX:
            self._writable.clear()
        self._changed.set()

    def _finish(self, end: model_messages.ModelDone | errors.ShoalError) -> None:
        self._end = end
        self._writable.set()
        self._changed.set()

    async def _write_chunks(
        self, incoming: IncomingModel, staging: Staging, disk: Executor
    ) -> None:
        """Write chunks until the model is complete, or raise the error."""
        loop = asyncio.get_running_loop()
        while self._writes or not isinstance(self._end, model_messages.ModelDone):
            if not await self._wait_for_message(SILENCE_TIMEOUT):
                raise errors.TimedOut(_silence_message(incoming))
            writes, self._writes = self._writes, []
            await loop.run_in_executor(disk, staging.write, writes)
            self._unwritten -= sum(len(each.data) for each in writes)
            if self._unwritten <= UNWRITTEN_MAX:
                self._writable.set()
            self._progress(incoming.received, incoming.size)


def _silence_message(incoming: IncomingModel) -> str:
    if not incoming.files:
        return (
            f"the peer announced {incoming.model}, but sent nothing for "
            f"{SILENCE_TIMEOUT:g} s: other programs cannot send a model with folders"
        )
    return f"the peer sent nothing of {incoming.model} for {SILENCE_TIMEOUT:g} s"
