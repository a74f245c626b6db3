"""The coordinator that a client calls: its address, its key, and connections to it."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import chain, repeat
from pathlib import Path

import platformdirs
from aiohttp import (
    ClientError,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    TCPConnector,
    WSServerHandshakeError,
)

from shoal.client import messages
from shoal.client.errors import ConnectionLost
from shoal.config.runtime_file import local_url
from shoal.config.secret_files import CERTIFICATE_FILE, KEY_FILE
from shoal.domain.errors import (
    ConfigError,
    Forbidden,
    ShoalError,
    Unauthorized,
    Unavailable,
)
from shoal.transports.http_client import describe_http_error
from shoal.transports.tls import context_pinning, context_trusting


@dataclass(frozen=True, slots=True)
class CoordinatorAddress:
    """A coordinator: its URL without a path, the key to show, and whom to trust.

    ``tls`` is None where the system's authorities are good.  ``explicit`` says whether
    somebody named it; else it is looked for on this machine.
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
    """Return the coordinator that is meant.

    What is not given is looked for in SHOAL_URL, SHOAL_API_KEY, SHOAL_DATA_DIR and
    SHOAL_CACERT; after that it is the coordinator of this machine, with the URL, the
    key and the certificate that it keeps in its folder.

    Raises ConfigError naming what is missing or wrong.
    """
    folder = Path(data_dir or os.environ.get("SHOAL_DATA_DIR") or _own_folder())
    given = url or os.environ.get("SHOAL_URL")
    known = api_key or os.environ.get("SHOAL_API_KEY")
    authorities = cacert or os.environ.get("SHOAL_CACERT")
    place = _base(given or local_url(folder))
    return CoordinatorAddress(
        place,
        known or _kept_key(folder),
        _trust(folder, authorities, known) if place.startswith("https:") else None,
        bool(given),
    )


def _own_folder() -> Path:
    return platformdirs.user_data_path("shoal", appauthor=False)


def _base(url: str) -> str:
    base = url if "://" in url else f"http://{url}"
    # The base URL that OpenAI clients are given is as good.
    base = base.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"url {url!r}: expected http://HOST:PORT, or https://")
    return base


def _kept_key(folder: Path) -> str:
    try:
        return (folder / KEY_FILE).read_text().strip()
    except OSError as error:
        raise ConfigError(
            "no API key: `shoal serve` makes one for its own machine, elsewhere give "
            f"api_key=… or SHOAL_API_KEY ({folder / KEY_FILE}: {error.strerror})"
        ) from error


def _trust(
    folder: Path, authorities: str | Path | None, api_key: str | None
) -> ssl.SSLContext | None:
    """A key that was read from the coordinator's folder goes to that one alone."""
    if authorities:
        return context_trusting(Path(authorities))
    if api_key:
        return None
    try:
        return context_pinning((folder / CERTIFICATE_FILE).read_text())
    except FileNotFoundError:
        return None  # perhaps there is a proxy before it


HEARTBEAT = 20.0  # seconds between pings; without an answer the connection is over
CONNECT_TIMEOUT = 10.0  # seconds for a connection to come about
READ_TIMEOUT = 60.0  # seconds without a byte of an answer over HTTP
TLS_CLOSE_DELAY = 0.25  # seconds in which TLS ends
RECONNECT_TIMEOUT = 60.0  # seconds for which a coordinator that has gone is waited for
RETRY_DELAYS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)  # seconds between tries; then the last
TEMPORARY_STATUSES = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


@asynccontextmanager
async def open_session(place: CoordinatorAddress) -> AsyncIterator[ClientSession]:
    """Give a session that shows the key and trusts whom it should."""
    try:
        async with ClientSession(
            connector=TCPConnector(ssl=True if place.tls is None else place.tls),
            headers={"Authorization": f"Bearer {place.api_key}"},
            timeout=ClientTimeout(
                total=None, sock_connect=CONNECT_TIMEOUT, sock_read=READ_TIMEOUT
            ),
        ) as session:
            yield session
    finally:
        if place.url.startswith("https:"):
            # aiohttp does not wait for TLS to end, and a loop that is closed before
            # that complains ("Graceful Shutdown" in its documentation).
            await asyncio.sleep(TLS_CLOSE_DELAY)


def unreachable_error(place: CoordinatorAddress, error: Exception) -> ConnectionLost:
    """Return what is raised if there is no connection, saying what may help."""
    elsewhere = (
        ""
        if place.explicit
        else " One that is elsewhere is named by SHOAL_URL, or by url=… (--url)."
    )
    return ConnectionLost(
        f"cannot reach {place.url}: {describe_http_error(error)}; is `shoal serve` "
        "running there?" + elsewhere
    )


class CallDialer:
    """Opens the WebSocket of calls, again and again."""

    def __init__(self, session: ClientSession, place: CoordinatorAddress) -> None:
        self._session = session
        self._place = place
        self._met = False

    async def dial(self, wanted: Callable[[], bool]) -> ClientWebSocketResponse:
        """Return a connection.

        A coordinator that was there before is waited for while that is ``wanted``: it
        may have been started again.

        Raises ShoalError saying why there is no connection.
        """
        given_up = asyncio.get_running_loop().time() + RECONNECT_TIMEOUT
        for pause in chain(RETRY_DELAYS, repeat(RETRY_DELAYS[-1])):
            try:
                socket = await self._connect()
            except Unavailable:
                late = asyncio.get_running_loop().time() > given_up
                if late or not self._met or not wanted():
                    raise
            else:
                self._met = True
                return socket
            await asyncio.sleep(pause)
        raise AssertionError("the pauses do not end")

    async def _connect(self) -> ClientWebSocketResponse:
        try:
            return await self._session.ws_connect(
                self._place.url + messages.PATH,
                heartbeat=HEARTBEAT,
                max_msg_size=messages.MESSAGE_MAX,
            )
        except WSServerHandshakeError as error:
            raise self._refusal(error.status) from None
        except (ClientError, OSError) as error:
            # Not from the error: its traceback, of three libraries, hides the reason.
            raise unreachable_error(self._place, error) from None

    def _refusal(self, status: int) -> ShoalError:
        url = self._place.url
        if status == HTTPStatus.UNAUTHORIZED:
            return Unauthorized(
                f"{url} does not know the API key: give api_key=… or SHOAL_API_KEY; "
                "`shoal keys create` makes one"
            )
        if status == HTTPStatus.FORBIDDEN:
            return Forbidden(f"the API key may not call functions at {url}")
        if status in TEMPORARY_STATUSES or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return ConnectionLost(f"{url} takes no calls now: it answers HTTP {status}")
        return ConfigError(
            f"{url}{messages.PATH} answers HTTP {status}: there is no coordinator that "
            "takes calls"
        )
