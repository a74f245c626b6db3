"""Requests of event loops to a coordinator: JSON, values, large ones, and the calls.

``coordinator`` has its address, and the errors of its refusals.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlencode

import msgspec
from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorDNSError,
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientSSLError,
    ClientTimeout,
    ClientWebSocketResponse,
    InvalidURL,
    TCPConnector,
    WSServerHandshakeError,
)
from yarl import URL

from shoal.client import messages
from shoal.client.coordinator import (
    CONNECT_TIMEOUT,
    SERVER_ERRORS,
    CoordinatorAddress,
    interruption,
    refusal,
)
from shoal.client.errors import ConnectionLost
from shoal.client.reconnection import COORDINATOR, IDEMPOTENCY_KEY, IDEMPOTENT
from shoal.domain import errors
from shoal.tasks.limits import BLOB_MAX
from shoal.transports.http_client import as_given, describe_http_error, read_body

HEARTBEAT = 20.0  # seconds between pings; a missing pong ends the connection
READ_TIMEOUT = 60.0  # seconds without a byte of an HTTP response
TLS_CLOSE_DELAY = 0.25  # seconds for TLS to close
FINAL = (ClientConnectorDNSError, ClientSSLError, InvalidURL)
"""What will fail again: the name of a host, its TLS, or the URL."""

TEMPORARY_STATUSES = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
REASON_MAX = 1 << 12  # bytes of an error that are read
ANSWER_MAX = 16 << 20  # bytes

T = TypeVar("T")

log = logging.getLogger("shoal")


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
    sent = not isinstance(error, ClientConnectorError)
    return ConnectionLost(reason, sent=sent, is_final=isinstance(error, FINAL))


async def raise_for_status(
    response: ClientResponse, address: CoordinatorAddress
) -> None:
    """Raise the error of an HTTP status other than success."""
    succeeded = response.status < HTTPStatus.MULTIPLE_CHOICES
    if succeeded or COORDINATOR in response.headers:
        address.reconnection.is_known = True
    if not succeeded:
        reason = await response.content.read(REASON_MAX)
        error = refusal(response.status, reason, str(response.url))
        raise interruption(response.status, response.headers, error) or error


async def repeat(
    attempt: Callable[[], Awaitable[T]],
    address: CoordinatorAddress,
    *,
    repeatable: bool,
    is_needed: Callable[[], bool] = lambda: True,
) -> T:
    """Make attempts until one succeeds, while ``is_needed``; raise the last error."""
    attempts = address.attempts(repeatable=repeatable)
    while True:
        try:
            return await attempt()
        except ConnectionLost as error:
            pause = attempts.pause(error, asyncio.get_running_loop().time())
            if pause is None or not is_needed():
                raise
            if attempts.begins_to_wait:
                log.warning("%s (trying again for a while)", error)
        await asyncio.sleep(pause)


@dataclass(frozen=True, slots=True)
class JsonRequest(Generic[T]):
    """A request; ``path`` is percent-encoded, and a ``body`` is sent as JSON.

    It is sent again, if its answer is lost, unless it is a POST without a ``key``, the
    idempotency key.
    """

    path: str
    answer: type[T]
    method: str = "GET"
    query: Mapping[str, str] = field(default_factory=dict)
    body: object = None
    key: str = ""

    async def send(self, session: ClientSession, address: CoordinatorAddress) -> T:
        """Return the answer.

        Raises ShoalError if the coordinator refuses, ConnectionLost if it is
        unreachable.
        """
        query = f"?{urlencode(self.query)}" if self.query else ""
        path = f"{self.path}{query}"
        body = await _answer(
            session, address, self.method, path, ANSWER_MAX, self.body, self.key
        )
        try:
            return msgspec.json.decode(body, type=self.answer)
        except msgspec.MsgspecError as error:
            url = address.url + path
            raise errors.PeerError(f"{url}: invalid answer: {error}") from error


@dataclass(frozen=True, slots=True)
class ResultRequest(Generic[T]):
    """A request for a value as bytes, which ``read`` reads."""

    path: str
    read: Callable[[bytes], T]

    async def send(self, session: ClientSession, address: CoordinatorAddress) -> T:
        """Return the value; raises as ``JsonRequest.send`` does."""
        data = await _answer(session, address, "GET", self.path, BLOB_MAX)
        return self.read(data)


async def _answer(
    session: ClientSession,
    address: CoordinatorAddress,
    method: str,
    path: str,
    limit: int,
    body: object = None,
    key: str = "",
) -> bytes:
    """Send a request and return the body of its answer.  Raises as ``send`` does."""
    headers = {IDEMPOTENCY_KEY: key} if key else {}

    async def attempt() -> bytes:
        url = f"{address.url}{path}"
        try:
            async with session.request(
                method, as_given(url), json=body, headers=headers, allow_redirects=False
            ) as response:
                await raise_for_status(response, address)
                return await read_body(response, limit, f"{url}: the answer")
        except (ClientError, OSError) as error:
            if isinstance(error, errors.ShoalError):
                raise
            # Not from the error: its long traceback hides the reason.
            raise unreachable_error(address, error) from None

    repeatable = method in IDEMPOTENT or bool(key)
    return await repeat(attempt, address, repeatable=repeatable)


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

    async def dial(self, is_needed: Callable[[], bool]) -> ClientWebSocketResponse:
        """Return a connection.

        Retries while ``is_needed``: the coordinator may restart.

        Raises ShoalError saying why there is no connection.
        """
        return await repeat(
            self._connect, self._address, repeatable=True, is_needed=is_needed
        )

    async def _connect(self) -> ClientWebSocketResponse:
        try:
            socket = await self._session.ws_connect(
                as_given(self._address.url + messages.PATH),
                heartbeat=HEARTBEAT,
                max_msg_size=messages.MESSAGE_MAX,
            )
            self._address.reconnection.is_known = True
            return socket
        except WSServerHandshakeError as error:
            raise self._refusal(error.status, error.headers or {}) from None
        except (ClientError, OSError) as error:
            # Not from the error: its long traceback hides the reason.
            raise unreachable_error(self._address, error) from None

    def _refusal(self, status: int, headers: Mapping[str, str]) -> errors.ShoalError:
        if COORDINATOR in headers:
            self._address.reconnection.is_known = True
        url = self._address.url
        if status == HTTPStatus.UNAUTHORIZED:
            return errors.Unauthorized(
                f"{url} rejects the API key: give api_key=… or SHOAL_API_KEY; "
                "`shoal keys create` creates one"
            )
        if status == HTTPStatus.FORBIDDEN:
            return errors.Forbidden(
                f"the API key has no permission to call functions at {url}"
            )
        if status in TEMPORARY_STATUSES or status >= SERVER_ERRORS:
            refused = ConnectionLost(f"{url} accepts no calls now: HTTP {status}")
            return interruption(status, headers, refused) or refused
        return errors.ConfigError(
            f"{url}{messages.PATH}: HTTP {status}: not a coordinator that accepts calls"
        )


PIECE_SIZE = 1 << 20  # bytes of a write


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
        await self._repeat(lambda: self._upload(blob))

    async def download(self, digest: str) -> bytes:
        """Return a blob, by its digest in hex.

        Raises as ``upload`` does, and PeerError if the digest does not match.
        """
        data = await self._repeat(lambda: self._download(digest))
        found = await asyncio.to_thread(hashlib.sha256, data)
        if found.hexdigest() != digest:
            raise errors.PeerError(f"the value {digest} is damaged: its digest differs")
        return data

    async def _repeat(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat a transfer while there is no connection, or no room for the value."""

        async def transfer() -> T:
            try:
                return await attempt()
            except (ClientError, OSError, errors.Unavailable) as error:
                known = isinstance(error, errors.ShoalError)
                reason = error if known else describe_http_error(error)
                # Without the long traceback, which hides the reason.
                raise ConnectionLost(f"a large value: {reason}") from None

        return await repeat(transfer, self._address, repeatable=True)

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
            await raise_for_status(response, self._address)

    async def _download(self, digest: str) -> bytes:
        async with self._session.get(
            self._url(digest), allow_redirects=False
        ) as response:
            await raise_for_status(response, self._address)
            return await read_body(response, BLOB_MAX, f"the value {digest}")

    def _url(self, digest: str) -> URL:
        return as_given(f"{self._address.url}/v1/blobs/{digest}")


async def _stream(blob: Blob) -> AsyncIterator[memoryview]:
    for piece in blob.pieces:
        view = memoryview(piece)
        for start in range(0, len(view), PIECE_SIZE):
            yield view[start : start + PIECE_SIZE]
