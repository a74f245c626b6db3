"""The links of a relay with their rate limits, and the errors sent on them."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from shoal.protocols.seam.relay import RelaySend
from shoal.protocols.tealenet.codec.relay_messages import (
    BadRelayMessage,
    Discover,
    RelayError,
    encode,
)
from shoal.protocols.tealenet.relay_server.limits import RateBucket, RelayLimits
from shoal.protocols.tealenet.relay_server.nodes import NodeRecord


@dataclass(slots=True)
class LinkOrigin:
    """An address, the number of its links, and their common rate limit."""

    address: str
    lookups: RateBucket
    links: int = 0


@dataclass(slots=True, eq=False)
class NodeLink:
    """A link with its rate limits.

    ``is_host``: at its other end is the coordinator itself.  The link is not read from
    before ``read_at``.  ``pending_discovery`` waits for the node's registration.  Since
    ``unregistered_since`` the link has no node.
    """

    id: int
    origin: LinkOrigin
    is_host: bool
    unregistered_since: float
    messages: RateBucket
    size: RateBucket
    openings: RateBucket
    discoveries: RateBucket
    registrations: RateBucket
    node: NodeRecord | None = None
    pending_discovery: Discover | None = None
    read_at: float = 0.0

    @property
    def registered_node(self) -> NodeRecord:
        """The node of the link.  Raises BadRelayMessage if none is registered."""
        if self.node is None:
            raise BadRelayMessage("not_registered", "Send register first")
        return self.node


class NodeLinks:
    """All links by their ids, within the limits in total and for each address."""

    def __init__(self, limits: RelayLimits) -> None:
        self._limits = limits
        self._by_link: dict[int, NodeLink] = {}
        self._origins: dict[str, LinkOrigin] = {}

    def __len__(self) -> int:
        return len(self._by_link)

    def __iter__(self) -> Iterator[NodeLink]:
        return iter(list(self._by_link.values()))

    def get(self, link_id: int) -> NodeLink | None:
        """Return the link with an id; None once it is being closed."""
        return self._by_link.get(link_id)

    def add(
        self, link_id: int, address: str, now: float, *, is_host: bool = False
    ) -> bool:
        """Add a link; return False if that exceeds a limit."""
        limits = self._limits
        origin = self._origins.get(address)
        if origin is None:
            origin = LinkOrigin(address, RateBucket.full(limits.lookups, now))
        if len(self) >= limits.links or origin.links >= limits.links_per_address:
            return False
        self._origins[address] = origin
        origin.links += 1
        self._by_link[link_id] = NodeLink(
            link_id,
            origin,
            is_host,
            now,
            RateBucket.full(limits.messages, now),
            RateBucket.full(limits.size, now),
            RateBucket.full(limits.openings, now),
            RateBucket.full(limits.discoveries, now),
            RateBucket.full(limits.registrations, now),
        )
        return True

    def remove(self, link: NodeLink) -> None:
        """Remove a link that has closed or is being closed."""
        del self._by_link[link.id]
        link.origin.links -= 1
        if not link.origin.links:
            del self._origins[link.origin.address]


def error_to(link: NodeLink, code: str, message: str) -> RelaySend:
    """Return an error for a link."""
    return RelaySend(link.id, encode(RelayError(code, message)))


def rate_limited(link: NodeLink, what: str, seconds: float) -> RelaySend:
    """Return the error for too many messages of a type."""
    wait = ceil(seconds)
    why = f"Too many {what}; try again in {wait} s"
    return RelaySend(link.id, encode(RelayError("rate_limited", why, wait)))
