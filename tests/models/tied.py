"""A library and a fetch, tied together word by word, without a wire."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.domain.sharing import ModelWord
from shoal.models.fetching import Fetch, Wanted
from shoal.models.sharing import Sharing

Tamper = Callable[[ModelWord], list[ModelWord]]


def honest(word: ModelWord) -> list[ModelWord]:
    return [word]


@dataclass
class Tied:
    """A fetch from a peer that shares; ``tamper`` may change what that one says."""

    sharing: Sharing
    wanted: Wanted
    tamper: Tamper = honest
    asked: list[ModelWord] = field(default_factory=list)
    told: list[ModelWord] = field(default_factory=list)

    def fetch(self) -> Fetch:
        self._fetch = Fetch(self.wanted, self._ask)
        return self._fetch

    def _ask(self, word: ModelWord) -> bool:
        self.asked.append(word)
        self.sharing.share("peer", word, self._tell, self._fetch.room)
        return True

    def _tell(self, word: ModelWord) -> bool:
        for each in self.tamper(word):
            self.told.append(each)
            self._fetch.heard(each)
        return True


class Listening:
    """A peer that notes what it is told, and has room for so many pieces."""

    def __init__(self, pieces: int = 1000) -> None:
        self.told: list[ModelWord] = []
        self.there = True
        self._room = asyncio.Semaphore(pieces)
        self._news = asyncio.Event()

    def say(self, word: ModelWord) -> bool:
        if self.there:
            self.told.append(word)
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
        while len(self.told) < words:
            self._news.clear()
            await self._news.wait()


def files(folder: Path) -> dict[str, bytes]:
    """Return all that is below a folder, hidden or not."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
