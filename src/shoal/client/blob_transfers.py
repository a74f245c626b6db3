"""Transfers the large values of calls: uploads before a call, downloads after it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeAlias

from shoal.client.blobs import Blob, BlobClient
from shoal.client.pending_calls import ClientCall
from shoal.domain.errors import PeerError, ShoalError, Unavailable

TRANSFERS = 4  # concurrent transfers
LOST_MAX = 3  # retries of a call whose blobs the coordinator has evicted
KNOWN_MAX = 100_000  # remembered digests

Spawn: TypeAlias = Callable[[Coroutine[None, None, None]], object]
OnReady: TypeAlias = Callable[[ClientCall, Exception | None], None]
OnDownloaded: TypeAlias = Callable[[ClientCall, bytes | None, Exception | None], None]


class BlobTransfers:
    """The blobs of one client's calls.

    ``spawn`` starts a transfer as a task.  ``ready`` is called once all blobs of a call
    are uploaded, or with the error.
    """

    def __init__(self, shelf: BlobClient, spawn: Spawn, ready: OnReady) -> None:
        self._shelf = shelf
        self._spawn = spawn
        self._ready = ready
        self._there: set[bytes] = set()
        self._waiting: dict[bytes, list[ClientCall]] = {}
        self._transfers = asyncio.Semaphore(TRANSFERS)

    def upload(self, asked: ClientCall) -> None:
        """Upload the blobs of a call that the coordinator lacks."""
        lacking = {each.digest: each for each in asked.blobs}
        for digest in self._there.intersection(lacking):
            del lacking[digest]
        asked.blobs_missing = len(lacking)
        if not lacking:
            self._ready(asked, None)
        for digest, blob in lacking.items():
            if digest not in self._waiting:
                self._waiting[digest] = []
                self._spawn(self._give(blob))
            self._waiting[digest].append(asked)

    def upload_again(self, asked: ClientCall, digests: str) -> None:
        """Upload blobs that the coordinator has evicted, by their digests in hex.

        Raises PeerError if a digest is invalid.
        """
        try:
            gone = {bytes.fromhex(each) for each in digests.split()}
        except ValueError as error:
            raise PeerError(f"{digests!r}: expected digests in hex") from error
        asked.blobs_lost += 1
        if asked.blobs_lost > LOST_MAX or not gone <= {
            each.digest for each in asked.blobs
        }:
            text = f"the coordinator has evicted {digests}: upload the value again"
            self._ready(asked, Unavailable(text))
            return
        self._there -= gone
        self.upload(asked)

    def forget(self) -> None:
        """Forget uploads: the next connection may reach another coordinator."""
        self._there.clear()

    async def put(self, blob: Blob) -> None:
        """Upload one blob.  Raises as ``BlobClient.upload`` does."""
        async with self._transfers:
            await self._shelf.upload(blob)

    def download(self, asked: ClientCall, digest: str, fetched: OnDownloaded) -> None:
        """Download the value of a call, by its digest in hex."""
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
            asked.blobs_missing -= 1
            if failed is not None or not asked.blobs_missing:
                self._ready(asked, failed)

    async def _fetch(
        self, asked: ClientCall, digest: str, fetched: OnDownloaded
    ) -> None:
        try:
            async with self._transfers:
                value = await self._shelf.download(digest)
        except ShoalError as error:
            fetched(asked, None, error)
        else:
            fetched(asked, value, None)
