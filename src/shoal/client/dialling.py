"""Reaching the coordinator, at once or after it has been away."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import chain, repeat

from aiohttp import (
    ClientError,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    TCPConnector,
    WSServerHandshakeError,
)

from shoal.client import wire
from shoal.client.failures import ConnectionLost
from shoal.client.place import Place
from shoal.domain.errors import (
    ConfigError,
    Forbidden,
    ShoalError,
    Unauthorized,
    Unavailable,
)
from shoal.transports.reasons import why

HEARTBEAT = 20.0  # seconds between pings; without an answer the connection is over
CONNECT = 10.0  # seconds for a connection to come about
SILENCE = 60.0  # seconds without a byte of an answer over HTTP
FAREWELL = 0.25  # seconds in which TLS ends
PATIENCE = 60.0  # seconds for which a coordinator that has gone is waited for
PAUSES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)  # seconds between tries; then the last
PASSING = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


@asynccontextmanager
async def open_session(place: Place) -> AsyncIterator[ClientSession]:
    """Give a session that shows the key and trusts whom it should."""
    try:
        async with ClientSession(
            connector=TCPConnector(ssl=True if place.tls is None else place.tls),
            headers={"Authorization": f"Bearer {place.api_key}"},
            timeout=ClientTimeout(total=None, sock_connect=CONNECT, sock_read=SILENCE),
        ) as session:
            yield session
    finally:
        if place.url.startswith("https:"):
            # aiohttp does not wait for TLS to end, and a loop that is closed before
            # that complains ("Graceful Shutdown" in its documentation).
            await asyncio.sleep(FAREWELL)


def unreachable(place: Place, error: Exception) -> ConnectionLost:
    """Return what is raised if there is no connection, saying what may help."""
    elsewhere = (
        ""
        if place.given
        else " One that is elsewhere is named by SHOAL_URL, or by url=… (--url)."
    )
    return ConnectionLost(
        f"cannot reach {place.url}: {why(error)}; is `shoal serve` running there?"
        + elsewhere
    )


class Dialler:
    """Opens the WebSocket of calls, again and again."""

    def __init__(self, session: ClientSession, place: Place) -> None:
        self._session = session
        self._place = place
        self._met = False

    async def dial(self, wanted: Callable[[], bool]) -> ClientWebSocketResponse:
        """Return a connection.

        A coordinator that was there before is waited for while that is ``wanted``: it
        may have been started again.

        Raises ShoalError saying why there is no connection.
        """
        given_up = asyncio.get_running_loop().time() + PATIENCE
        for pause in chain(PAUSES, repeat(PAUSES[-1])):
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
                self._place.url + wire.PATH,
                heartbeat=HEARTBEAT,
                max_msg_size=wire.MESSAGE_MAX,
            )
        except WSServerHandshakeError as error:
            raise self._refusal(error.status) from None
        except (ClientError, OSError) as error:
            # Not from the error: its traceback, of three libraries, hides the reason.
            raise unreachable(self._place, error) from None

    def _refusal(self, status: int) -> ShoalError:
        url = self._place.url
        if status == HTTPStatus.UNAUTHORIZED:
            return Unauthorized(
                f"{url} does not know the API key: give api_key=… or SHOAL_API_KEY; "
                "`shoal keys create` makes one"
            )
        if status == HTTPStatus.FORBIDDEN:
            return Forbidden(f"the API key may not call functions at {url}")
        if status in PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return ConnectionLost(f"{url} takes no calls now: it answers HTTP {status}")
        return ConfigError(
            f"{url}{wire.PATH} answers HTTP {status}: there is no coordinator that "
            "takes calls"
        )
