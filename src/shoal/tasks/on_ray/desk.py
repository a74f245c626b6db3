"""What calls in a cluster have to say while they run, and where they are answered."""

import asyncio
from typing import Any, TypeAlias

from shoal.tasks import orders

WORDS_MAX = 4096  # that wait for the driver; of progress, more are dropped

Word: TypeAlias = tuple[Any, ...]
"""A slot, a code of ``orders``, and what follows it there."""

Found: TypeAlias = tuple[list[Any], str]
"""A reference to a large argument, in a list so that it stays one, or why not."""


class Desk:
    """An actor; the driver cannot be asked, so it asks here for what is new."""

    def __init__(self) -> None:
        self._words: list[Word] = []
        self._news = asyncio.Event()
        self._awaited: dict[bytes, asyncio.Future[Found]] = {}

    async def news(self) -> list[Word]:
        """Wait until there is something, and return it all."""
        await self._news.wait()
        self._news.clear()
        words, self._words = self._words, []
        return words

    async def begin(self, slot: int, number: int) -> None:
        """Take word that a call begins."""
        self._put((slot, orders.BEGAN, number))

    async def say(
        self, slot: int, number: int, share: float | None, remark: str
    ) -> None:
        """Take word of a call's progress."""
        if len(self._words) < WORDS_MAX:
            self._put((slot, orders.SAID, number, share, remark))

    async def blob(self, slot: int, digest: bytes) -> Found:
        """Wait until a large argument is given."""
        if digest not in self._awaited:
            self._awaited[digest] = asyncio.get_running_loop().create_future()
        self._put((slot, orders.LACKS, digest))
        return await asyncio.shield(self._awaited[digest])

    async def give(self, digest: bytes, found: Found) -> None:
        """Answer all who wait for a large argument."""
        awaited = self._awaited.pop(digest, None)
        if awaited is not None:
            awaited.set_result(found)

    def _put(self, word: Word) -> None:
        self._words.append(word)
        self._news.set()
