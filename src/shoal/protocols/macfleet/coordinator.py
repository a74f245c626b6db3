"""A coordinator's part in a fleet: where it listens, whom it looks for and calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from shoal.domain.credentials import digest_of
from shoal.domain.errors import ConfigError
from shoal.domain.worker import Hardware
from shoal.protocols import Endpoint
from shoal.protocols.crowd import (
    CrowdSession,
    Listener,
    Outgoing,
    Protection,
    Security,
)
from shoal.protocols.macfleet.addresses import TRANSPORT, contact, transport_url
from shoal.protocols.macfleet.config import (
    HEARTBEAT_PORT,
    TRANSPORT_PORT,
    Config,
)
from shoal.protocols.macfleet.fleet.gossip import Gossip, Ways
from shoal.protocols.macfleet.fleet.limiter import Limiter
from shoal.protocols.macfleet.fleet.meeting import (
    SUBJECT,
    browser,
    heartbeat_listener,
)
from shoal.protocols.macfleet.fleet.own import Member
from shoal.protocols.macfleet.fleet.registry import Fleet, Node
from shoal.protocols.macfleet.handshake import USUAL, Outstanding, Own, Strength
from shoal.protocols.macfleet.ourselves import (
    Ourselves,
    Role,
    node_id,
    profile_of,
)
from shoal.protocols.macfleet.peer import Caller
from shoal.protocols.macfleet.session import PeerSession
from shoal.protocols.macfleet.wire.hardware import Profile
from shoal.protocols.macfleet.wire.keys import TOKEN_MIN, fleet_key
from shoal.protocols.session import Admission, Applicant, Pass, Setting

TRANSPORT_FLAG = "--macfleet-transport-port"


@dataclass(slots=True)
class _Machine:
    """What we are made of; the port is known once it is listened on."""

    hardware: Hardware
    port: int = 0

    def bound(self, port: int) -> None:
        self.port = port

    def profile(self) -> Profile:
        return profile_of(self.hardware, self.port)


def endpoints(config: Config, setting: Setting) -> Sequence[Endpoint]:
    """Return every way to the nodes of our fleet.

    There is none where the join token is no token for a fleet, which is warned of.

    Raises ConfigError for a fleet's token that is none, or an address of a peer.
    """
    if config.open and config.token:
        raise ConfigError(
            "--macfleet-open and --macfleet-token: an open fleet has no token; leave "
            "one of them out"
        )
    token = "" if config.open else config.token or setting.token
    if 0 < len(token) < TOKEN_MIN:
        return _without(config, setting)
    machine = _Machine(setting.hardware)
    own = ourselves(config, setting, token, machine)
    assert own.fleet is not None, "a coordinator keeps an eye on its fleet"
    member = Member(own.node.node_id, own.key, own.profile, setting.draw)
    limiter = Limiter(setting.guesses)
    ways = Ways(partial(_wants, own), partial(_dial, own))
    heartbeats = _port(config.heartbeat_port, HEARTBEAT_PORT)
    contacts = [contact(each) for each in config.peers]
    named = {contact(each.address): each for each in setting.contacts}
    found: list[Endpoint] = [
        # Before heartbeats, in which its port is told.
        _listener(config, own, machine),
        heartbeat_listener(
            member, limiter, heartbeats, spare=config.heartbeat_port is None
        ),
        Gossip(member, own.fleet, contacts, ways, named),
    ]
    if config.browse:
        found.append(browser(member, own.fleet))
    return found


def ourselves(
    config: Config, setting: Setting, token: str, machine: _Machine
) -> Ourselves:
    """Return a coordinator's side.  Raises ConfigError if the token is none."""
    name = node_id(setting.name)
    accepts = USUAL | {Strength.V1} if config.v1 else USUAL
    node = Own(
        name,
        fleet_key(token, config.fleet) if token else None,
        b"",  # it is told as it is at the time
        setting.draw,
        Outstanding(),
        digest=digest_of(token) if token else b"",
        fleet=config.fleet,
        identity=setting.identity,
        verifies=setting.verifies,
        admission=setting.admission if token else _to_all(setting.admission),
        accepts=accepts,
    )
    return Ourselves(
        role=Role.COORDINATOR,
        node=node,
        profile=machine.profile,
        slots=config.slots,
        limiter=Limiter(setting.guesses),
        fleet=Fleet(name, machine.profile),
    )


def _without(config: Config, setting: Setting) -> Sequence[Endpoint]:
    if config.token:
        raise ConfigError(
            f"--macfleet-token: expected {TOKEN_MIN} characters or more, and it has "
            f"{len(config.token)}; take a longer one"
        )
    setting.warn(
        f"the join token has fewer than {TOKEN_MIN} characters, too few for a fleet, "
        "whose ports are not opened: set --macfleet-token, or --macfleet-open for a "
        "fleet without one"
    )
    return ()


def _to_all(admission: Admission) -> Admission:
    """Let in whoever presents nothing as well."""

    def admit(applicant: Applicant) -> Pass:
        return admission(applicant) if applicant.token else Pass()

    return admit


def _port(asked: int | None, usual: int) -> int:
    return usual if asked is None else asked


def _listener(config: Config, own: Ourselves, machine: _Machine) -> Listener:
    secure = own.key is not None
    protection = Protection.TLS if secure else Protection.PLAIN

    def accept(address: str, now: float) -> CrowdSession:
        caller = Caller(dialled=False, address=address, protection=protection)
        return PeerSession(own, caller)

    return Listener(
        _port(config.transport_port, TRANSPORT_PORT),
        accept,
        security=Security.OWN if secure else Security.NONE,
        label=TRANSPORT,
        flag=TRANSPORT_FLAG,
        spare=config.transport_port is None,
        gate=own.limiter,
        subject=SUBJECT,
        bound=machine.bound,
    )


def _wants(own: Ourselves, node: Node) -> bool:
    """Say whether a node's transport is to be called: if it has said where that is.

    Of two of ours it is the one with the smaller id that calls.
    """
    if not node.profile.data_port or own.desk.has_called(node.id):
        return False
    return not node.ours or own.node.node_id < node.id


def _dial(own: Ourselves, node: Node) -> Outgoing:
    where = replace(node.address, port=node.data_port)
    secure = own.key is not None
    protection = Protection.TLS if secure else Protection.PLAIN
    caller = Caller(
        dialled=True, expected=node.id, address=str(where), protection=protection
    )
    url = transport_url(str(where), secure=secure)
    return Outgoing(url, lambda now: PeerSession(own, caller))
