"""Streamed answers: text to a client as it comes, while the client keeps reading."""

import asyncio
from collections.abc import Callable, Sequence

from aiohttp import web

from shoal.domain.moderation import Watch
from shoal.domain.outcome import Piece
from shoal.runtime.reading import Reader

WRITE_TIMEOUT = 10.0  # seconds a client may leave everything unread
KEEPALIVE = 15.0  # seconds of silence that proxies and clients are known to bear


class ClientGone(ConnectionError):
    """The client left, or stopped reading and was hung up on."""


async def relay(
    request: web.Request,
    response: web.StreamResponse,
    reader: Reader,
    encode: Callable[[Sequence[Piece]], bytes],
    *,
    first: list[Piece] | None = None,
    keepalive: bytes = b"",
    watch: Watch | None = None,
) -> bool:
    """Write the answer's text until it ends; say whether ``watch`` let it all pass.

    All that came together is written at once.  ``first`` is what was read before.

    Raises ClientGone; how the job ended is for ``reader.outcome`` to say.
    """
    loop = asyncio.get_running_loop()
    pieces = first
    reading = False
    while True:
        try:
            async with asyncio.timeout(KEEPALIVE) as limit:
                while True:
                    reading = True
                    if pieces is None:
                        pieces = await reader.read()
                    reading = False
                    if not pieces:
                        return watch is None or not watch.refuses_end()
                    shown = pieces if watch is None else watch.admit(pieces)
                    pieces = None
                    # Moved only when it has come near: a timer for each token would
                    # cost as much as the token.  So waits end after 10 to 15 s.
                    soonest = loop.time() + WRITE_TIMEOUT
                    if (limit.when() or 0) < soonest:
                        limit.reschedule(loop.time() + KEEPALIVE)
                    if shown:
                        await response.write(encode(shown))
                    if watch is not None and watch.refused:
                        return False
        except TimeoutError:
            if not reading:
                raise _hang_up(request) from None
            if keepalive:
                await write(request, response, keepalive)
        except ConnectionError as error:
            raise ClientGone from error


async def write(
    request: web.Request,
    response: web.StreamResponse,
    data: bytes,
    *,
    last: bool = False,
) -> None:
    """Write ``data``, and the end of the response if it is the ``last``.

    Raises ClientGone.
    """
    try:
        async with asyncio.timeout(WRITE_TIMEOUT):
            await (response.write_eof(data) if last else response.write(data))
    except TimeoutError:
        raise _hang_up(request) from None
    except ConnectionError as error:
        raise ClientGone from error


def _hang_up(request: web.Request) -> ClientGone:
    # Closing would wait until the client has read what is buffered.
    if request.transport is not None:
        request.transport.abort()
    return ClientGone("the client stopped reading")
