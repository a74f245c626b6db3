"""Opens all connections but HTTP: listeners, outbound connections, discovery."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeAlias

from shoal.domain.errors import ConfigError, Unavailable
from shoal.peers.membership import MembershipRunner
from shoal.peers.outbound import DiscoveredPeers, FixedTarget, OutboundConnections
from shoal.peers.relay import ServeSession
from shoal.protocols.seam.admission import Throttle
from shoal.protocols.seam.endpoints import (
    TLS_KEY,
    Listener,
    ListenerTls,
    MembershipProber,
    OutgoingConnection,
    ServiceBrowser,
    ServiceRecord,
    WebSocketRoute,
)
from shoal.protocols.seam.protocol import Endpoint
from shoal.transports.acceptor import BoundAddress
from shoal.transports.clock import Clock
from shoal.transports.dialer import dial
from shoal.transports.mdns import LocalNetwork, addresses_of, local_network
from shoal.transports.strangers import BY_STRANGER, Strangers
from shoal.transports.tcp import TcpLink
from shoal.transports.tcp_server import ConnectionPolicy, tcp_listener
from shoal.transports.tls import ServerTls, self_signed_tls

CLOSE_TIMEOUT = 3.0  # seconds for outbound connections to end

PortsByWire: TypeAlias = Mapping[str, Mapping[str, int]]
"""Ports by wire, and by ``Listener.advertised_label``."""

WILDCARD_ADDRESSES = ("0.0.0.0", "::")
CHECK_INTERVAL = 10.0  # seconds between looks whether this machine is on other networks
RETRY_AFTER = 30.0  # seconds until it is tried again where there is no multicast

log = logging.getLogger("shoal.app")


@dataclass(frozen=True, slots=True)
class AnnouncedService:
    """A service, and where it listens."""

    wire: str
    service: ServiceRecord
    bound: BoundAddress


class LocalDiscovery:
    """Announces this coordinator's services, and browses for other services.

    ``addresses`` returns the addresses at which others reach a listener's address; a
    listener without any is not announced.
    """

    def __init__(
        self,
        announced: Sequence[AnnouncedService],
        discovered: Sequence[DiscoveredPeers],
        addresses: Callable[[str], tuple[str, ...]],
    ) -> None:
        self._announced = announced
        self._addresses = addresses
        reachable = any(self._is_reachable(each.bound) for each in announced)
        self._discovered = [
            each for each in discovered if reachable or not each.browser.reciprocal
        ]
        self._warned = False  # that mDNS is unavailable, once

    async def run(self) -> None:
        """Announce and browse until cancelled; restart when the addresses change.

        Returns if there is nothing to announce and nothing to browse for.
        """
        while True:
            addresses = self._listen_addresses()
            if not addresses and not self._discovered and self._hidden:
                return
            try:
                await self._run_once(addresses)
            except Unavailable as error:
                self._warn_unavailable(error)
                await asyncio.sleep(RETRY_AFTER)
            finally:
                for each in self._discovered:
                    each.on_all_lost()

    @property
    def _hidden(self) -> bool:
        """Whether all that is announced listens where others never find it."""
        return all(
            each.bound.address not in WILDCARD_ADDRESSES for each in self._announced
        )

    def _is_reachable(self, bound: BoundAddress) -> bool:
        return bound.address in WILDCARD_ADDRESSES or bool(
            self._addresses(bound.address)
        )

    def _listen_addresses(self) -> tuple[str, ...]:
        """Return the addresses whose networks we take part in."""
        listening = {
            address
            for each in self._announced
            for address in self._addresses(each.bound.address)
        }
        if not listening and self._discovered:
            return self._addresses(WILDCARD_ADDRESSES[0])  # only to look
        return tuple(sorted(listening))

    async def _run_once(self, addresses: tuple[str, ...]) -> None:
        """Take part until the addresses change.  Raises Unavailable."""
        async with local_network(addresses) as network, AsyncExitStack() as browsing:
            for each in self._discovered:
                browser = network.browse(each.browser.kind, each.on_found, each.on_lost)
                await browsing.enter_async_context(browser)
            for service in self._announced:
                if self._addresses(service.bound.address):
                    await _announce(network, service, addresses)
            self._warned = False
            while self._listen_addresses() == addresses:  # noqa: ASYNC110  # no event
                await asyncio.sleep(CHECK_INTERVAL)

    def _warn_unavailable(self, error: Unavailable) -> None:
        if self._warned:
            return
        self._warned = True
        wires = {each.wire for each in self._announced}
        wires |= {each.wire for each in self._discovered}
        flags = " or ".join(f"--{wire}-peers HOST:PORT" for wire in sorted(wires))
        log.warning(
            "cannot discover peers on the local network: %s; use %s", error, flags
        )


async def _announce(
    network: LocalNetwork, service: AnnouncedService, addresses: tuple[str, ...]
) -> None:
    name = await network.announce(service.service, service.bound.port)
    log.info(
        "announced wire=%s name=%r addresses=%s port=%d",
        service.wire,
        name,
        ",".join(addresses),
        service.bound.port,
    )


@dataclass(frozen=True, slots=True)
class NetworkContext:
    """The means to open the ports and connections of a coordinator or a worker.

    ``throttle`` refuses addresses that presented too many wrong secrets.  ``tls`` is
    for listeners with the coordinator's certificate; without it such listeners are not
    opened.
    ``addresses`` returns the addresses at which others reach a listener's address.
    ``hidden`` turns announcements and browsing off, and ``http`` is where HTTP is
    served, if it is.  Each peer is one of ``strangers`` until it is admitted.
    """

    serve: ServeSession
    throttle: Throttle
    clock: Clock
    random: Random
    host: str
    tls: ServerTls | None = None
    hidden: bool = False
    http: BoundAddress | None = None
    addresses: Callable[[str], tuple[str, ...]] = addresses_of
    strangers: Strangers = field(default_factory=Strangers)


@asynccontextmanager
async def open_network(
    endpoints: Sequence[tuple[str, Endpoint]], context: NetworkContext
) -> AsyncIterator[PortsByWire]:
    """Serve all endpoints but WebSocket routes for the length of the block.

    Each endpoint comes with its wire's name.  At the end of the block, connections get
    ``CLOSE_TIMEOUT`` to end: disconnect them before.

    Raises ConfigError if a port cannot be opened.
    """
    ports: dict[str, dict[str, int]] = {}
    announced: list[AnnouncedService] = []
    fallbacks: list[str] = []
    async with AsyncExitStack() as listening:
        for wire, endpoint in endpoints:
            if isinstance(endpoint, WebSocketRoute) and endpoint.service is not None:
                announced += _over_http(wire, endpoint.service, context)
            if not isinstance(endpoint, Listener):
                continue
            if endpoint.security is ListenerTls.COORDINATOR and context.tls is None:
                continue
            bound = await listening.enter_async_context(
                _listen(wire, endpoint, context)
            )
            ports.setdefault(wire, {})[endpoint.advertised_label] = bound.port
            endpoint.on_bound(bound.port)
            if endpoint.port not in (0, bound.port):
                fallbacks.append(f"{bound.port} for {endpoint.port}")
            if endpoint.service is not None and not context.hidden:
                announced.append(AnnouncedService(wire, endpoint.service, bound))
        if fallbacks:
            log.info("ports are in use, listening on others: %s", ", ".join(fallbacks))
        async with _outbound(endpoints, announced, context):
            yield ports


def _over_http(
    wire: str, service: ServiceRecord, context: NetworkContext
) -> Sequence[AnnouncedService]:
    """Return the announcement of a service that is reached over HTTP."""
    if context.http is None or context.hidden:
        return ()
    if context.tls is not None:
        service = replace(service, text={**service.text, TLS_KEY: "1"})
    return (AnnouncedService(wire, service, context.http),)


@asynccontextmanager
async def _listen(
    wire: str, listener: Listener, context: NetworkContext
) -> AsyncIterator[BoundAddress]:
    async def serve(link: TcpLink) -> None:
        try:
            context.throttle.check(link.peer)
        except Unavailable as error:
            refused = "refused wire=%s peer=%s reason=%r"
            log.info(refused, wire, link.peer, str(error), extra=BY_STRANGER)
            listener.gate.failed(link.peer, context.clock.now())
            return
        await context.serve(wire, listener.accept(link.peer, context.clock.now()), link)

    tls = None
    if listener.security is ListenerTls.COORDINATOR:
        tls = context.tls
    elif listener.security is ListenerTls.SELF_SIGNED:
        tls = await asyncio.to_thread(self_signed_tls, listener.subject)
    gate, tls_timeout = listener.gate, listener.tls_timeout
    policy = ConnectionPolicy(
        tls, gate, tls_timeout, context.clock.now, context.strangers
    )
    async with AsyncExitStack() as opened:
        try:
            bound = await opened.enter_async_context(
                tcp_listener(
                    *(context.host, listener.port, serve, policy),
                    fallback=listener.falls_back,
                )
            )
        except ConfigError as error:
            raise ConfigError(
                f"{error}; choose another {listener.flag or f'--{wire}-port'} (0 lets "
                "the system choose) or host to listen on"
            ) from error
        yield bound


@asynccontextmanager
async def _outbound(
    endpoints: Sequence[tuple[str, Endpoint]],
    announced: Sequence[AnnouncedService],
    context: NetworkContext,
) -> AsyncIterator[None]:
    """Keep up connections, announce and look for the length of the block."""
    connections = OutboundConnections(
        context.serve, dial, context.clock, context.random
    )
    async with asyncio.TaskGroup() as tasks:
        callers = {
            tasks.create_task(connections.maintain(wire, FixedTarget(endpoint)))
            for wire, endpoint in endpoints
            if isinstance(endpoint, OutgoingConnection)
        }
        discovered = [
            DiscoveredPeers(wire, endpoint, connections, tasks)
            for wire, endpoint in endpoints
            if isinstance(endpoint, ServiceBrowser) and not context.hidden
        ]
        runners = [
            MembershipRunner(wire, endpoint, connections, dial, context.clock, tasks)
            for wire, endpoint in endpoints
            if isinstance(endpoint, MembershipProber)
        ]
        probing = [tasks.create_task(each.run()) for each in runners]
        discovery = LocalDiscovery(announced, discovered, context.addresses)
        discovering = tasks.create_task(discovery.run())
        patience = 0.0  # if this is cut off
        try:
            yield
            patience = CLOSE_TIMEOUT
        finally:
            connections.stop()
            for task in (discovering, *probing):
                task.cancel()
            callers = callers.union(
                *(each.connections for each in discovered),
                *(each.connections for each in runners),
            )
            if callers:
                await asyncio.wait(callers, timeout=patience)
            for caller in callers:
                caller.cancel()
