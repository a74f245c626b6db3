"""Asks nodes of the fleet, round by round, whether they are there.

Source: the MacFleet document, "Gossip".  Unlike real nodes, ours asks several at the
same time, so that one that does not answer holds up nobody; ``turns`` says whom.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shoal.protocols.contacts import Contact
from shoal.protocols.crowd import CrowdSession, Exchange, Listed, Outgoing
from shoal.protocols.macfleet.fleet.own import Member
from shoal.protocols.macfleet.fleet.pinging import PingExchange, PingSession, Pong
from shoal.protocols.macfleet.fleet.registry import (
    COUNTED,
    Address,
    Fleet,
    Node,
    State,
)
from shoal.protocols.macfleet.fleet.standing import listed
from shoal.protocols.macfleet.fleet.turns import chosen

ROUND_EVERY = 1.0  # seconds
PING_WITHIN = 3.0  # seconds for connection, ping and pong
CONTACT_WITHIN = 10.0  # seconds, for an address that somebody has typed in
CONTACT_FIRST = 1.0  # seconds until such an address is tried again; then twice as long
CONTACT_MAX = 30.0
REFUSED = "hung up without an answer: does it have this fleet's token?"
REFUSED_OPENLY = "hung up without an answer: does its fleet have a token?"
WIRE = "macfleet"
UNREACHED = "cannot connect to"  # how it is told that nobody is there
WITHOUT_TLS = "without TLS"  # but somebody is, if that is said as well
HUNG_UP = ("closed by peer", "connection lost")  # how such an end is told of


@dataclass(slots=True)
class _Contact:
    """An address that we were given; ``node_id`` is who has answered there.

    Nobody has ``since``, because of ``failure``.  ``named`` is there if other wires may
    be spoken at it.
    """

    address: Address
    named: Contact | None = None
    due: float = float("-inf")
    delay: float = CONTACT_FIRST
    node_id: str = ""
    asking: bool = False
    failure: str = ""
    since: float | None = None

    @property
    def may_be_ours(self) -> bool:
        """Whether no other wire has turned out to be spoken there."""
        return self.named is None or self.named.wire in ("", WIRE)


@dataclass(frozen=True, slots=True)
class Ways:
    """How the transports of nodes are called.

    ``wants`` says whether a node that is alive is to be called; it goes on saying so
    while the connection that there is was made by us.  ``dial`` says how.
    """

    wants: Callable[[Node], bool]
    dial: Callable[[Node], Outgoing]


class Gossip:
    """The ``Rounds`` of a fleet; ``contacts`` are where its nodes are known to be.

    At those that are ``named`` as well, nobody knows yet what is spoken: others have to
    wait until a ping has shown it, for a node bars who says anything else.
    """

    def __init__(
        self,
        own: Member,
        fleet: Fleet,
        contacts: Sequence[Address],
        ways: Ways,
        named: Mapping[Address, Contact] = {},  # it is only read
    ) -> None:
        self._own = own
        self._fleet = fleet
        self._contacts = [_Contact(each) for each in contacts]
        self._contacts += [_Contact(where, each) for where, each in named.items()]
        for each in named.values():
            each.first.add(WIRE)
        self._ways = ways
        self._round_due = float("-inf")
        self._news = False  # something was heard since the last tick
        self._asking: set[str] = set()  # ids of nodes
        self._calling: dict[str, tuple[Node, Outgoing]] = {}
        self._unwanted: list[Outgoing] = []

    @property
    def deadline(self) -> float | None:
        if self._news:
            return float("-inf")
        contacts = (each.due for each in self._contacts if self._is_open(each))
        return min([self._round_due, *contacts])

    def tick(self, now: float) -> Sequence[Exchange | Outgoing]:
        self._news = False
        self._fleet.pass_time(now)
        found: list[Exchange | Outgoing] = []
        for contact in self._contacts:
            if self._is_open(contact) and now >= contact.due:
                found.append(self._first_contact(contact))
        if now >= self._round_due:
            self._round_due = now + ROUND_EVERY
            free = [node for node in self._fleet.nodes if node.id not in self._asking]
            found += [self._ping(node, now) for node in chosen(free, now)]
        return [*found, *self._calls()]

    def unwanted(self) -> Sequence[Outgoing]:
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    def listed(self) -> Sequence[Listed]:
        vacant = {
            str(each.address): each
            for each in self._contacts
            if each.failure and each.may_be_ours and self._is_vacant(each)
        }
        rows = []
        for row in listed(self._fleet):
            contact = vacant.pop(row.address, None)
            rows.append(replace(row, remark=contact.failure) if contact else row)
        for address, each in vacant.items():
            row = Listed("", address, "no answer", each.since, remark=each.failure)
            rows.append(row)
        return rows

    # Whom to ask.

    def _ping(self, node: Node, now: float) -> Exchange:
        self._asking.add(node.id)
        self._fleet.asked(node.id, now)
        address = node.address
        pongs: list[Pong] = []

        def heard(pong: Pong, now: float) -> None:
            pongs.append(pong)
            self._heard(pong, address, now)

        def over(reason: str, now: float) -> None:
            self._asking.discard(node.id)
            if not pongs:
                self._news = True
                self._fleet.missed(node.id, now)

        return self._exchange(address, node.id, PING_WITHIN, heard, over)

    def _first_contact(self, contact: _Contact) -> Exchange:
        contact.asking, contact.node_id = True, ""

        def heard(pong: Pong, now: float) -> None:
            contact.node_id, contact.failure = pong.node_id, ""
            contact.delay, contact.since = CONTACT_FIRST, None
            if contact.named is not None:
                contact.named.wire = WIRE
            self._heard(pong, contact.address, now)

        def over(reason: str, now: float) -> None:
            contact.asking = False
            contact.due = now + contact.delay
            if not contact.node_id:
                contact.failure = self._why_refused(reason)
                contact.delay = min(2 * contact.delay, CONTACT_MAX)
                if contact.since is None:
                    contact.since = now
            if contact.named is not None and not _is_away(reason):
                contact.named.first.discard(WIRE)

        return self._exchange(contact.address, "", CONTACT_WITHIN, heard, over)

    def _exchange(
        self,
        address: Address,
        expected: str,
        within: float,
        heard: Callable[[Pong, float], None],
        over: Callable[[str, float], None],
    ) -> Exchange:
        url = heartbeat_url(address, secure=self._own.key is not None)
        opened = partial(_opened, PingExchange(self._own, expected), heard)
        return Exchange(Outgoing(url, opened), within, over)

    def _heard(self, pong: Pong, address: Address, now: float) -> None:
        self._news = True
        self._fleet.answered(pong.node_id, address, pong.profile, now)

    def _why_refused(self, reason: str) -> str:
        if not reason.startswith(HUNG_UP):
            return reason
        return REFUSED_OPENLY if self._own.key is None else REFUSED

    def _is_open(self, contact: _Contact) -> bool:
        """Say whether an address is to be asked who is there."""
        asked = contact.asking or not contact.may_be_ours
        return not asked and self._is_vacant(contact)

    def _is_vacant(self, contact: _Contact) -> bool:
        """Say whether nobody who counts is known to be at an address."""
        node = self._fleet.get(contact.node_id)
        return node is None or node.state not in COUNTED

    # Whom to call.

    def _calls(self) -> Iterator[Outgoing]:
        """Return whom to call from now on; note whom no more."""
        wanted = {
            node.id: node
            for node in self._fleet.nodes
            if node.state is State.ALIVE and self._ways.wants(node)
        }
        for node_id, (called, outgoing) in [*self._calling.items()]:
            node = wanted.get(node_id)
            if node is None or _place(node) != _place(called):
                del self._calling[node_id]
                self._unwanted.append(outgoing)
        for node in wanted.values():
            if node.id not in self._calling:
                outgoing = self._ways.dial(node)
                self._calling[node.id] = (node, outgoing)
                yield outgoing


def _is_away(reason: str) -> bool:
    """Say whether a ping has found nobody, whatever is spoken there."""
    return reason.startswith(UNREACHED) and WITHOUT_TLS not in reason


def heartbeat_url(address: Address, *, secure: bool) -> str:
    """Return how to connect to where heartbeats are answered.

    Nobody vouches for a node's certificate: who it is shows when it answers.
    """
    return f"{'tls-any' if secure else 'tcp'}://{address}"


def _opened(
    exchange: PingExchange, heard: Callable[[Pong, float], None], now: float
) -> CrowdSession:
    return PingSession(exchange, heard)


def _place(node: Node) -> tuple[str, int]:
    return node.address.host, node.data_port
