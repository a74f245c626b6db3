"""The port at which a machine that fetches a model sends what it has of it."""

import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from urllib.parse import urlsplit

from shoal.app.worker_ports import websocket_port
from shoal.domain.errors import NotAdmitted, ShoalError
from shoal.ledger.keys import Signer, verify
from shoal.models.peer_connection import WEB
from shoal.models.seed_server import OpenPort
from shoal.peers.relay import ServeSession
from shoal.protocols import own_wire
from shoal.protocols.seam import admission
from shoal.protocols.seam.context import ProtocolContext
from shoal.transports.clock import LoopClock


def port_towards(url: str) -> OpenPort | None:
    """Return what opens a port at the address of this machine that faces a coordinator.

    None: it is a peer of another program, or there is no way to it.
    """
    if urlsplit(url).scheme not in WEB:
        return None
    host = address_towards(url)
    return partial(model_port, host) if host else None


def address_towards(url: str) -> str:
    """Return the address of this machine on the way to a URL; empty: there is none."""
    try:
        parts = urlsplit(url)
        found = socket.getaddrinfo(
            parts.hostname, parts.port or 1, type=socket.SOCK_DGRAM
        )
        family, kind, protocol, _, where = found[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return ""


@asynccontextmanager
async def model_port(
    host: str, passcode: str, serve: ServeSession
) -> AsyncIterator[str]:
    """Open a port at an address of this machine for a block; yield its URL.

    Peers have to prove the passcode.

    Raises ConfigError if it cannot be opened.
    """
    protocol = own_wire()
    clock = LoopClock()
    signer = Signer.from_seed(secrets.token_bytes(32))
    context = ProtocolContext(
        _refuse,
        secrets.token_bytes,
        signer,
        verify,
        clock.wall() - clock.now(),
        f"models-{signer.public_key.hex()[:8]}",
    )
    endpoints = protocol.endpoints(protocol.config(passcode=passcode), context)
    named = [(protocol.name, each) for each in endpoints]
    failed: ShoalError | None = None
    async with websocket_port(named, host, 0, serve, flag="--from") as port:
        named_host = f"[{host}]" if ":" in host else host
        try:
            yield f"http://{named_host}:{port}"
        except ShoalError as error:
            failed = error  # the port's task group would wrap it
    if failed is not None:
        raise failed


def _refuse(request: admission.JoinRequest) -> admission.AdmissionGrant:
    raise NotAdmitted(admission.WRONG_TOKEN)
