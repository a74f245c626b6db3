"""A fleet of simulated nodes under a simulated clock."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

from protocols.macfleet.fleet_members import AWAY, KEY, limiter, member, sent
from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.addresses import transport_url
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.gossip import FleetGossip, TransportDialer
from shoal.protocols.macfleet.heartbeat import PingSession, PongSession
from shoal.protocols.macfleet.member import FleetMember
from shoal.protocols.macfleet.membership import (
    FleetNode,
    FleetRegistry,
    NodeAddress,
    NodeState,
)
from shoal.protocols.seam.endpoints import OutgoingConnection, Probe

LATENCY = 0.01  # seconds until a ping is answered


def address_of(number: int) -> NodeAddress:
    return NodeAddress(f"10.0.{number >> 8}.{number & 255}", 50051)


def never_opened(now: float) -> PingSession:
    raise AssertionError("nobody is called in this town")


@dataclass
class SimulatedFleet:
    """The gossip of one node, and the nodes at each address.

    No node answers at addresses in ``away``; their machines are ``off``, or else refuse
    connections.  ``mirrors`` send back what they receive.  ``older`` nodes, as those of
    version 2.1, do not answer pings with hardware.  ``wants`` and ``calls`` concern the
    transports.
    """

    key: bytes | None = KEY
    addresses: list[NodeAddress] = field(default_factory=list)
    wants: Callable[[FleetNode], bool] = lambda node: False
    now: float = 0.0
    away: set[NodeAddress] = field(default_factory=set)
    off: bool = True
    mirrors: set[NodeAddress] = field(default_factory=set)
    older: set[NodeAddress] = field(default_factory=set)
    people: dict[NodeAddress, FleetMember] = field(default_factory=dict)
    pinged: list[tuple[float, NodeAddress]] = field(default_factory=list)
    calls: list[OutgoingConnection] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.own = member("me", self.key)
        self.fleet = FleetRegistry("me", self.own.profile)
        self.gossip = FleetGossip(
            self.own,
            self.fleet,
            self.addresses,
            TransportDialer(lambda n: self.wants(n), dial),
        )
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def settle(
        self, number: int, name: str = "", profile: HardwareProfile | None = None
    ) -> None:
        """Put a node at an address, in place of the one there."""
        name = name or f"n{number}"
        told = profile or HardwareProfile(gpu_cores=number, data_port=5000)
        self.people[address_of(number)] = member(
            name, self.key, told, nonces=next(self._numbers) << 64
        )

    def sight(self, number: int, name: str = "") -> None:
        """Announce a node."""
        self.fleet.on_announced(
            name or f"n{number}", [address_of(number)], HardwareProfile(), self.now
        )

    def state(self, number: int) -> NodeState | None:
        found = self.fleet.get(f"n{number}")
        return None if found is None else found.state

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while True:
            deadline = self.gossip.deadline
            assert deadline is not None
            later = self._due[0][0] if self._due else end
            self.now = max(self.now, min(deadline, later))
            if self.now >= end:
                self.now = end
                return
            if self._due and later <= self.now:
                heappop(self._due)[2]()
                continue
            for each in self.gossip.tick(self.now):
                if isinstance(each, Probe):
                    self._ask(each)
                else:
                    self.calls.append(each)
            for outgoing in self.gossip.dropped():
                self.calls.remove(outgoing)

    def _ask(self, exchange: Probe) -> None:
        secure = self.key is not None
        asked = next(
            (
                each
                for each in {*self.people, *self.mirrors}
                if transport_url(str(each), secure=secure) == exchange.outgoing.url
            ),
            None,
        )
        if asked is not None:
            self.pinged.append((self.now, asked))
        if asked is None or asked in self.away:
            after = exchange.timeout if self.off else LATENCY
            self._at(after, lambda: exchange.on_end("no answer", self.now))
        else:
            self._at(LATENCY, lambda: self._talk(exchange, asked))

    def _talk(self, exchange: Probe, asked: NodeAddress) -> None:
        session = exchange.outgoing.new_session(self.now)
        said = sent(session.tick(self.now))
        if asked in self.mirrors:
            answer = said.replace(b"PING", b"PONG")
        elif asked in self.older and len(said.split()) == 5:
            answer = b""
        else:
            server = PongSession(self.people[asked], limiter(), AWAY)
            server.tick(self.now)
            answer = sent(server.receive([said], self.now))
        reason = "closed by peer"
        try:
            session.receive([answer], self.now)
        except PeerError as error:
            reason = str(error)
        exchange.on_end(reason, self.now)

    def _at(self, after: float, do: Callable[[], None]) -> None:
        heappush(self._due, (self.now + after, next(self._numbers), do))


def dial(node: FleetNode) -> OutgoingConnection:
    return OutgoingConnection(
        f"tls-any://{replace(node.address, port=node.data_port)}", never_opened
    )
