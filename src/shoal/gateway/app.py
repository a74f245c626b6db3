"""The web application: every face on one port, and what they have in common."""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from aiohttp import web

from shoal.domain.errors import ShoalError
from shoal.gateway import admin, grandsage, health, openai, problems
from shoal.gateway.body import BODY_MAX
from shoal.gateway.parts import Gateway

__all__ = ["Gateway", "make_app"]

REQUEST_ID = "x-request-id"
RESPONSE_TIMEOUT = 120.0  # seconds to read an answer that is sent in one piece

_SANE = re.compile(r"[!-~]{1,128}", re.ASCII)

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(gateway: Gateway, upgrade: Handler) -> web.Application:
    """Put the faces together; ``upgrade`` gets the WebSocket requests of any path.

    Serve it with ``handler_cancellation``: a client that leaves must end its job.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.headers.get("Upgrade", "").lower() == "websocket":
                return await upgrade(request)
            response = await handler(request)
        except ShoalError as error:
            problems.log_refusal(request, error)
            response = problems.response(error)
        except web.HTTPException as error:
            problems.log_refusal(request, error)
            response = problems.http_response(request, error)
        if not response.prepared:
            await _send(request, response)
        return response

    app = web.Application(middlewares=[answer], client_max_size=BODY_MAX)
    app.on_response_prepare.append(_name)
    for face in (openai, grandsage, admin, health):
        app.add_routes(face.routes(gateway))
    return app


async def _send(request: web.Request, response: web.StreamResponse) -> None:
    # aiohttp would send it too, but wait for ever for a client that does not read.
    try:
        async with asyncio.timeout(RESPONSE_TIMEOUT):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # the client is gone, which aiohttp finds out for itself


async def _name(request: web.Request, response: web.StreamResponse) -> None:
    """Give every answer the request's id: the client's own, if it can be one."""
    given = request.headers.get(REQUEST_ID, "")
    sane = _SANE.fullmatch(given) is not None
    response.headers[REQUEST_ID] = given if sane else secrets.token_hex(12)
