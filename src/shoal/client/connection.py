"""Requests of event loops to a coordinator: JSON, values, large ones, and the calls.

``coordinator`` has its address, and the errors of its refusals.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import chain, repeat
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlencode

import msgspec
from aiohttp import (
    ClientConnectorCertificateError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    TCPConnector,
    WSServerHandshakeError,
)
from yarl import URL

from shoal.client import messages
from shoal.client.coordinator import (
    CONNECT_TIMEOUT,
    SERVER_ERRORS,
    CoordinatorAddress,
    refusal,
)
from shoal.client.errors import ConnectionLost
from shoal.domain.errors import (
    ConfigError,
    Forbidden,
    PeerError,
    ShoalError,
    Unauthorized,
    Unavailable,
)
from shoal.tasks.limits import BLOB_MAX
from shoal.transports.http_client import as_given, describe_http_error, read_body

HEARTBEAT = 20.0  # seconds between pings; a missing pong ends the connection
READ_TIMEOUT = 60.0  # seconds without a byte of an HTTP response
TLS_CLOSE_DELAY = 0.25  # seconds for TLS to close
RECONNECT_TIMEOUT = 60.0  # seconds to wait for a coordinator that is down
# Seconds between attempts; the last one repeats.
RETRY_DELAYS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
TEMPORARY_STATUSES = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
REASON_MAX = 1 << 12  # bytes of an error that are read
ANSWER_MAX = 16 << 20  # bytes

T = TypeVar("T")


@asynccontextmanager
async def open_session(address: CoordinatorAddress) -> AsyncIterator[ClientSession]:
    """Open an HTTP session with the API key and the TLS settings."""
    try:
        async with ClientSession(
            connector=TCPConnector(ssl=True if address.tls is None else address.tls),
            headers={"Authorization": f"Bearer {address.api_key}"},
            timeout=ClientTimeout(
                total=None, sock_connect=CONNECT_TIMEOUT, sock_read=READ_TIMEOUT
            ),
        ) as session:
            yield session
    finally:
        if address.url.startswith("https:"):
            # aiohttp does not wait for TLS to close; closing the loop earlier raises
            # ResourceWarning ("Graceful Shutdown" in its documentation).
            await asyncio.sleep(TLS_CLOSE_DELAY)


def unreachable_error(address: CoordinatorAddress, error: Exception) -> ConnectionLost:
    """Return the error for an unreachable coordinator, with advice."""
    reason = f"cannot reach {address.url}: {describe_http_error(error)}"
    if not isinstance(error, ClientConnectorCertificateError):
        reason += "; is `shoal serve` running there?"
    if not address.explicit:
        reason += " To use another coordinator, give url=… (--url) or SHOAL_URL."
    return ConnectionLost(reason)


async def raise_for_status(response: ClientResponse) -> None:
    """Raise the error of an HTTP status other than success."""
    if response.status >= HTTPStatus.MULTIPLE_CHOICES:
        reason = await response.content.read(REASON_MAX)
        raise refusal(response.status, reason, str(response.url))


@dataclass(frozen=True, slots=True)
class JsonRequest(Generic[T]):
    """A request; ``path`` is percent-encoded, and a ``body`` is sent as JSON."""

    path: str
    answer: type[T]
    method: str = "GET"
    query: Mapping[str, str] = field(default_factory=dict)
    body: object = None

    async def send(self, session: ClientSession, address: CoordinatorAddress) -> T:
        """Return the answer.

        Raises ShoalError if the coordinator refuses, ConnectionLost if it is
        unreachable.
        """
        query = f"?{urlencode(self.query)}" if self.query else ""
        path = f"{self.path}{query}"
        body = await _answer(session, address, self.method, path, self.body, ANSWER_MAX)
        try:
            return msgspec.json.decode(body, type=self.answer)
        except msgspec.MsgspecError as error:
            url = address.url + path
            raise PeerError(f"{url}: invalid answer: {error}") from error


@dataclass(frozen=True, slots=True)
class ResultRequest(Generic[T]):
    """A request for a value as bytes, which ``read`` reads."""

    path: str
    read: Callable[[bytes], T]

    async def send(self, session: ClientSession, address: CoordinatorAddress) -> T:
        """Return the value; raises as ``JsonRequest.send`` does."""
        data = await _answer(session, address, "GET", self.path, None, BLOB_MAX)
        return self.read(data)


async def _answer(
    session: ClientSession,
    address: CoordinatorAddress,
    method: str,
    path: str,
    body: object,
    limit: int,
) -> bytes:
    """Send a request and return what answers it.  Raises as ``send`` does."""
    url = f"{address.url}{path}"
    try:
        async with session.request(
            method, as_given(url), json=body, allow_redirects=False
        ) as response:
            await raise_for_status(response)
            return await read_body(response, limit, f"{url}: the answer")
    except (ClientError, OSError) as error:
        # Not from the error: its long traceback hides the reason.
        raise unreachable_error(address, error) from None


class SendRequest(Protocol):
    """Sends a request and returns the answer."""

    def __call__(self, request: JsonRequest[T]) -> T: ...


class AsyncSendRequest(Protocol):
    """Sends a request and returns the answer."""

    def __call__(self, request: JsonRequest[T]) -> Awaitable[T]: ...


class CallDialer:
    """Opens the WebSocket of calls, with retries."""

    def __init__(self, session: ClientSession, address: CoordinatorAddress) -> None:
        self._session = session
        self._address = address
        self._connected_before = False

    async def dial(self, is_needed: Callable[[], bool]) -> ClientWebSocketResponse:
        """Return a connection.

        Once connected before, retries while ``is_needed``: the coordinator may restart.

        Raises ShoalError saying why there is no connection.
        """
        deadline = asyncio.get_running_loop().time() + RECONNECT_TIMEOUT
        for delay in chain(RETRY_DELAYS, repeat(RETRY_DELAYS[-1])):
            try:
                socket = await self._connect()
            except Unavailable:
                expired = asyncio.get_running_loop().time() > deadline
                if expired or not self._connected_before or not is_needed():
                    raise
            else:
                self._connected_before = True
                return socket
            await asyncio.sleep(delay)
        raise AssertionError("the delays repeat for ever")

    async def _connect(self) -> ClientWebSocketResponse:
        try:
            return await self._session.ws_connect(
                as_given(self._address.url + messages.PATH),
                heartbeat=HEARTBEAT,
                max_msg_size=messages.MESSAGE_MAX,
            )
        except WSServerHandshakeError as error:
            raise self._refusal(error.status) from None
        except (ClientError, OSError) as error:
            # Not from the error: its long traceback hides the reason.
            raise unreachable_error(self._address, error) from None

    def _refusal(self, status: int) -> ShoalError:
        url = self._address.url
        if status == HTTPStatus.UNAUTHORIZED:
            return Unauthorized(
                f"{url} rejects the API key: give api_key=… or SHOAL_API_KEY; "
                "`shoal keys create` creates one"
            )
        if status == HTTPStatus.FORBIDDEN:
            return Forbidden(
                f"the API key has no permission to call functions at {url}"
            )
        if status in TEMPORARY_STATUSES or status >= SERVER_ERRORS:
            return ConnectionLost(f"{url} accepts no calls now: HTTP {status}")
        return ConfigError(
            f"{url}{messages.PATH}: HTTP {status}: not a coordinator that accepts calls"
        )


PIECE_SIZE = 1 << 20  # bytes of a write
TRIES_MAX = 5  # attempts of a transfer
RETRY_DELAY = 0.5  # seconds until the second attempt; doubled for each further one


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

    def _url(self, digest: str) -> URL:
        return as_given(f"{self._address.url}/v1/blobs/{digest}")


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
