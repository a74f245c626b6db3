"""The web application: every face on one port, and what they have in common."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from aiohttp import web

from shoal.domain.errors import ShoalError
from shoal.gateway import (
    admin,
    admin_accounts,
    admin_jobs,
    admin_keys,
    admin_nodes,
    admin_tokens,
    blobs,
    calls,
    description,
    dispatch,
    grandsage,
    health,
    metrics,
    openai,
    problems,
    receipts,
    results,
    tasks,
)
from shoal.gateway.access import CALLER
from shoal.gateway.metrics import Metrics
from shoal.gateway.parts import Gateway
from shoal.gateway.record import Record, begin, record_of
from shoal.gateway.request_log import log_request

__all__ = ["Gateway", "make_app"]

RESPONSE_TIMEOUT = 120.0  # seconds to read an answer that is sent in one piece
UPGRADED = 101
LEFT = 499  # nginx's status for a client that went before it was answered

FACES = (
    openai,
    results,
    blobs,
    tasks,
    grandsage,
    dispatch,
    receipts,
    admin,
    admin_jobs,
    admin_keys,
    admin_tokens,
    admin_accounts,
    admin_nodes,
    health,
    description,
)

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(gateway: Gateway, upgrade: Handler) -> web.Application:
    """Put the faces together; ``upgrade`` gets the WebSocket requests of any path.

    Serve it with ``handler_cancellation``: a client that leaves must end its job.
    """
    counts = Metrics(gateway.hub.pool)
    gateway.hub.watch(counts.saw_fact)

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = request.headers.get("Upgrade", "").lower()
        if wanted == "websocket" and request.path != calls.PATH:
            return await _upgraded(request, upgrade)
        record = begin(request, gateway.clock.now())
        status = LEFT
        try:
            response = await _handled(request, record, handler)
            status = response.status
        finally:
            gateway.bodies.let_go(request)
            if record.upgraded:
                status = UPGRADED
            now = gateway.clock.now()
            log_request(request, record, status, now - record.began)
            known = gateway.hub.pool.roster.with_model
            counts.saw_request(request, record, status, now, known)
        return response

    app = web.Application(middlewares=[answer])
    app.on_response_prepare.append(_add_headers)
    for face in FACES:
        app.add_routes(face.routes(gateway))
    app.add_routes(calls.routes(gateway, counts.saw_calls))
    app.add_routes(metrics.routes(gateway, counts))
    return app


async def _handled(
    request: web.Request, record: Record, handler: Handler
) -> web.StreamResponse:
    """Answer a request, with an error if need be."""
    try:
        response = await handler(request)
    except ShoalError as error:
        record.error = problems.problem(error).code
        response = problems.response(error, problems.form_at(request.path))
    except web.HTTPException as error:
        record.error = problems.http_code(error)
        response = problems.http_response(request, error)
    if not response.prepared:
        await _send(request, response)
    return response


async def _upgraded(request: web.Request, upgrade: Handler) -> web.StreamResponse:
    begin(request, 0.0)
    try:
        return await upgrade(request)
    except ShoalError as error:
        return problems.response(error)
    except web.HTTPException as error:
        return problems.http_response(request, error)


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


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Let every answer say which request it is for, and what became of that."""
    response.headers.update(record_of(request).headers)
    if (caller := request.get(CALLER)) is not None:
        response.headers.update(caller.headers)
