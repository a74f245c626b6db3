"""Opens a worker's ports for the coordinators that dial it, and dials others."""

import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random

from shoal.app.network import NetworkContext, open_network
from shoal.config.loader import check_secret
from shoal.domain.addresses import is_own_host
from shoal.domain.errors import NotAdmitted
from shoal.domain.worker import Hardware
from shoal.ledger.keys import Signer, verify
from shoal.peers.relay import ServeSession
from shoal.protocols import discover
from shoal.protocols.seam import admission
from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.endpoints import bare_label
from shoal.protocols.seam.peer_addresses import PeerAddress
from shoal.protocols.seam.protocol import AnyWireProtocol, Endpoint
from shoal.transports.clock import LoopClock

log = logging.getLogger("shoal.app")


def listening_wires() -> Mapping[str, AnyWireProtocol]:
    """Return the wires on which coordinators dial workers."""
    return {
        name: each
        for name, each in discover().items()
        if each.worker_endpoints is not None
    }


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """A worker's ports on one wire.

    ``settings`` is the wire's configuration.  ``token`` admits coordinators; empty:
    all.  ``contact`` is HOST:PORT of a coordinator to dial; empty: only those that are
    found.

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
        async with open_network(endpoints, network) as ports:
            labelled = ports.get(wire, {}).items()
            yield {bare_label(label): port for label, port in labelled}

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
            warn=partial(log.warning, "wire=%s %s", self.protocol.name),
            peer_addresses=(PeerAddress(self.contact),) if self.contact else (),
        )
        return self.protocol.worker_endpoints(self.settings, context)


def _admission(token: str) -> admission.AdmissionCheck:
    """Return the check that admits holders of a token; all, if it is empty."""

    def admit(request: admission.JoinRequest) -> admission.AdmissionGrant:
        if not admission.proves_token(request.token, token):
            raise NotAdmitted(admission.WRONG_TOKEN)
        return admission.NO_JOIN_TOKEN

    return admit
