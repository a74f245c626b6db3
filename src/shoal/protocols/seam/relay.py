"""A relay between connections, as a state machine without I/O."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.peer_session import PeerSession
from shoal.protocols.seam.session import Data


class RelayStanding(Enum):
    """What a relay knows about the peer of a link.

    A *stranger* has not registered.  A *guest* has, and uses the relay.
    """

    STRANGER = auto()
    GUEST = auto()


class RelayMachine(Protocol):
    """Relays messages between connections that are not worker connections.

    A state machine without I/O, like a session, but with many links: a number
    identifies each link, and each output names its link.
    """

    def link_opened(
        self, link: int, request: UpgradeRequest, now: float
    ) -> Sequence["RelaySend | RelayBroadcast"]:
        """Add a link."""

    def receive(
        self, link: int, batch: Sequence[Data], now: float
    ) -> Sequence["RelaySend | RelayBroadcast"]:
        """Process data that arrived together on a link."""

    @property
    def is_open(self) -> bool:
        """Whether any peer may use the relay, without a credential."""

    def standing(self, link: int) -> RelayStanding:
        """Return the standing of the peer of a link; after its end STRANGER."""

    def count_peers(self) -> Counter[RelayStanding]:
        """Count the peers of all links, without the coordinator itself."""

    def read_delay(self, link: int, now: float) -> float:
        """Return the delay in seconds before the next read from a link."""

    def link_closed(
        self, link: int, now: float
    ) -> Sequence["RelaySend | RelayBroadcast"]:
        """Remove a link that ended, or that the relay no longer writes to."""

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due."""

    def tick(self, now: float) -> Sequence["RelaySend | RelayBroadcast"]:
        """Run what is due at this time."""


@dataclass(slots=True)
class RelaySend:
    """Data for a link; with a ``close`` code, closes it, and ``data`` is the reason.

    Not frozen, because there is one per message.
    """

    link: int
    data: Data
    close: int = 0


@dataclass(frozen=True, slots=True)
class RelayBroadcast:
    """Messages for many links, each of which gets a suffix of them.

    ``links`` has pairs of a link and the index of its first message.
    """

    messages: tuple[Data, ...]
    links: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class RelayRoute:
    """A claim on WebSocket connections for a relay; see ``WebSocketRoute``.

    ``local_member`` creates the coordinator's own session on the relay, over a link
    within the process; None: the coordinator is not a member.
    """

    rank: int
    claims: Callable[[UpgradeRequest], bool]
    relay: RelayMachine
    message_max: int  # bytes
    local_member: Callable[[float], PeerSession] | None = None
