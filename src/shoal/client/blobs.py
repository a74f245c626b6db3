"""Uploads and downloads large values (blobs)."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar

from aiohttp import ClientError, ClientSession

from shoal.client.connection import raise_for_status
from shoal.client.coordinator import CoordinatorAddress
from shoal.client.errors import ConnectionLost
from shoal.domain.errors import PeerError, ShoalError, Unavailable
from shoal.tasks.limits import BLOB_MAX
from shoal.transports.http_client import describe_http_error, read_body

PIECE_SIZE = 1 << 20  # bytes of a write
TRIES_MAX = 5  # attempts of a transfer
RETRY_DELAY = 0.5  # seconds until the second attempt; doubled for each further one

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """One value in MessagePack, in pieces, with its SHA-256 digest.

    The pieces must not change: an upload may be repeated.
    """

    digest: bytes
    pieces: tuple[bytes | memoryview, ...]

    @property
    def size(self) -> int:
        """The size in bytes."""
        return sum(len(piece) for piece in self.pieces)


class BlobClient:
    """Uploads blobs to a coordinator and downloads them."""

    def __init__(self, session: ClientSession, address: CoordinatorAddress) -> None:
        self._session = session
        self._address = address

    async def upload(self, blob: Blob) -> None:
        """Upload a blob, unless the coordinator has it.

        Raises ShoalError if it refuses, ConnectionLost if it stays unreachable.
        """
        await _retry(lambda: self._upload(blob))

    async def download(self, digest: str) -> bytes:
        """Return a blob, by its digest in hex.

        Raises as ``upload`` does, and PeerError if the digest does not match.
        """
        data = await _retry(lambda: self._download(digest))
        found = await asyncio.to_thread(hashlib.sha256, data)
        if found.hexdigest() != digest:
            raise PeerError(f"the value {digest} is damaged: its digest differs")
        return data

    async def _upload(self, blob: Blob) -> None:
        url = self._url(blob.digest.hex())
        async with self._session.head(url, allow_redirects=False) as response:
            if response.status == HTTPStatus.OK:
                return
        async with self._session.put(
            url,
            data=_stream(blob),
            headers={"Content-Length": str(blob.size)},
            allow_redirects=False,
        ) as response:
            await raise_for_status(response)

    async def _download(self, digest: str) -> bytes:
        async with self._session.get(
            self._url(digest), allow_redirects=False
        ) as response:
            await raise_for_status(response)
            return await read_body(response, BLOB_MAX, f"the value {digest}")

    def _url(self, digest: str) -> str:
        return f"{self._address.url}/v1/blobs/{digest}"


async def _retry(attempt: Callable[[], Awaitable[T]]) -> T:
    """Retry an attempt that fails without a connection."""
    delay = RETRY_DELAY
    for retries_left in reversed(range(TRIES_MAX)):
        try:
            return await attempt()
        except (ClientError, OSError, Unavailable) as error:
            if not retries_left:
                reason = f"a large value: {_reason(error)}"
                raise ConnectionLost(reason) from None  # the traceback hides the reason
        await asyncio.sleep(delay)
        delay *= 2
    raise AssertionError("the last attempt returns or raises")


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ShoalError) else describe_http_error(error)


async def _stream(blob: Blob) -> AsyncIterator[memoryview]:
    for piece in blob.pieces:
        view = memoryview(piece)
        for start in range(0, len(view), PIECE_SIZE):
            yield view[start : start + PIECE_SIZE]
