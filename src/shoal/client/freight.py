"""What belongs to calls and travels apart: given before them, fetched after them."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeAlias

from shoal.client.asked import Asked
from shoal.client.blobs import Blob, Shelf
from shoal.domain.errors import PeerError, ShoalError, Unavailable

TRANSFERS = 4  # blobs on their way at a time
GONE_MAX = 3  # times that a call is asked again because the coordinator lost a blob
KNOWN_MAX = 100_000  # digests that are remembered

Spawn: TypeAlias = Callable[[Coroutine[None, None, None]], object]
Ready: TypeAlias = Callable[[Asked, Exception | None], None]
Fetched: TypeAlias = Callable[[Asked, bytes | None, Exception | None], None]


class Freight:
    """The blobs of one client's calls.

    ``spawn`` runs transfers beside whatever else happens.  ``ready`` is told when all
    that belongs to a call is there, or why it never will be.
    """

    def __init__(self, shelf: Shelf, spawn: Spawn, ready: Ready) -> None:
        self._shelf = shelf
        self._spawn = spawn
        self._ready = ready
        self._there: set[bytes] = set()
        self._waiting: dict[bytes, list[Asked]] = {}
        self._transfers = asyncio.Semaphore(TRANSFERS)

    def give(self, asked: Asked) -> None:
        """Have the coordinator get what belongs to a call."""
        lacking = {each.digest: each for each in asked.blobs}
        for digest in self._there.intersection(lacking):
            del lacking[digest]
        asked.lacking = len(lacking)
        if not lacking:
            self._ready(asked, None)
        for digest, blob in lacking.items():
            if digest not in self._waiting:
                self._waiting[digest] = []
                self._spawn(self._give(blob))
            self._waiting[digest].append(asked)

    def give_again(self, asked: Asked, digests: str) -> None:
        """Give what the coordinator does not have any more, by its digests in hex.

        Raises PeerError if those are none.
        """
        try:
            gone = {bytes.fromhex(each) for each in digests.split()}
        except ValueError as error:
            raise PeerError(f"{digests!r} should be digests in hex") from error
        asked.gone += 1
        if asked.gone > GONE_MAX or not gone <= {each.digest for each in asked.blobs}:
            text = f"the coordinator keeps {digests} no longer: put the value again"
            self._ready(asked, Unavailable(text))
            return
        self._there -= gone
        self.give(asked)

    def forget(self) -> None:
        """Take it that the coordinator may be another one now."""
        self._there.clear()

    async def put(self, blob: Blob) -> None:
        """Give one to the coordinator.  Raises as ``Shelf.give`` does."""
        async with self._transfers:
            await self._shelf.give(blob)

    def fetch(self, asked: Asked, digest: str, fetched: Fetched) -> None:
        """Get the value of a call, by its digest in hex."""
        self._spawn(self._fetch(asked, digest, fetched))

    async def _give(self, blob: Blob) -> None:
        failed: ShoalError | None = None
        try:
            await self.put(blob)
        except ShoalError as error:
            failed = error
        else:
            if len(self._there) >= KNOWN_MAX:
                self._there.clear()
            self._there.add(blob.digest)
        for asked in self._waiting.pop(blob.digest):
            asked.lacking -= 1
            if failed is not None or not asked.lacking:
                self._ready(asked, failed)

    async def _fetch(self, asked: Asked, digest: str, fetched: Fetched) -> None:
        try:
            async with self._transfers:
                value = await self._shelf.fetch(digest)
        except ShoalError as error:
            fetched(asked, None, error)
        else:
            fetched(asked, value, None)
