"""Downloads a model from a peer: queries it, receives its files, and commits them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from shoal.domain.errors import (
    LimitExceeded,
    PeerError,
    ShoalError,
    TimedOut,
    UnknownModel,
)
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelMessage,
    ModelQuery,
    ModelRequest,
)
from shoal.models.staging import Staging
from shoal.models.transfer import FileWrite, IncomingModel

QUERY_TIMEOUT = 5.0  # seconds until the query is repeated: some peers lose the first
QUERIES_MAX = 3  # times
SILENCE_TIMEOUT = (
    120.0  # seconds between chunks; some peers read a whole file before each
)
UNWRITTEN_MAX = 16 << 20  # bytes at which reading pauses
UNWRITTEN_FULL = 64 << 20  # bytes at which the download fails


@dataclass(frozen=True, slots=True)
class DownloadRequest:
    """A model to download into ``folder``; ``replace`` permits replacement."""

    model: str
    folder: Path
    replace: bool = False


@dataclass(frozen=True, slots=True)
class DownloadedModel:
    """A downloaded model: its folder, bytes and number of files."""

    path: Path
    size: int
    files: int


class ModelDownload:
    """The download of one model from one peer, to which ``say`` sends messages.

    ``progress`` receives the bytes so far, and the size if it is known.
    """

    def __init__(
        self,
        wanted: DownloadRequest,
        say: Callable[[ModelMessage], bool],
        progress: Callable[[int, int | None], None] = lambda received, size: None,
    ) -> None:
        self._wanted = wanted
        self._say = say
        self._progress = progress
        self._answer: ModelAnswer | None = None
        self._incoming: IncomingModel | None = None
        self._writes: list[FileWrite] = []
        self._unwritten = 0  # bytes, with those that are being written
        self._end: ModelDone | ShoalError | None = None
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def run(self) -> DownloadedModel:
        """Download the model; return its location.

        Raises UnknownModel if the peer does not share it, TimedOut if the peer is
        silent, PeerError if it breaks the protocol, and ConfigError if the model cannot
        be stored.  A failed download leaves no files.
        """
        size = await self._ask()
        transfer_id = str(uuid4())
        wanted = self._wanted
        incoming = IncomingModel(transfer_id, wanted.model, size)
        staging = Staging(
            wanted.folder, wanted.model, transfer_id, size or 0, wanted.replace
        )
        loop = asyncio.get_running_loop()
        # One thread, so that removal comes after all writes.
        with ThreadPoolExecutor(1, "fetch") as disk:
            try:
                await loop.run_in_executor(disk, staging.begin)
                self._incoming = incoming
                self._say(ModelRequest(transfer_id, wanted.model))
                await self._take(incoming, staging, disk)
                path = await loop.run_in_executor(disk, staging.commit)
            finally:
                self._incoming = None
                self._room.set()
                await asyncio.shield(loop.run_in_executor(disk, staging.remove))
        return DownloadedModel(path, incoming.received, incoming.files)

    def receive(self, word: ModelMessage) -> None:
        """Process a message of the peer, without waiting.

        Ignores chunks of other transfers.
        """
        match word:
            case ModelAnswer(model=self._wanted.model):
                self._answered(word)
            case ModelChunk() | ModelDone():
                self._came(word)
            case _:
                pass

    def on_disconnect(self, error: ShoalError) -> None:
        """Fail the download: the peer has disconnected."""
        if self._end is None:
            self._finish(error)

    async def wait_for_room(self) -> None:
        """Wait until enough received data is written to read more."""
        await self._room.wait()

    async def _ask(self) -> int | None:
        """Query the model; return its size in bytes, if it is announced."""
        for _ in range(QUERIES_MAX):
            self._say(ModelQuery(self._wanted.model))
            if not await self._heard_within(QUERY_TIMEOUT):
                continue
            assert self._answer is not None, "there was no other news"
            if not self._answer.available:
                raise UnknownModel(
                    f"the peer does not share {self._wanted.model}: a coordinator "
                    "shares the models of its --share"
                )
            return self._answer.size
        raise TimedOut(
            f"the peer does not answer whether it shares {self._wanted.model}: it may "
            "not support sharing"
        )

    async def _heard_within(self, seconds: float) -> bool:
        """Wait for a message; return False on a timeout, raise the end's error."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        if isinstance(self._end, ShoalError):
            raise self._end
        return True

    def _answered(self, answer: ModelAnswer) -> None:
        if self._answer is None:
            self._answer = answer
            self._news.set()
        elif self._incoming is not None and not answer.available:
            self.on_disconnect(
                UnknownModel(
                    f"the peer does not send {answer.model} now: it is busy, or the "
                    "files have changed; try again later"
                )
            )

    def _came(self, word: ModelChunk | ModelDone) -> None:
        incoming = self._incoming
        if incoming is None or self._end is not None or not incoming.belongs(word):
            return
        try:
            match word:
                case ModelChunk():
                    self._queue(incoming.add_chunk(word))
                case ModelDone():
                    incoming.complete(word)
                    self._finish(word)
        except PeerError as error:
            self._finish(error)

    def _queue(self, write: FileWrite) -> None:
        self._writes.append(write)
        self._unwritten += len(write.data)
        if self._unwritten > UNWRITTEN_FULL:
            raise LimitExceeded("unwritten data", self._unwritten, UNWRITTEN_FULL)
        if self._unwritten > UNWRITTEN_MAX:
            self._room.clear()
        self._news.set()

    def _finish(self, end: ModelDone | ShoalError) -> None:
        self._end = end
        self._room.set()
        self._news.set()

    async def _take(
        self, incoming: IncomingModel, staging: Staging, disk: Executor
    ) -> None:
        """Write chunks until the model is complete, or raise the error."""
        loop = asyncio.get_running_loop()
        while self._writes or not isinstance(self._end, ModelDone):
            if not await self._heard_within(SILENCE_TIMEOUT):
                raise TimedOut(_silent(incoming))
            writes, self._writes = self._writes, []
            await loop.run_in_executor(disk, staging.write, writes)
            self._unwritten -= sum(len(each.data) for each in writes)
            if self._unwritten <= UNWRITTEN_MAX:
                self._room.set()
            self._progress(incoming.received, incoming.size)


def _silent(incoming: IncomingModel) -> str:
    if not incoming.files:
        return (
            f"the peer announced {incoming.model}, but sent nothing for "
            f"{SILENCE_TIMEOUT:g} s: other programs cannot send a model with folders"
        )
    return f"the peer sent nothing of {incoming.model} for {SILENCE_TIMEOUT:g} s"
