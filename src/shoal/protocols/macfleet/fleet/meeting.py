"""The heartbeat's port, and how nodes of a fleet find it on the local network.

Source: the MacFleet document, "Discovery".
"""

from collections.abc import Iterator, Mapping
from functools import partial

from shoal.domain.errors import PeerError
from shoal.protocols.crowd import (
    Browser,
    CrowdSession,
    Listener,
    Outgoing,
    Security,
    Service,
    Sighting,
)
from shoal.protocols.macfleet.fleet.answering import PongSession
from shoal.protocols.macfleet.fleet.limiter import Limiter
from shoal.protocols.macfleet.fleet.own import Member
from shoal.protocols.macfleet.fleet.registry import Address, Fleet
from shoal.protocols.macfleet.wire.announcing import (
    read_text,
    write_secure_text,
    write_text,
)
from shoal.protocols.macfleet.wire.hardware import Profile
from shoal.protocols.macfleet.wire.keys import service_kind

LABEL = "heartbeat"
FLAG = "--macfleet-heartbeat-port"
SUBJECT = "macfleet-node"  # whose certificates are, in any fleet
TLS_WITHIN = 5.0  # seconds for the handshake of TLS; real callers leave after two
OURS = "shoal"  # in the TXT record of ours, which real nodes skip
VERSION = "1"  # of what ours announce


def heartbeat_listener(
    own: Member, limiter: Limiter, port: int, *, spare: bool = False
) -> Listener:
    """Return where heartbeats are answered; a ``spare`` port may be another."""

    def accept(address: str, now: float) -> CrowdSession:
        return PongSession(own, limiter, address)

    return Listener(
        port,
        accept,
        Service(service_kind(own.key), own.node_id, _Told(own)),
        security=Security.NONE if own.key is None else Security.OWN,
        label=LABEL,
        flag=FLAG,
        spare=spare,
        gate=limiter,
        handshake_within=TLS_WITHIN,
        subject=SUBJECT,
    )


def browser(own: Member, fleet: Fleet) -> Browser:
    """Return a look for other nodes of the fleet, if they can find us as well.

    Who is found is not called: it is asked for its heartbeat, in rounds.
    """
    return Browser(service_kind(own.key), partial(_meet, own, fleet), shy=True)


def _meet(own: Member, fleet: Fleet, sighting: Sighting, now: float) -> Outgoing | None:
    try:
        found = read_text(sighting)
    except PeerError:
        return None  # anybody can announce anything
    # What a node of a fleet with a token is made of, it says when it has shown the key.
    told = Profile(data_port=found.data_port) if own.key else found.profile
    addresses = [Address(host, sighting.port) for host in sighting.addresses]
    ours = OURS in sighting.text
    fleet.sighted(found.node_id, addresses, told, now, ours=ours)
    return None


class _Told(Mapping[str, str]):
    """What a node's TXT record says, as it is when it is announced."""

    def __init__(self, own: Member) -> None:
        self._own = own

    def __getitem__(self, key: str) -> str:
        return self._now()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def _now(self) -> Mapping[str, str]:
        own, profile = self._own, self._own.profile()
        if own.key is None:
            told = write_text(own.node_id, profile, profile.data_port)
        else:
            told = write_secure_text(own.node_id, profile.data_port)
        return {**told, OURS: VERSION}
