"""A library and a download, coupled message by message, without a wire."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.domain.model_messages import ModelMessage
from shoal.models.download import DownloadRequest, ModelDownload
from shoal.models.library_server import LibraryServer

Tamper = Callable[[ModelMessage], list[ModelMessage]]


def honest(message: ModelMessage) -> list[ModelMessage]:
    return [message]


@dataclass
class TransferPair:
    """A download from a sharing peer; ``tamper`` may change the peer's messages."""

    sharing: LibraryServer
    wanted: DownloadRequest
    tamper: Tamper = honest
    sent: list[ModelMessage] = field(default_factory=list)
    received: list[ModelMessage] = field(default_factory=list)

    def fetch(self) -> ModelDownload:
        self._fetch = ModelDownload(self.wanted, self._to_sharing)
        return self._fetch

    def _to_sharing(self, message: ModelMessage) -> bool:
        self.sent.append(message)
        self.sharing.on_message(
            "peer", message, self._to_download, self._fetch.wait_for_room
        )
        return True

    def _to_download(self, message: ModelMessage) -> bool:
        for each in self.tamper(message):
            self.received.append(each)
            self._fetch.receive(each)
        return True


class RecordingPeer:
    """A peer that records messages, and has room for a number of pieces."""

    def __init__(self, pieces: int = 1000) -> None:
        self.received: list[ModelMessage] = []
        self.connected = True
        self._room = asyncio.Semaphore(pieces)
        self._changed = asyncio.Event()

    def send(self, message: ModelMessage) -> bool:
        if self.connected:
            self.received.append(message)
            self._changed.set()
        return self.connected

    async def room(self) -> None:
        await self._room.acquire()

    def read(self, pieces: int) -> None:
        """Make room for more."""
        for _ in range(pieces):
            self._room.release()

    async def until(self, messages: int) -> None:
        """Wait until it has received a number of messages."""
        while len(self.received) < messages:
            self._changed.clear()
            await self._changed.wait()


def files(folder: Path) -> dict[str, bytes]:
    """Return all that is below a folder, hidden or not."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
