"""Routes each WebSocket connection to the protocol that claims it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from shoal.domain.errors import PeerError, Refused
from shoal.models.bulk_connection import BulkSenders
from shoal.peers.relay import RelayRunner, ServeSession, run_relay_member
from shoal.protocols.seam.admission import AdmissionGrant
from shoal.protocols.seam.endpoints import BulkRoute, UpgradeRequest, WebSocketRoute
from shoal.protocols.seam.protocol import Endpoint
from shoal.protocols.seam.relay import RelayRoute
from shoal.protocols.seam.session import CloseCode
from shoal.transports import websocket
from shoal.transports.clock import Clock
from shoal.transports.link_encryption import encrypt_accepted
from shoal.transports.strangers import BY_STRANGER, Strangers
from shoal.transports.websocket import WebSocketLink

CLOSE_TIMEOUT = 3.0  # seconds that connections get to close
RELAYED_IDLE_MAX = 120.0  # seconds that a relayed connection may be idle
BULK_REQUEST_MAX = 1024  # bytes of a message on a bulk connection, which has none
STOPPING = "the coordinator is stopping"

log = logging.getLogger("shoal.app")


class UpgradeAdmission(Protocol):
    """Whether an address may open WebSockets; see ``WorkerAdmission``."""

    def check(self, address: str) -> None:
        """Raise Unavailable if an address has presented too many wrong secrets."""

    async def record_use(self, grant: AdmissionGrant) -> None:
        """Store that a join token was used.  Raises StoreError."""


class WebSocketRouter:
    """Serves all WebSocket connections, from the opening request to the end.

    Args:
        endpoints: all endpoints, each with its wire's name; only routes are used.
        serve: runs a session over its link until the connection ends.
        strangers: the unauthenticated connections of all ports.
        bulk: the bulk connections that were offered.
    """

    def __init__(
        self,
        clock: Clock,
        admission: UpgradeAdmission,
        endpoints: Iterable[tuple[str, Endpoint]],
        serve: ServeSession,
        strangers: Strangers,
        bulk: BulkSenders | None = None,
    ) -> None:
        self._bulk = bulk or BulkSenders()
        self._clock = clock
        self._strangers = strangers
        self._admission = admission
        self._serve = serve
        self._tasks: asyncio.TaskGroup | None = None
        self._serving: set[asyncio.Task[object]] = set()
        self._relay_members: list[asyncio.Task[None]] = []
        self._routes = sorted(
            [
                (wire, endpoint)
                for wire, endpoint in endpoints
                if isinstance(endpoint, WebSocketRoute | BulkRoute | RelayRoute)
            ],
            key=lambda route: route[1].rank,
        )
        # By index in `_routes`, because routes need not be hashable.
        self._relays = {
            place: RelayRunner(wire, route.relay, clock, strangers)
            for place, (wire, route) in enumerate(self._routes)
            if isinstance(route, RelayRoute)
        }

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Accept connections from now on, each served by a task in ``tasks``."""
        self._tasks = tasks
        for place, relay in self._relays.items():
            wire, route = self._routes[place]
            assert isinstance(route, RelayRoute), "only relay routes have runners"
            if route.local_member is not None:
                own = run_relay_member(
                    relay, wire, route.local_member, self._serve, self._clock
                )
                self._relay_members.append(tasks.create_task(own))

    async def close(self) -> None:
        """Accept no more connections, and give open ones time to close."""
        self._tasks = None
        for member in self._relay_members:
            member.cancel()
        for relay in self._relays.values():
            relay.disconnect_all(STOPPING)
        if self._serving:
            await asyncio.wait(self._serving, timeout=CLOSE_TIMEOUT)
        for serving in self._serving:
            serving.cancel()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Handle a request that opens a WebSocket.

        Raises TooManyFailures, StoreError, or an HTTPException.
        """
        if self._tasks is None:
            raise web.HTTPServiceUnavailable(text=f"{STOPPING}\n")
        address = request.remote or ""
        self._admission.check(address)
        path, _, query = request.raw_path.partition("?")
        headers = {name.lower(): value for name, value in request.headers.items()}
        hello = UpgradeRequest(path, query, headers, address)
        for place, (wire, route) in enumerate(self._routes):
            if not route.claims(hello):
                continue
            if isinstance(route, WebSocketRoute):
                return await self._accept(request, hello, wire, route, self._tasks)
            if isinstance(route, BulkRoute):
                return await self._serve_bulk(request, query, self._tasks)
            relay = self._relays[place]
            return await self._relay(request, hello, route, relay, self._tasks)
        raise web.HTTPNotFound(text="no worker protocol answers at this address\n")

    async def _accept(
        self,
        request: web.Request,
        hello: UpgradeRequest,
        wire: str,
        route: WebSocketRoute,
        tasks: asyncio.TaskGroup,
    ) -> web.StreamResponse:
        try:
            accepted = route.accept(hello, self._clock.now())
        except Refused as refused:
            # Browsers and most clients expose the close code, but not the HTTP status.
            link, response = await websocket.accept(
                request, {}, route.message_max, self._strangers
            )
            await link.close(refused.code, str(refused))
            message = "refused wire=%s peer=%s reason=%r"
            log.warning(message, wire, link.peer, str(refused), extra=BY_STRANGER)
            return response
        # Before the response, so that a client gets an HTTP error if the store fails.
        await self._admission.record_use(accepted.grant)
        link, response = await websocket.accept(
            request,
            accepted.headers,
            route.message_max,
            self._strangers,
            route.idle_max,
        )
        serve: Callable[[], Coroutine[Any, Any, object]] = partial(
            self._serve, wire, accepted.session, link
        )
        if route.encrypts:
            serve = partial(self._serve_encrypted, wire, serve, link)
        await self._run_in_task(serve, link, tasks)
        return response

    async def _serve_encrypted(
        self,
        wire: str,
        serve: Callable[[], Coroutine[Any, Any, object]],
        link: WebSocketLink,
    ) -> None:
        """Serve a link whose peer may encrypt it first."""
        try:
            await encrypt_accepted(link)
        except PeerError as error:
            reason = str(error)
            refused = "refused wire=%s peer=%s reason=%r"
            log.info(refused, wire, link.peer, reason, extra=BY_STRANGER)
            await link.close(CloseCode.PROTOCOL_ERROR, reason)
            return
        await serve()

    async def _serve_bulk(
        self, request: web.Request, name: str, tasks: asyncio.TaskGroup
    ) -> web.StreamResponse:
        """Serve a bulk connection.  Raises HTTPNotFound if it was not offered."""
        if (sender := self._bulk.open(name)) is None:
            raise web.HTTPNotFound(text="no such connection was offered\n")
        link, response = await websocket.accept(
            request, {}, BULK_REQUEST_MAX, self._strangers
        )
        await self._run_in_task(partial(sender.serve, link), link, tasks)
        return response

    async def _relay(
        self,
        request: web.Request,
        hello: UpgradeRequest,
        route: RelayRoute,
        switching: RelayRunner,
        tasks: asyncio.TaskGroup,
    ) -> web.StreamResponse:
        link, response = await websocket.accept(
            request, {}, route.message_max, self._strangers, RELAYED_IDLE_MAX
        )
        await self._run_in_task(partial(switching.serve, link, hello), link, tasks)
        return response

    async def _run_in_task(
        self,
        serve: Callable[[], Coroutine[Any, Any, object]],
        link: WebSocketLink,
        tasks: asyncio.TaskGroup,
    ) -> None:
        # In a separate task, because aiohttp cancels a handler whose connection is
        # lost, before the peer's last messages are read.
        metered = self._strangers.meter(serve, link.charge)
        try:
            serving = tasks.create_task(metered)
        except RuntimeError:  # one of them has failed, as where another took over
            metered.close()
            await link.close(CloseCode.GOING_AWAY, STOPPING)
            return
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        await asyncio.shield(serving)
