"""The links of a relay, and what is said on one about what it did."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from shoal.protocols.crowd import Carried
from shoal.protocols.tealenet.relay_envelope import BadRelayMessage
from shoal.protocols.tealenet.relay_limits import Bucket, RelayLimits
from shoal.protocols.tealenet.relay_messages import Error, encode
from shoal.protocols.tealenet.relay_nodes import Node


@dataclass(slots=True, eq=False)
class Line:
    """A link, and what it has left of what it may do.

    ``since`` it has no node, ``challenge`` is what one may have to sign, and at
    ``read_at`` it may be read from again.
    """

    link: int
    address: str
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
        self._of_address: dict[str, int] = {}

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
        of_address = self._of_address.get(address, 0)
        if len(self) >= limits.links or of_address >= limits.links_of_address:
            return False
        self._of_address[address] = of_address + 1
        self._by_link[link] = Line(
            link,
            address,
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
        self._of_address[line.address] -= 1
        if not self._of_address[line.address]:
            del self._of_address[line.address]


def told(line: Line, code: str, why: str) -> Carried:
    """Return an error."""
    return Carried(line.link, encode(Error(code, why)))


def told_to_wait(line: Line, what: str, seconds: float) -> Carried:
    """Return the error for too much of something."""
    wait = ceil(seconds)
    why = f"Too many {what}; try again in {wait} s"
    return Carried(line.link, encode(Error("rate_limited", why, wait)))
