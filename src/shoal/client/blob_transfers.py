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
