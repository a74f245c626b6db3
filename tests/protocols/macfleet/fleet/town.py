"""A town of nodes under a clock that is a number: they answer, or they are away."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

from protocols.macfleet.fleet.fleets import AWAY, KEY, limiter, member, sent
from shoal.domain.errors import PeerError
from shoal.protocols.crowd import Exchange, Outgoing
from shoal.protocols.macfleet.fleet.answering import PongSession
from shoal.protocols.macfleet.fleet.gossip import Gossip, Ways, heartbeat_url
from shoal.protocols.macfleet.fleet.own import Member
from shoal.protocols.macfleet.fleet.pinging import PingSession
from shoal.protocols.macfleet.fleet.registry import Address, Fleet, Node, State
from shoal.protocols.macfleet.wire.hardware import Profile

LATENCY = 0.01  # seconds until a ping is answered


def address_of(number: int) -> Address:
    return Address(f"10.0.{number >> 8}.{number & 255}", 50051)


def never_opened(now: float) -> PingSession:
    raise AssertionError("nobody is called in this town")


@dataclass
class Town:
    """Our gossip, and who lives at which address.

    ``away`` are addresses where nobody answers, of machines that are ``off`` or else
    refuse connections, and ``mirrors`` where whatever is said is said back.  ``wants``
    and ``calls`` are about the transports.
    """

    key: bytes | None = KEY
    contacts: list[Address] = field(default_factory=list)
    wants: Callable[[Node], bool] = lambda node: False
    now: float = 0.0
    away: set[Address] = field(default_factory=set)
    off: bool = True
    mirrors: set[Address] = field(default_factory=set)
    people: dict[Address, Member] = field(default_factory=dict)
    pinged: list[tuple[float, Address]] = field(default_factory=list)
    calls: list[Outgoing] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.own = member("me", self.key)
        self.fleet = Fleet("me", self.own.profile)
        self.gossip = Gossip(
            self.own, self.fleet, self.contacts, Ways(lambda n: self.wants(n), dial)
        )
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def settle(
        self, number: int, name: str = "", profile: Profile | None = None
    ) -> None:
        """Let a node live at an address, in place of who lived there."""
        name = name or f"n{number}"
        told = profile or Profile(gpu_cores=number, data_port=5000)
        self.people[address_of(number)] = member(
            name, self.key, told, nonces=next(self._numbers) << 64
        )

    def sight(self, number: int, name: str = "") -> None:
        """Let a node be announced."""
        self.fleet.sighted(
            name or f"n{number}", [address_of(number)], Profile(), self.now
        )

    def state(self, number: int) -> State | None:
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
                if isinstance(each, Exchange):
                    self._ask(each)
                else:
                    self.calls.append(each)
            for outgoing in self.gossip.unwanted():
                self.calls.remove(outgoing)

    def _ask(self, exchange: Exchange) -> None:
        secure = self.key is not None
        asked = next(
            (
                each
                for each in {*self.people, *self.mirrors}
                if heartbeat_url(each, secure=secure) == exchange.outgoing.url
            ),
            None,
        )
        if asked is not None:
            self.pinged.append((self.now, asked))
        if asked is None or asked in self.away:
            after = exchange.within if self.off else LATENCY
            self._at(after, lambda: exchange.over("no answer", self.now))
        else:
            self._at(LATENCY, lambda: self._talk(exchange, asked))

    def _talk(self, exchange: Exchange, asked: Address) -> None:
        session = exchange.outgoing.open(self.now)
        said = sent(session.tick(self.now))
        if asked in self.mirrors:
            answer = said.replace(b"PING", b"PONG")
        else:
            server = PongSession(self.people[asked], limiter(), AWAY)
            server.tick(self.now)
            answer = sent(server.receive([said], self.now))
        reason = "closed by peer"
        try:
            session.receive([answer], self.now)
        except PeerError as error:
            reason = str(error)
        exchange.over(reason, self.now)

    def _at(self, after: float, do: Callable[[], None]) -> None:
        heappush(self._due, (self.now + after, next(self._numbers), do))


def dial(node: Node) -> Outgoing:
    return Outgoing(
        f"tls-any://{replace(node.address, port=node.data_port)}", never_opened
    )
