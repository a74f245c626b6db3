"""The links of a relay, and what is said on one about what it did."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from shoal.protocols.crowd import Carried
from shoal.protocols.tealenet.relay.envelope import BadRelayMessage
from shoal.protocols.tealenet.relay.limits import Bucket, RelayLimits
from shoal.protocols.tealenet.relay.messages import Error, encode
from shoal.protocols.tealenet.relay.nodes import Node


@dataclass(slots=True)
class Origin:
    """An address, how many links it has, and what those may do together."""

    address: str
    looks: Bucket
    links: int = 0


@dataclass(slots=True, eq=False)
class Line:
    """A link, and what it has left of what it may do.

    ``since`` it has no node, ``challenge`` is what one may have to sign, and at
    ``read_at`` it may be read from again.
    """

    link: int
    origin: Origin
    since: float
    messages: Bucket
    size: Bucket
    openings: Bucket
    questions: Bucket
    registrations: Bucket
    node: Node | None = None
    challenge: str = ""
    read_at: float = 0.0

    @property
    def registered(self) -> Node:
        """Its node.  Raises BadRelayMessage if it has none."""
        if self.node is None:
            raise BadRelayMessage("not_registered", "Send register first")
        return self.node


class Lines:
    """All links, by their numbers, so many of each address at most."""

    def __init__(self, limits: RelayLimits) -> None:
        self._limits = limits
        self._by_link: dict[int, Line] = {}
        self._origins: dict[str, Origin] = {}

    def __len__(self) -> int:
        return len(self._by_link)

    def __iter__(self) -> Iterator[Line]:
        return iter(list(self._by_link.values()))

    def of(self, link: int) -> Line | None:
        """Return the link of that number; None once it is being closed."""
        return self._by_link.get(link)

    def add(self, link: int, address: str, now: float) -> bool:
        """Take a link, if there is room for it."""
        limits = self._limits
        origin = self._origins.get(address)
        if origin is None:
            origin = Origin(address, Bucket.full(limits.looks, now))
        if len(self) >= limits.links or origin.links >= limits.links_of_address:
            return False
        self._origins[address] = origin
        origin.links += 1
        self._by_link[link] = Line(
            link,
            origin,
            now,
            Bucket.full(limits.messages, now),
            Bucket.full(limits.size, now),
            Bucket.full(limits.openings, now),
            Bucket.full(limits.questions, now),
            Bucket.full(limits.registrations, now),
        )
        return True

    def remove(self, line: Line) -> None:
        """Forget a link that has ended, or is to end."""
        del self._by_link[line.link]
        line.origin.links -= 1
        if not line.origin.links:
            del self._origins[line.origin.address]


def told(line: Line, code: str, why: str) -> Carried:
    """Return an error."""
    return Carried(line.link, encode(Error(code, why)))


def told_to_wait(line: Line, what: str, seconds: float) -> Carried:
    """Return the error for too much of something."""
    wait = ceil(seconds)
    why = f"Too many {what}; try again in {wait} s"
    return Carried(line.link, encode(Error("rate_limited", why, wait)))
