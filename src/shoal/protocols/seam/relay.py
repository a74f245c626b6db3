"""A relay between connections, as a state machine without I/O."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.multi_peer import MultiPeerSession
from shoal.protocols.seam.session import Data


class RelayMachine(Protocol):
    """Carries messages between connections, none of which are to workers of ours.

    A state machine without I/O, like a session, but with many links: each is named by
    a number, and outputs say which link they are for.
    """

    def link_opened(
        self, link: int, hello: UpgradeRequest, now: float
    ) -> Sequence["RelaySend | RelayBroadcast"]:
        """Take note of a new link."""
        ...

    def receive(
        self, link: int, batch: Sequence[Data], now: float
    ) -> Sequence["RelaySend | RelayBroadcast"]:
        """Take what arrived together on a link."""
        ...

    def read_delay(self, link: int, now: float) -> float:
        """Say for how many seconds nothing more is to be read from a link."""
        ...

    def link_closed(
        self, link: int, now: float
    ) -> Sequence["RelaySend | RelayBroadcast"]:
        """Take note that a link has ended, or is no longer written to."""
        ...

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due."""
        ...

    def tick(self, now: float) -> Sequence["RelaySend | RelayBroadcast"]:
        """Act on time passing."""
        ...


@dataclass(slots=True)
class RelaySend:
    """Data for a link; or, with a ``close`` code, its end, for which ``data`` says why.

    Not frozen, for there is one for each message.
    """

    link: int
    data: Data
    close: int = 0


@dataclass(frozen=True, slots=True)
class RelayBroadcast:
    """Messages for many links: each gets those from some place in them on.

    ``links`` has the links, and for each of them that place.
    """

    messages: tuple[Data, ...]
    links: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class RelayRoute:
    """A claim on WebSocket connections for a switch; see ``WebSocketRoute``.

    ``resident`` is how the coordinator itself takes part, over a link that never
    leaves the process; None: it does not.
    """

    rank: int
    claims: Callable[[UpgradeRequest], bool]
    relay: RelayMachine
    message_max: int  # bytes
    local_member: Callable[[float], MultiPeerSession] | None = None
