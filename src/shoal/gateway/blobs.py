"""``/v1/blobs``: large values of calls, by the SHA-256 of their bytes."""

import asyncio
import re
from functools import partial

from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest
from shoal.gateway.parts import Gateway
from shoal.store.blobs import BLOB_MAX, missing

PATH = "/v1/blobs/{digest}"
PIECE = 1 << 18  # bytes that are read and written at a time
PIECE_TIMEOUT = 60.0  # seconds that a client may take to read as much
BYTES_TYPE = "application/octet-stream"
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the path of this face."""
    return [
        web.head(PATH, partial(_look, gateway)),
        web.get(PATH, partial(_show, gateway), allow_head=False),
        web.put(PATH, partial(_keep, gateway)),
    ]


async def _look(gateway: Gateway, request: web.Request) -> web.Response:
    """Say whether a value is here, which keeps it here for a while."""
    await gateway.access.admit(request, Scope.USE)
    digest = _digest_in(request)
    if gateway.hub.blobs.lacking([digest]):
        raise missing(digest)
    return web.Response(content_type=BYTES_TYPE)


async def _show(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    # Who knows the digest of a value was told it, or has the value.
    await gateway.access.admit(request, Scope.READ)
    data = await gateway.hub.blobs.read(_digest_in(request))
    response = web.StreamResponse()
    response.content_type = BYTES_TYPE
    response.content_length = len(data)
    await response.prepare(request)
    # Piece by piece, for it is a file that may not be in memory.
    try:
        for begin in range(0, len(data), PIECE):
            async with asyncio.timeout(PIECE_TIMEOUT):
                await response.write(data[begin : begin + PIECE])
        await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # the client is gone
    return response


async def _keep(gateway: Gateway, request: web.Request) -> web.Response:
    await gateway.access.admit(request, Scope.USE)
    digest = _digest_in(request)
    data = await gateway.bodies.read(request, BLOB_MAX)
    await gateway.hub.blobs.keep(data, digest)
    return web.Response(status=204)


def _digest_in(request: web.Request) -> bytes:
    text = request.match_info["digest"]
    if _DIGEST.fullmatch(text) is None:
        raise InvalidRequest(
            "a value is named by its SHA-256, in 64 hexadecimal digits", "digest"
        )
    return bytes.fromhex(text)
