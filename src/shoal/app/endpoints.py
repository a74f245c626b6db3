"""Collects the endpoints of all protocols."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from shoal.coordinator.admission import WorkerAdmission
from shoal.domain.worker import UNKNOWN_HARDWARE, Hardware
from shoal.ledger.keys import verify
from shoal.protocols import discover
from shoal.protocols.seam.context import Identity, ProtocolContext
from shoal.protocols.seam.peer_addresses import PeerAddress
from shoal.protocols.seam.protocol import Endpoint
from shoal.transports.clock import Clock

log = logging.getLogger("shoal.app")


def make_endpoints(
    clock: Clock,
    workers: WorkerAdmission,
    wires: Mapping[str, object],
    token: str,
    identity: Identity,
    draw: Callable[[int], bytes],
    name: str = "shoal",
    hardware: Hardware = UNKNOWN_HARDWARE,
    contacts: Sequence[PeerAddress] = (),
    registered_at: float | None = None,
    *,
    relay_open: bool = False,
    plain: bool = False,
) -> list[tuple[str, Endpoint]]:
    """Return each endpoint with its wire's name.

    ``wires`` holds protocols' configurations by name.  ``token`` admits Shoal's workers
    on every wire, beside the token that its configuration has.  ``name`` and
    ``hardware`` are this machine's.
    ``contacts`` are peers that may speak any of them.  ``registered_at``,
    ``relay_open`` and ``plain`` are as in ``ProtocolContext``.
    """
    epoch = clock.wall() - clock.now()
    found: list[tuple[str, Endpoint]] = []
    for wire, protocol in discover().items():
        config = wires.get(wire) or protocol.config()
        admission = workers.policy_for(wire, protocol.token(config), token)
        setting = ProtocolContext(
            *(admission, draw, identity, verify, epoch, name, hardware, workers),
            token=token,
            warn=partial(log.warning, "wire=%s %s", wire),
            peer_addresses=contacts,
            registered_at=registered_at,
            relay_open=relay_open,
            plain=plain,
            # Not the present ones: the others come and go.
            addresses=lambda: workers.addresses(),
        )
        found += [(wire, each) for each in protocol.endpoints(config, setting)]
    return found


def plain_peers(
    wires: Mapping[str, object], *, tls: bool, anyone: bool
) -> Mapping[str, str]:
    """Return the peers whose connections are not encrypted, by their wire's name.

    ``wires`` holds protocols' configurations by name; ``tls``: the HTTP port has it;
    ``anyone``: peers without a credential of their protocol may be admitted.
    """
    described = {
        wire: protocol.plain_peers(wires.get(wire) or protocol.config(), tls, anyone)
        for wire, protocol in discover().items()
    }
    return {wire: peers for wire, peers in described.items() if peers}


def anonymous_http(wires: Mapping[str, object]) -> frozenset[str]:
    """Return the wires whose own HTTP API asks its clients for no key.

    ``wires`` holds protocols' configurations by name.
    """
    return frozenset(
        wire
        for wire, protocol in discover().items()
        if protocol.anonymous_http is not None
        and protocol.anonymous_http(wires.get(wire) or protocol.config())
    )
