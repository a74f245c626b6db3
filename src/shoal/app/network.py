"""Opens all connections but HTTP: listeners, outbound connections, discovery."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from shoal.app.discovery import AnnouncedService, LocalDiscovery
from shoal.coordinator.admission import WorkerAdmission
from shoal.domain.errors import ConfigError, TooManyFailures
from shoal.peers.discovered_peers import DiscoveredPeers
from shoal.peers.membership import MembershipRunner
from shoal.peers.outbound import FixedTarget, OutboundConnections
from shoal.peers.relay import ServeSession
from shoal.protocols.seam.endpoints import (
    Listener,
    ListenerTls,
    MembershipProber,
    OutgoingConnection,
    ServiceBrowser,
)
from shoal.protocols.seam.protocol import Endpoint
from shoal.transports.clock import Clock
from shoal.transports.dialer import dial
from shoal.transports.mdns import addresses_of
from shoal.transports.tcp import TcpLink
from shoal.transports.tcp_server import BoundAddress, ConnectionPolicy, tcp_listener
from shoal.transports.tls import ServerTls, self_signed_tls

CLOSE_TIMEOUT = 3.0  # seconds for outbound connections to end

PortsByWire: TypeAlias = Mapping[str, Mapping[str, int]]
"""Ports by wire, and by ``Listener.advertised_label``."""

log = logging.getLogger("shoal.app")


@dataclass(frozen=True, slots=True)
class NetworkContext:
    """What opening the coordinator's ports and connections takes.

    ``tls`` is for listeners with the coordinator's certificate; without it such
    listeners are not opened.  ``addresses`` returns the addresses at which others reach
    a listener's address.  ``hidden`` turns announcements and browsing off.
    """

    serve: ServeSession
    admission: WorkerAdmission
    clock: Clock
    random: Random
    host: str
    tls: ServerTls | None = None
    hidden: bool = False
    addresses: Callable[[str], tuple[str, ...]] = addresses_of


@asynccontextmanager
async def open_network(
    endpoints: Sequence[tuple[str, Endpoint]], means: NetworkContext
) -> AsyncIterator[PortsByWire]:
    """Serve all endpoints but WebSocket routes for the length of the block.

    Each endpoint comes with its wire's name.  At the end of the block, connections get
    ``CLOSE_TIMEOUT`` to end: disconnect them before.

    Raises ConfigError if a port cannot be opened.
    """
    ports: dict[str, dict[str, int]] = {}
    announced: list[AnnouncedService] = []
    spares: list[str] = []
    async with AsyncExitStack() as listening:
        for wire, endpoint in endpoints:
            if not isinstance(endpoint, Listener):
                continue
            if endpoint.security is ListenerTls.COORDINATOR and means.tls is None:
                continue
            bound = await listening.enter_async_context(_listen(wire, endpoint, means))
            ports.setdefault(wire, {})[endpoint.advertised_label] = bound.port
            endpoint.on_bound(bound.port)
            if endpoint.port not in (0, bound.port):
                spares.append(f"{bound.port} for {endpoint.port}")
            if endpoint.service is not None and not means.hidden:
                announced.append(AnnouncedService(wire, endpoint.service, bound))
        if spares:
            log.info("ports are in use, so others are taken: %s", ", ".join(spares))
        async with _outbound(endpoints, announced, means):
            yield ports


@asynccontextmanager
async def _listen(
    wire: str, listener: Listener, means: NetworkContext
) -> AsyncIterator[BoundAddress]:
    async def serve(link: TcpLink) -> None:
        try:
            means.admission.check(link.peer)
        except TooManyFailures as error:
            log.info("refused wire=%s peer=%s reason=%r", wire, link.peer, str(error))
            listener.gate.failed(link.peer, means.clock.now())
            return
        await means.serve(wire, listener.accept(link.peer, means.clock.now()), link)

    tls = None
    if listener.security is ListenerTls.COORDINATOR:
        tls = means.tls
    elif listener.security is ListenerTls.SELF_SIGNED:
        tls = await asyncio.to_thread(self_signed_tls, listener.subject)
    gate, within = listener.gate, listener.tls_timeout
    entrance = ConnectionPolicy(tls, gate, within, means.clock.now)
    async with AsyncExitStack() as opened:
        try:
            bound = await opened.enter_async_context(
                tcp_listener(
                    *(means.host, listener.port, serve, entrance),
                    spare=listener.falls_back,
                )
            )
        except ConfigError as error:
            raise ConfigError(
                f"{error}; choose another {listener.flag or f'--{wire}-port'} (0 lets "
                "the system choose)"
            ) from error
        yield bound


@asynccontextmanager
async def _outbound(
    endpoints: Sequence[tuple[str, Endpoint]],
    announced: Sequence[AnnouncedService],
    means: NetworkContext,
) -> AsyncIterator[None]:
    """Keep up connections, announce and look for the length of the block."""
    calls = OutboundConnections(means.serve, dial, means.clock, means.random)
    async with asyncio.TaskGroup() as tasks:
        callers = {
            tasks.create_task(calls.maintain(wire, FixedTarget(endpoint)))
            for wire, endpoint in endpoints
            if isinstance(endpoint, OutgoingConnection)
        }
        meetings = [
            DiscoveredPeers(wire, endpoint, calls, tasks)
            for wire, endpoint in endpoints
            if isinstance(endpoint, ServiceBrowser) and not means.hidden
        ]
        rounds = [
            MembershipRunner(wire, endpoint, calls, dial, means.clock, tasks)
            for wire, endpoint in endpoints
            if isinstance(endpoint, MembershipProber)
        ]
        walking = [tasks.create_task(each.run()) for each in rounds]
        around = LocalDiscovery(announced, meetings, means.addresses)
        looking = tasks.create_task(around.run())
        patience = 0.0  # if this is cut off
        try:
            yield
            patience = CLOSE_TIMEOUT
        finally:
            calls.stop()
            for task in (looking, *walking):
                task.cancel()
            callers = callers.union(
                *(each.connections for each in meetings),
                *(each.connections for each in rounds),
            )
            if callers:
                await asyncio.wait(callers, timeout=patience)
            for caller in callers:
                caller.cancel()
