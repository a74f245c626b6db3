"""The web applications of the ports: their operations, log, metrics and errors."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from shoal.client.reconnection import COORDINATOR
from shoal.domain.credentials import Scope
from shoal.domain.errors import ShoalError, release_frames
from shoal.gateway.all_operations import OLLAMA_PORT, OPERATIONS
from shoal.gateway.context import Gateway, OperatorsGateway
from shoal.gateway.dashboard import dashboard_files
from shoal.gateway.http import errors
from shoal.gateway.http.operation import Operation, error_form_finder
from shoal.gateway.http.proxies import ADMITTED, FORWARDED_FOR, with_front_client
from shoal.gateway.http.relay import BytePace
from shoal.gateway.http.request_record import (
    RequestRecord,
    begin_record,
    log_request,
    record_of,
)
from shoal.gateway.http.responses import AT_ONCE_MAX
from shoal.gateway.jobs.events import SUBSCRIPTIONS, EventSubscriptions
from shoal.gateway.metrics.monitoring import METRICS, PrometheusMetrics
from shoal.gateway.metrics.requests import AnsweredRequest, answered_request
from shoal.gateway.metrics.traces import JobTraces, RequestTracer
from shoal.gateway.models.shard_relay import SHARD_RELAYS, ShardRelays
from shoal.gateway.openapi import DOCUMENT, EncodedDocument
from shoal.gateway.operators.event_log import EVENT_LOG, EventLog
from shoal.gateway.operators.live_feed import LIVE_FEED, LiveFeed
from shoal.gateway.runs.hosted_runs import RUNS, HostedRuns
from shoal.transports import http_server
from shoal.transports.acceptor import FirstLook
from shoal.transports.strangers import Strangers

__all__ = ["Gateway", "make_app"]

RESPONSE_TIMEOUT = 120.0  # seconds for a client to read a whole response
SWITCHING_PROTOCOLS = 101
NO_CONTENT = 204
FAILED = 500  # what aiohttp answers when a handler raises anything else
CLIENT_CLOSED = 499  # nginx's status for a client that left before the response

OWN_HEADERS = {
    # A browser must not run files of clients as pages of the dashboard.
    "X-Content-Type-Options": "nosniff",
    # A proxy's error pages lack it.
    COORDINATOR: "1",  # its version is for those with a key
}

HTTP_PATHS = frozenset(each.path.split("/")[1] for each in OPERATIONS) - {""}
"""First parts of the paths at which no worker connects: some clients try WebSockets."""

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    gateway: Gateway,
    upgrade: Handler,
    strangers: Strangers | None = None,
    *,
    from_fronts: bool = False,
) -> web.Application:
    """Build the application; ``upgrade`` handles WebSocket requests of workers.

    They connect at any path that is not one of HTTP.
    Requests without a credential have the share of the loop of ``strangers``.
    Serve it with ``handler_cancellation``: a job ends when its client disconnects.
    """
    metrics = PrometheusMetrics(gateway)
    gateway.hub.subscribe(metrics.jobs.on_facts)
    if gateway.spans is not None:
        traces = JobTraces(gateway.spans, gateway.clock, gateway.hub.pool)
        gateway.hub.subscribe(traces.on_facts)
    dashboard_files()  # read before the first request
    subscriptions = EventSubscriptions()
    gateway.hub.subscribe(subscriptions.on_facts)
    events = EventLog(gateway.clock)
    gateway.hub.subscribe(events.on_facts)
    live = LiveFeed(gateway.select(OperatorsGateway), events)
    everyone = Strangers() if strangers is None else strangers
    app = application(
        *(gateway, OPERATIONS, upgrade, metrics.requests, everyone),
        from_fronts=from_fronts,
    )
    app[METRICS] = metrics
    app.on_startup.append(metrics.loop_lag.on_startup)
    app.on_cleanup.append(metrics.loop_lag.on_cleanup)
    pace = BytePace()
    app[RUNS] = HostedRuns(gateway.hub, gateway.clock, pace)
    app[SHARD_RELAYS] = ShardRelays(gateway.hub, gateway.clock, pace)
    app[SUBSCRIPTIONS] = subscriptions
    app[EVENT_LOG] = events
    app[LIVE_FEED] = live
    app.on_shutdown.append(live.on_shutdown)
    app[DOCUMENT] = EncodedDocument(OPERATIONS)
    return app


def first_look(gateway: Gateway) -> FirstLook:
    """Return a function that identifies known clients by the head of a request."""

    def look(first: bytes, address: str) -> tuple[bool, str]:
        head, end, _ = first.partition(b"\r\n\r\n")
        if not end:
            return False, address
        fields: CIMultiDict[str] = CIMultiDict()
        # No generator, which is resumed for each of them.
        for line in head.decode("latin-1").split("\r\n")[1:]:
            name, _, value = line.partition(":")
            fields.add(name, value.strip())
        headers = CIMultiDictProxy(fields)
        known = gateway.access.recognizes(headers, address, secure=False)
        return known, gateway.proxies.client_of(
            address, headers.getall(FORWARDED_FOR, [])
        )

    return look


def make_ollama_app(
    app: web.Application,
    gateway: Gateway,
    strangers: Strangers | None = None,
    *,
    from_fronts: bool = False,
) -> web.Application:
    """Build the application of the port of Ollama's API, beside that of ``make_app``.

    It is counted with the requests of ``app``, and served in the same way.
    """
    everyone = Strangers() if strangers is None else strangers
    requests = app[METRICS].requests
    return application(
        *(gateway, OLLAMA_PORT, None, requests, everyone), from_fronts=from_fronts
    )


class RequestCounter(Protocol):
    """Counts requests; ``active`` are those that have not ended."""

    active: int

    def add(self, answered: AnsweredRequest) -> None:
        """Count a request that has ended."""


def application(
    gateway: Gateway,
    operations: Sequence[Operation],
    upgrade: Handler | None,
    requests: RequestCounter,
    strangers: Strangers,
    routes: Sequence[web.AbstractRouteDef] | None = None,
    *,
    from_fronts: bool = False,
) -> web.Application:
    """Return the application of a port; ``upgrade`` None: without other WebSockets.

    ``routes``: in place of those of the operations.  ``from_fronts``: its requests come
    from fronts of this coordinator.
    """
    error_form = error_form_finder(operations)
    tracer = None
    if gateway.spans is not None:
        tracer = RequestTracer(gateway.spans, gateway.clock)

    @web.middleware
    def answer(request: web.Request, handler: Handler) -> Awaitable[web.StreamResponse]:
        if from_fronts:
            request = with_front_client(request)
        address = request.remote or ""
        key = gateway.access.key_in(request.headers)
        # Before a stranger waits for its turn, which may not come: ``add_headers``.
        record = begin_record(request, gateway.clock.now(), key)
        if key is not None or gateway.access.recognizes(
            request.headers, address, secure=request.secure
        ):
            return respond(request, handler, record)
        return http_server.answer_stranger(
            request,
            gateway.proxies.address_of(request),
            strangers,
            lambda: respond(request, handler, record),
        )

    async def respond(
        request: web.Request, handler: Handler, record: RequestRecord
    ) -> web.StreamResponse:
        asks = request.headers.get("Upgrade", "").lower() == "websocket"
        is_upgrade = (
            upgrade is not None
            and asks
            and request.path.split("/")[1] not in HTTP_PATHS
        )
        request = gateway.proxies.with_client(request)
        status = FAILED
        requests.active += not is_upgrade
        if tracer is not None and not is_upgrade:
            tracer.begin(record)
        try:
            if is_upgrade and upgrade is not None:
                handler = partial(_checked_upgrade, gateway, upgrade)
            elif asks:
                handler = partial(_without_upgrade, gateway, handler)
            elif request.method == "OPTIONS":
                preflight = gateway.pages.preflight_headers(request.headers)
                if preflight is not None:
                    status = NO_CONTENT
                    return web.Response(status=status, headers=preflight)
            try:
                response = await handler(request)
            except ShoalError as error:
                record.error = errors.error_status(error).code
                form = error_form(request.path)
                response = errors.error_response(error, form, record.id)
                release_frames(error)
            except web.HTTPException as error:
                record.error = errors.http_error_code(error)
                form = error_form(request.path)
                response = errors.http_error_response(request, error, form)
                release_frames(error)
            if not response.prepared:
                await _send(request, response)
            status = response.status
        except (asyncio.CancelledError, ConnectionError):
            status = CLIENT_CLOSED
            raise
        finally:
            requests.active -= not is_upgrade
            gateway.bodies.release(record)
            if record.upgraded:
                status = SWITCHING_PROTOCOLS
            now = gateway.clock.now()
            took, stranger = now - record.started_at, record.caller is None
            if not record.relayed:
                log_request(request, record, status, took, by_stranger=stranger)
            # A worker's upgrade lasts for days.
            if not (is_upgrade and record.upgraded) and not record.relayed:
                requests.add(answered_request(request, record, status, now))
            if tracer is not None and not stranger:
                tracer.end(request, record, status, took)
        return response

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        record = record_of(request)
        if response.status == SWITCHING_PROTOCOLS:
            record.upgraded = True
        headers = response.headers
        headers.update(record.headers)
        headers.update(gateway.pages.cors_headers(request.headers))
        headers.update(OWN_HEADERS)
        if (caller := record.caller) is not None:
            headers.update(caller.headers)
            if from_fronts:
                headers[ADMITTED] = "1"
            if caller.session is not None:
                headers.setdefault("Cache-Control", "no-store")

    app = web.Application(middlewares=[answer])
    app.on_response_prepare.append(add_headers)
    app.on_response_prepare.append(http_server.on_response)
    if routes is None:
        routes = [operation.route(gateway) for operation in operations]
    app.add_routes(routes)
    return app


async def _checked_upgrade(
    gateway: Gateway, upgrade: Handler, request: web.Request
) -> web.StreamResponse:
    """Let a protocol answer a WebSocket request.  Raises Forbidden for a web page's."""
    gateway.pages.check_upgrade(request.headers)
    return await upgrade(request)


