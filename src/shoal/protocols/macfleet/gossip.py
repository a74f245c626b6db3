"""Pings the nodes of the fleet in rounds, and decides which transports to dial.

Source: the MacFleet document, "Gossip".  MacFleet's own programs ping three random
nodes, one after the other.  A Shoal node pings several at once, so that one that does
not answer delays no other: the three that were pinged longest ago, and every node that
missed a pong, so that a lost node is noticed as soon in a large fleet as in a small
one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shoal.protocols.macfleet.addresses import transport_url
from shoal.protocols.macfleet.election import membership_table
from shoal.protocols.macfleet.heartbeat import PingExchange, PingSession, Pong
from shoal.protocols.macfleet.member import FleetMember
from shoal.protocols.macfleet.membership import (
    MEMBER_STATES,
    MISSES_MAX,
    FleetNode,
    FleetRegistry,
    NodeAddress,
    NodeState,
)
from shoal.protocols.seam.endpoints import ListedNode, OutgoingConnection, Probe
from shoal.protocols.seam.peer_addresses import PeerAddress
from shoal.protocols.seam.peer_session import PeerSession

PINGS_PER_ROUND = 3  # nodes of a kind
RETRIES_PER_ROUND = 32  # nodes that missed a pong
FAILED_PING_INTERVAL = 30.0  # seconds between pings of a failed node


def nodes_to_ping(nodes: Sequence[FleetNode], now: float) -> Iterator[FleetNode]:
    """Return the nodes to ping in this round."""
    waiting = sorted(nodes, key=lambda node: node.last_ping)
    for selected, count_max in _SELECTIONS:
        yield from [node for node in waiting if selected(node, now)][:count_max]


def _is_healthy(node: FleetNode, now: float) -> bool:
    return node.state is NodeState.ALIVE and not node.misses


def _has_missed_pongs(node: FleetNode, now: float) -> bool:
    alive = node.state is NodeState.ALIVE and node.misses > 0
    return alive or node.state is NodeState.SUSPECTED


def _is_new(node: FleetNode, now: float) -> bool:
    return node.state is NodeState.SIGHTED and node.misses < MISSES_MAX


def _is_retry_due(node: FleetNode, now: float) -> bool:
    given_up = node.state is NodeState.SIGHTED and node.misses >= MISSES_MAX
    unreachable = given_up or node.state is NodeState.FAILED
    return unreachable and now - node.last_ping >= FAILED_PING_INTERVAL


_SELECTIONS: Sequence[tuple[Callable[[FleetNode, float], bool], int]] = (
    (_is_healthy, PINGS_PER_ROUND),
    (_has_missed_pongs, RETRIES_PER_ROUND),
    (_is_new, PINGS_PER_ROUND),
    (_is_retry_due, PINGS_PER_ROUND),
)
"""Which nodes are pinged in a round, and how many of them."""


ROUND_INTERVAL = 1.0  # seconds
PING_TIMEOUT = 3.0  # seconds for connection, ping and pong
CONTACT_TIMEOUT = 10.0  # seconds, for a configured address
CONTACT_DELAY_FIRST = 1.0  # seconds until the next attempt; doubles with each failure
CONTACT_DELAY_MAX = 30.0
REFUSED = "disconnected without an answer: does it have this fleet's token?"
REFUSED_OPEN = "disconnected without an answer: does its fleet have a token?"
WIRE = "macfleet"
UNREACHABLE = "cannot connect to"  # begins the reason if nothing listens there
WITHOUT_TLS = "without TLS"  # in the reason if something does, without TLS
DISCONNECTED = ("closed by peer", "connection lost")  # begin the reason of a disconnect


@dataclass(slots=True)
class _SeedAddress:
    """A configured address; ``node_id`` is the node that answered there last.

    Since ``since`` no node has answered, because of ``failure``.  ``peer_address`` says
    whether the address may speak another protocol.  ``accepts_hardware`` is as in
    ``FleetNode``.
    """

    address: NodeAddress
    peer_address: PeerAddress
    due: float = float("-inf")
    delay: float = CONTACT_DELAY_FIRST
    node_id: str = ""
    pinging: bool = False
    failure: str = ""
    since: float | None = None
    accepts_hardware: bool = True

    @property
    def may_be_macfleet(self) -> bool:
        """Whether no other protocol has been detected there."""
        return self.peer_address.wire in ("", WIRE)


@dataclass(frozen=True, slots=True)
class TransportDialer:
    """Dials the transports of nodes.

    ``should_dial`` says whether to dial a live node; it remains true while the
    connection to it is an outgoing one.  ``dial`` returns the connection.
    """

    should_dial: Callable[[FleetNode], bool]
    dial: Callable[[FleetNode], OutgoingConnection]


class FleetGossip:
    """The ``MembershipProber`` of a fleet; ``seeds`` are addresses of its nodes.

    The addresses in ``peer_addresses`` may speak any protocol.  MacFleet pings them
    first and the others wait, because a MacFleet node bans an address that sends
    anything else.
    """

    def __init__(
        self,
        member: FleetMember,
        registry: FleetRegistry,
        seeds: Sequence[NodeAddress],
        dialer: TransportDialer,
        peer_addresses: Mapping[NodeAddress, PeerAddress] = {},  # read only
    ) -> None:
        self._member = member
        self._registry = registry
        self._seeds = [
            _SeedAddress(each, PeerAddress(str(each), WIRE)) for each in seeds
        ]
        self._seeds += [
            _SeedAddress(address, each) for address, each in peer_addresses.items()
        ]
        for each in peer_addresses.values():
            each.probing.add(WIRE)
        self._dialer = dialer
        self._round_due = float("-inf")
        self._registry_changed = False  # since the last tick
        self._pinging: set[str] = set()  # ids of nodes
        self._dialled: dict[str, tuple[FleetNode, OutgoingConnection]] = {}
        self._dropped: list[OutgoingConnection] = []

    @property
    def deadline(self) -> float | None:
        if self._registry_changed:
            return float("-inf")
        pings_due = (each.due for each in self._seeds if self._may_ping(each))
        return min([self._round_due, *pings_due])

    def tick(self, now: float) -> Sequence[Probe | OutgoingConnection]:
        self._registry_changed = False
        self._registry.expire(now)
        outputs: list[Probe | OutgoingConnection] = []
        for seed in self._seeds:
            if self._may_ping(seed) and now >= seed.due:
                outputs.append(self._ping_seed(seed))
        if now >= self._round_due:
            self._round_due = now + ROUND_INTERVAL
            idle = [
                node for node in self._registry.nodes if node.id not in self._pinging
            ]
            outputs += [self._ping(node, now) for node in nodes_to_ping(idle, now)]
        return [*outputs, *self._dial_nodes()]

    def dropped(self) -> Sequence[OutgoingConnection]:
        dropped, self._dropped = self._dropped, []
        return dropped

    def nodes(self) -> Sequence[ListedNode]:
        vacant = {
            str(each.address): each
            for each in self._seeds
            if each.failure and each.may_be_macfleet and self._is_vacant(each)
        }
        rows = []
        for row in membership_table(self._registry):
            seed = vacant.pop(row.address, None)
            rows.append(replace(row, note=seed.failure) if seed else row)
        for address, each in vacant.items():
            row = ListedNode("", address, "no answer", each.since, note=each.failure)
            rows.append(row)
        return rows

    # Pings.

    def _ping(self, node: FleetNode, now: float) -> Probe:
        self._pinging.add(node.id)
        self._registry.on_ping_sent(node.id, now)
        address, hardware = node.address, node.accepts_hardware
        pongs: list[Pong] = []

        def on_pong(pong: Pong, now: float) -> None:
            pongs.append(pong)
            self._on_pong(pong, address, now, hardware=hardware)

        def on_end(reason: str, now: float) -> None:
            self._pinging.discard(node.id)
            if not pongs:
                self._registry_changed = True
                hung_up = reason.startswith(DISCONNECTED)
                self._registry.on_missed_pong(node.id, now, hung_up=hung_up)

        exchange = PingExchange(self._member, node.id, hardware=hardware)
        return self._probe(exchange, address, PING_TIMEOUT, on_pong, on_end)

    def _ping_seed(self, seed: _SeedAddress) -> Probe:
        seed.pinging, seed.node_id = True, ""
        hardware = seed.accepts_hardware

        def on_pong(pong: Pong, now: float) -> None:
            seed.node_id, seed.failure = pong.node_id, ""
            seed.delay, seed.since = CONTACT_DELAY_FIRST, None
            seed.peer_address.wire = WIRE
            self._on_pong(pong, seed.address, now, hardware=hardware)

        def on_end(reason: str, now: float) -> None:
            seed.pinging = False
            seed.due = now + seed.delay
            if not seed.node_id:
                hung_up = reason.startswith(DISCONNECTED)
                seed.accepts_hardware = not (hung_up and hardware)
                seed.failure = self._failure_text(reason)
                seed.delay = min(2 * seed.delay, CONTACT_DELAY_MAX)
                if seed.since is None:
                    seed.since = now
            if not _is_unreachable(reason):
                seed.peer_address.probing.discard(WIRE)

        exchange = PingExchange(self._member, hardware=hardware)
        return self._probe(exchange, seed.address, CONTACT_TIMEOUT, on_pong, on_end)

    def _probe(
        self,
        exchange: PingExchange,
        address: NodeAddress,
        timeout: float,
        on_pong: Callable[[Pong, float], None],
        on_end: Callable[[str, float], None],
    ) -> Probe:
        url = transport_url(str(address), secure=self._member.uses_tls)
        open_session = partial(_open_session, exchange, on_pong)
        return Probe(OutgoingConnection(url, open_session), timeout, on_end)

    def _on_pong(
        self, pong: Pong, address: NodeAddress, now: float, *, hardware: bool
    ) -> None:
        self._registry_changed = True
        self._registry.on_pong(
            pong.node_id, address, pong.profile, now, accepts_hardware=hardware
        )

    def _failure_text(self, reason: str) -> str:
        if not reason.startswith(DISCONNECTED):
            return reason
        return REFUSED_OPEN if self._member.key is None else REFUSED

    def _may_ping(self, seed: _SeedAddress) -> bool:
        """Say whether to ping an address."""
        is_busy = seed.pinging or not seed.may_be_macfleet
        return not is_busy and self._is_vacant(seed)

    def _is_vacant(self, seed: _SeedAddress) -> bool:
        """Say whether no current member is known at an address."""
        node = self._registry.get(seed.node_id)
        return node is None or node.state not in MEMBER_STATES

    # Transports.

    def _dial_nodes(self) -> Iterator[OutgoingConnection]:
        """Return connections to open now; record those no longer wanted."""
        to_dial = {
            node.id: node
            for node in self._registry.nodes
            if node.state is NodeState.ALIVE and self._dialer.should_dial(node)
        }
        for node_id, (dialled_node, outgoing) in [*self._dialled.items()]:
            node = to_dial.get(node_id)
            if node is None or _transport_address(node) != _transport_address(
                dialled_node
            ):
                del self._dialled[node_id]
                self._dropped.append(outgoing)
        for node in to_dial.values():
            if node.id not in self._dialled:
                outgoing = self._dialer.dial(node)
                self._dialled[node.id] = (node, outgoing)
                yield outgoing


def _is_unreachable(reason: str) -> bool:
    """Say whether nothing listens at the address, with TLS or without."""
    return reason.startswith(UNREACHABLE) and WITHOUT_TLS not in reason


def _open_session(
    exchange: PingExchange, on_pong: Callable[[Pong, float], None], now: float
) -> PeerSession:
    return PingSession(exchange, on_pong)


def _transport_address(node: FleetNode) -> tuple[str, int]:
    return node.address.host, node.data_port
