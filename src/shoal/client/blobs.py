"""Large values, which travel apart: uploaded once, and downloaded."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar

import msgspec
from aiohttp import ClientError, ClientResponse, ClientSession

from shoal.client.coordinator import CoordinatorAddress
from shoal.client.errors import ConnectionLost
from shoal.domain.errors import (
    Forbidden,
    InvalidRequest,
    PeerError,
    ShoalError,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from shoal.tasks.limits import BLOB_MAX
from shoal.transports.http_client import describe_http_error, read_body

PIECE_SIZE = 1 << 20  # bytes that are written at a time
TRIES_MAX = 5  # of a blob whose connection breaks
RETRY_DELAY = 0.5  # seconds until the second; twice as many before each further one
REASON_MAX = 1 << 12  # bytes of an error that are read

T = TypeVar("T")
SERVER_ERRORS = 500  # the first HTTP status of those that say the server is not well
_PASSING = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT)
_ERRORS: dict[int, type[ShoalError]] = {
    HTTPStatus.UNAUTHORIZED: Unauthorized,
    HTTPStatus.FORBIDDEN: Forbidden,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: TooLarge,
}


class _Message(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    """An error as the gateway writes it: in OpenAI's form."""

    error: _Message


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """One value in MessagePack, in pieces, and the SHA-256 digest that it is known by.

    The pieces are not changed any more: they may be asked for again.
    """

    digest: bytes
    pieces: tuple[bytes | memoryview, ...]

    @property
    def size(self) -> int:
        """How many bytes it is."""
        return sum(len(piece) for piece in self.pieces)


class BlobClient:
    """The coordinator's blobs, as a client with a session of its own gets at them."""

    def __init__(self, session: ClientSession, place: CoordinatorAddress) -> None:
        self._session = session
        self._place = place

    async def upload(self, blob: Blob) -> None:
        """See to it that the coordinator has a blob.

        Raises ShoalError if it does not take it, ConnectionLost if it cannot be
        reached for a while.
        """
        await _persist(lambda: self._give(blob))

    async def download(self, digest: str) -> bytes:
        """Return a blob, by its digest in hex.

        Raises as ``upload`` does, and PeerError if it is not what its digest says.
        """
        data = await _persist(lambda: self._fetch(digest))
        found = await asyncio.to_thread(hashlib.sha256, data)
        if found.hexdigest() != digest:
            raise PeerError(f"the value {digest} came damaged")
        return data

    async def _give(self, blob: Blob) -> None:
        url = self._url(blob.digest.hex())
        async with self._session.head(url, allow_redirects=False) as answer:
            if answer.status == HTTPStatus.OK:
                return
        async with self._session.put(
            url,
            data=_stream(blob),
            headers={"Content-Length": str(blob.size)},
            allow_redirects=False,
        ) as answer:
            await raise_for_status(answer)

    async def _fetch(self, digest: str) -> bytes:
        async with self._session.get(
            self._url(digest), allow_redirects=False
        ) as response:
            await raise_for_status(response)
            return await read_body(response, BLOB_MAX, f"the value {digest}")

    def _url(self, digest: str) -> str:
        return f"{self._place.url}/v1/blobs/{digest}"


async def raise_for_status(answer: ClientResponse) -> None:
    """Raise the ShoalError that an HTTP status means, if it is one."""
    if answer.status < HTTPStatus.MULTIPLE_CHOICES:
        return
    said = _message(await answer.content.read(REASON_MAX))
    text = said or f"HTTP {answer.status} for a large value"
    if answer.status in _ERRORS:
        raise _ERRORS[answer.status](text)
    if answer.status in _PASSING or answer.status >= SERVER_ERRORS:
        raise Unavailable(text)
    raise InvalidRequest(text)


async def _persist(attempt: Callable[[], Awaitable[T]]) -> T:
    """Try again what fails for want of a connection."""
    pause = RETRY_DELAY
    for left in reversed(range(TRIES_MAX)):
        try:
            return await attempt()
        except (ClientError, OSError, Unavailable) as error:
            if not left:
                reason = f"a large value: {_reason(error)}"
                raise ConnectionLost(reason) from None  # the rest is of libraries
        await asyncio.sleep(pause)
        pause *= 2
    raise AssertionError("the last try returns or raises")


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ShoalError) else describe_http_error(error)


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message
    except ValueError:
        return ""


async def _stream(blob: Blob) -> AsyncIterator[memoryview]:
    for piece in blob.pieces:
        view = memoryview(piece)
        for start in range(0, len(view), PIECE_SIZE):
            yield view[start : start + PIECE_SIZE]
