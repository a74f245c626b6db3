"""The live state of the pool, as a stream of server-sent events.

Source: HTML, "Server-sent events".  A client that reconnects gets a new snapshot.
"""

import asyncio
from contextlib import suppress

from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.errors import ShoalError
from shoal.gateway.dashboard.live_feed import LIVE_FEED, LiveClient, LiveFeed
from shoal.gateway.http import errors
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.media_types import SSE_TYPE
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.request_record import record_of
from shoal.gateway.http.responses import (
    KEEPALIVE_EVERY,
    SSE_KEEPALIVE,
    ClientGone,
    stream_headers,
    write,
)

api = Operations()

RETRY = b"retry: 2000\n\n"  # milliseconds before a browser connects again
WRITTEN_AT_ONCE = 1 << 16  # bytes: a slow client has the time limit for each


@api.get("/admin/live", "Stream the state of the pool", Scope.MONITOR, media=SSE_TYPE)
async def stream_live(request: web.Request, caller: ApiCaller) -> web.StreamResponse:
    feed = request.app[LIVE_FEED]
    async with feed.subscribe(caller) as client:
        response = web.StreamResponse(headers=stream_headers())
        await response.prepare(request)
        try:
            await write(request, response, RETRY)
            await _forward(feed, client, request, response)
            await write(request, response, b"", last=True)
        except ClientGone:
            record_of(request).error = "client_gone"
        except ShoalError as error:
            record_of(request).error = errors.error_status(error).code
            with suppress(ClientGone):
                body = errors.error_body(error, api.errors)
                text = b"event: error\ndata: " + body + b"\n\n"
                await write(request, response, text, last=True)
    return response


async def _forward(
    feed: LiveFeed,
    client: LiveClient,
    request: web.Request,
    response: web.StreamResponse,
) -> None:
    """Write the feed to a client until the feed or the client's access ends.

    Raises ClientGone, also if it reads nothing for long, and as ``LiveFeed.read``.
    """
    while not feed.closed:
        text = await feed.read(client)
        for start in range(0, len(text), WRITTEN_AT_ONCE):
            part = text[start : start + WRITTEN_AT_ONCE]
            await write(request, response, part)
        try:
            async with asyncio.timeout(KEEPALIVE_EVERY):
                await client.signal.wait()
        except TimeoutError:
            await write(request, response, SSE_KEEPALIVE)
