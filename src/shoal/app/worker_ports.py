"""Opens a worker's ports for the coordinators that dial it, and dials others."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random

from aiohttp import web

from shoal.app.network import NetworkContext, open_network
from shoal.app.websocket_router import WebSocketRouter
from shoal.config.loader import check_secret
from shoal.domain.addresses import is_own_host
from shoal.domain.errors import NotAdmitted
from shoal.domain.worker import Hardware
from shoal.ledger.keys import Signer, verify
from shoal.peers.relay import ServeSession
from shoal.protocols import discover
from shoal.protocols.seam import admission
from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.endpoints import WebSocketRoute, bare_label
from shoal.protocols.seam.peer_addresses import PeerAddress
from shoal.protocols.seam.protocol import AnyWireProtocol, Endpoint
from shoal.transports.clock import LoopClock
from shoal.transports.http_server import http_listener
from shoal.transports.strangers import bounded_strangers

log = logging.getLogger("shoal.app")


def listening_wires() -> Mapping[str, AnyWireProtocol]:
    """Return the wires on which coordinators dial workers."""
    return {
        name: each
        for name, each in discover().items()
        if each.worker_endpoints is not None
    }


def fleet_wires() -> Mapping[str, AnyWireProtocol]:
    """Return those of them on which coordinators and workers form a fleet."""
    return {
        name: each
        for name, each in listening_wires().items()
        if each.fleets is not None
    }


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """A worker's ports on one wire.

    ``settings`` is the wire's configuration.  ``token`` admits coordinators; empty:
    all.  ``contact`` is HOST:PORT of a coordinator to dial; empty: only those that are
    found.  ``http_port`` is that of wires which use HTTP.

    Raises ConfigError from the constructor if a setting is invalid.
    """

    protocol: AnyWireProtocol
    settings: object
    host: str
    token: str
    contact: str
    name: str
    hardware: Hardware
    signer: Signer
    http_port: int = 0
    plain: bool = False

    def __post_init__(self) -> None:
        if self.token and not is_own_host(self.host):
            check_secret("the fleet's token", self.token)
        self._endpoints()

    @asynccontextmanager
    async def open(self, serve: ServeSession) -> AsyncIterator[Mapping[str, int]]:
        """Open the ports for the length of the block; yield them by label.

        Raises ConfigError if a port cannot be opened.
        """
        wire = self.protocol.name
        if not self.token and not is_own_host(self.host):
            log.warning(
                "wire=%s any machine that reaches this one can submit jobs: the fleet "
                "has no token",
                wire,
            )
        network = NetworkContext(
            serve, admission.NoThrottle(), LoopClock(), Random(), self.host
        )
        endpoints = [(wire, each) for each in self._endpoints()]
        async with (
            open_network(endpoints, network) as ports,
            self._over_http(endpoints, serve) as over_http,
        ):
            labelled = ports.get(wire, {}).items()
            yield over_http | {bare_label(label): port for label, port in labelled}

    @asynccontextmanager
    async def _over_http(
        self, endpoints: Sequence[tuple[str, Endpoint]], serve: ServeSession
    ) -> AsyncIterator[dict[str, int]]:
        """Open the port for WebSockets, if the wire has any; yield it by its label.

        Raises ConfigError if it cannot be opened.
        """
        if not any(isinstance(each, WebSocketRoute) for _, each in endpoints):
            yield {}
            return
        where = self.host, self.http_port
        async with websocket_port(
            endpoints, *where, serve, flag="--listen-port"
        ) as port:
            yield {"http": port}

    def _endpoints(self) -> Sequence[Endpoint]:
        assert self.protocol.worker_endpoints is not None, "it is a listening wire"
        clock = LoopClock()
        context = ProtocolContext(
            _admission(self.token),
            secrets.token_bytes,
            self.signer,
            verify,
            clock.wall() - clock.now(),
            self.name,
            self.hardware,
            token=self.token,
            plain=self.plain,
            warn=partial(log.warning, "wire=%s %s", self.protocol.name),
            peer_addresses=(PeerAddress(self.contact),) if self.contact else (),
        )
        return self.protocol.worker_endpoints(self.settings, context)


@asynccontextmanager
async def websocket_port(
    endpoints: Sequence[tuple[str, Endpoint]],
    host: str,
    port: int,
    serve: ServeSession,
    *,
    flag: str,
) -> AsyncIterator[int]:
    """Open a port for the WebSockets of endpoints, for a block; yield its number.

    Raises ConfigError if it cannot be opened; ``flag`` is the setting to change then.
    """
    clock = LoopClock()
    strangers = bounded_strangers(clock)
    router = WebSocketRouter(clock, _NoRecords(), endpoints, serve, strangers)
    app = web.Application()
    app.router.add_get("/{path:.*}", router.handle)
    async with (
        http_listener(*(app, host, port, None, strangers), flag=flag) as bound,
        asyncio.TaskGroup() as tasks,
    ):
        router.open(tasks)
        try:
            yield bound.port
        finally:
            await router.close()


class _NoRecords(admission.NoThrottle):
    """The admission of a worker, which checks its token itself."""

    async def record_use(self, grant: admission.AdmissionGrant) -> None:
        pass


def _admission(token: str) -> admission.AdmissionCheck:
    """Return the check that admits holders of a token; all, if it is empty."""

    def admit(request: admission.JoinRequest) -> admission.AdmissionGrant:
        if not admission.proves_token(request.token, token):
            raise NotAdmitted(admission.WRONG_TOKEN)
        return admission.NO_JOIN_TOKEN

    return admit