async def _without_upgrade(
    gateway: Gateway, handler: Handler, request: web.Request
) -> web.StreamResponse:
    """Answer at a path of HTTP; 426 if what it has is not for GET.

    Clients that try a WebSocket first take that as the signal to continue without.
    """
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        await gateway.access.authorize(request, Scope.READ)
        methods = " or ".join(sorted(error.allowed_methods))
        raise web.HTTPUpgradeRequired(
            text=f"{request.path} is not a WebSocket: use {methods}",
            headers={"Upgrade": "HTTP/1.1"},
        ) from None


async def _send(request: web.Request, response: web.StreamResponse) -> None:
    # aiohttp would send it too, but without a timeout for clients that do not read.
    # A body that fits into the buffer of the connection needs no timeout.
    body = response.body if isinstance(response, web.Response) else None
    transport = request.transport
    at_once = (
        isinstance(body, bytes)
        and len(body) <= AT_ONCE_MAX
        and transport is not None
        and not transport.get_write_buffer_size()
    )
    try:
        if at_once:
            await _write(request, response)
        else:
            async with asyncio.timeout(RESPONSE_TIMEOUT):
                await _write(request, response)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # the client left; aiohttp notices by itself


async def _write(request: web.Request, response: web.StreamResponse) -> None:
    await response.prepare(request)
    await response.write_eof()
