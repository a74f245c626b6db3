"""A library and a fetch, tied together word by word, without a wire."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.domain.model_messages import ModelMessage
from shoal.models.download import DownloadRequest, ModelDownload
from shoal.models.library_server import LibraryServer

Tamper = Callable[[ModelMessage], list[ModelMessage]]


def honest(word: ModelMessage) -> list[ModelMessage]:
    return [word]


@dataclass
class TransferPair:
    """A fetch from a peer that shares; ``tamper`` may change what that one says."""

    sharing: LibraryServer
    wanted: DownloadRequest
    tamper: Tamper = honest
    sent: list[ModelMessage] = field(default_factory=list)
    received: list[ModelMessage] = field(default_factory=list)

    def fetch(self) -> ModelDownload:
        self._fetch = ModelDownload(self.wanted, self._ask)
        return self._fetch

    def _ask(self, word: ModelMessage) -> bool:
        self.sent.append(word)
        self.sharing.on_message("peer", word, self._tell, self._fetch.wait_for_room)
        return True

    def _tell(self, word: ModelMessage) -> bool:
        for each in self.tamper(word):
            self.received.append(each)
            self._fetch.receive(each)
        return True


class RecordingPeer:
    """A peer that notes what it is told, and has room for so many pieces."""

    def __init__(self, pieces: int = 1000) -> None:
        self.received: list[ModelMessage] = []
        self.there = True
        self._room = asyncio.Semaphore(pieces)
        self._news = asyncio.Event()

    def send(self, word: ModelMessage) -> bool:
        if self.there:
            self.received.append(word)
            self._news.set()
        return self.there

    async def room(self) -> None:
        await self._room.acquire()

    def read(self, pieces: int) -> None:
        """Make room for more."""
        for _ in range(pieces):
            self._room.release()

    async def until(self, words: int) -> None:
        """Wait until it was told so many words."""
        while len(self.received) < words:
            self._news.clear()
            await self._news.wait()


def files(folder: Path) -> dict[str, bytes]:
    """Return all that is below a folder, hidden or not."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
