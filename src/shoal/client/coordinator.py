"""A client's coordinator: its address, API key, and connections."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import chain, repeat
from pathlib import Path

from aiohttp import (
    ClientConnectorCertificateError,
    ClientError,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    TCPConnector,
    WSServerHandshakeError,
)

from shoal.client import messages
from shoal.client.errors import ConnectionLost
from shoal.config import data_folder
from shoal.config.runtime_file import local_url
from shoal.config.secret_files import KEY_FILE
from shoal.domain.credentials import without_fingerprint
from shoal.domain.errors import (
    ConfigError,
    Forbidden,
    ShoalError,
    Unauthorized,
    Unavailable,
)
from shoal.tasks.call_access import call_access
from shoal.transports.http_client import describe_http_error
from shoal.transports.tls import (
    check_url,
    context_of_folder,
    context_pinning,
    context_trusting,
)


@dataclass(frozen=True, slots=True)
class CoordinatorAddress:
    """A coordinator: its URL without a path, the API key, and the TLS settings.

    ``tls`` is None for the system's authorities.  ``explicit`` is False for the default
    coordinator of this machine.
    """

    url: str
    api_key: str = field(repr=False)
    tls: ssl.SSLContext | None = None
    explicit: bool = True


def find_coordinator(
    url: str | None = None,
    api_key: str | None = None,
    *,
    data_dir: str | Path | None = None,
    cacert: str | Path | None = None,
) -> CoordinatorAddress:
    """Return the coordinator to call.

    Defaults come from the running call of a task, then from SHOAL_URL, SHOAL_API_KEY
    and SHOAL_CACERT, and then from the data folder of the coordinator of this machine.

    Raises ConfigError naming what is missing or invalid.
    """
    if not (url or api_key or data_dir) and (access := call_access()) is not None:
        url, api_key = access
    folder = Path(data_dir) if data_dir else data_folder()
    chosen_url = url or os.environ.get("SHOAL_URL")
    chosen_key = api_key or os.environ.get("SHOAL_API_KEY")
    authorities = cacert or os.environ.get("SHOAL_CACERT")
    key, fingerprint = without_fingerprint(chosen_key or _stored_key(folder))
    scheme = "http" if fingerprint is None else "https"
    base = _base_url(chosen_url or local_url(folder), scheme)
    check_url(base, fingerprint)
    tls = None
    if fingerprint is not None:
        tls = context_pinning(fingerprint)
    elif base.startswith("https:"):
        tls = _tls_context(folder, authorities, chosen_key)
    return CoordinatorAddress(base, key, tls, bool(chosen_url))


def _base_url(url: str, scheme: str) -> str:
    base = url if "://" in url else f"{scheme}://{url}"
    # Accept the base URL for OpenAI clients as well.
    base = base.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"url {url!r}: expected http://HOST:PORT, or https://")
    return base


def _stored_key(folder: Path) -> str:
    try:
        return (folder / KEY_FILE).read_text().strip()
    except OSError as error:
        raise ConfigError(
            "no API key: `shoal serve` creates one for its own machine; elsewhere give "
            f"api_key=… or SHOAL_API_KEY ({folder / KEY_FILE}: {error.strerror})"
        ) from error


def _tls_context(
    folder: Path, authorities: str | Path | None, api_key: str | None
) -> ssl.SSLContext | None:
    """The key in a coordinator's folder is sent to that coordinator only."""
    if authorities:
        return context_trusting(Path(authorities))
    return None if api_key else context_of_folder(folder)


HEARTBEAT = 20.0  # seconds between pings; a missing pong ends the connection
CONNECT_TIMEOUT = 10.0  # seconds to connect
READ_TIMEOUT = 60.0  # seconds without a byte of an HTTP response
TLS_CLOSE_DELAY = 0.25  # seconds for TLS to close
RECONNECT_TIMEOUT = 60.0  # seconds to wait for a coordinator that is down
# Seconds between attempts; the last one repeats.
RETRY_DELAYS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
TEMPORARY_STATUSES = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


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
                self._address.url + messages.PATH,
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
        if status in TEMPORARY_STATUSES or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return ConnectionLost(f"{url} accepts no calls now: HTTP {status}")
        return ConfigError(
            f"{url}{messages.PATH}: HTTP {status}: not a coordinator that accepts calls"
        )
