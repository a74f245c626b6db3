"""What connections may hold before anyone has admitted the peer at their other end.

Whoever reaches a port can connect, and begin a message that never ends.  Until a
credential was accepted, or the peer has joined where none is asked for, it is a
*stranger*: all strangers share a small budget of memory.  An admitted peer is limited
by its wire alone.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from shoal.domain.addresses import is_loopback, network_key

MESSAGE_MAX = 64 << 10  # bytes of one message, or of the head of a request
MESSAGE_TIMEOUT = 10.0  # seconds from the first byte of a message to its last
HELD_MAX = 32 << 20  # bytes of all strangers together
STRANGERS_MAX = 8192  # connections
PER_ADDRESS_MAX = 64  # connections; loopback is exempt, for proxies connect from there
PIECE_OVERHEAD = 64  # bytes of memory for a piece, besides its data

BY_STRANGER: Mapping[str, object] = {"by_stranger": True}
"""The ``extra`` of log records that strangers cause: as many as they like."""

OVER_BUDGET = "strangers hold too much memory, and this one most"
TOO_MANY = "too many connections that nobody admitted, and this one is the oldest"


class Stranger:
    """The account of one connection; ``held`` is in bytes.

    ``drop`` ends the connection at once, and takes the reason.
    """

    __slots__ = ("_strangers", "drop", "held", "network")

    def __init__(
        self, strangers: "Strangers", address: str, drop: Callable[[str], None]
    ) -> None:
        self.network = network_key(address)
        self.drop = drop
        self.held = 0
        self._strangers: Strangers | None = strangers

    def received(self, size: int) -> None:
        """Count bytes that arrived; this may drop a stranger, even this one."""
        if self._strangers is not None:
            self.held += size
            self._strangers.on_received(size)

    def progressed(self) -> None:
        """Count nothing more of what arrived: it was a whole message."""
        if self._strangers is not None:
            self._strangers.held -= self.held
            self.held = 0

    def released(self, size: int) -> None:
        """Count bytes no more that were counted by ``received``."""
        if self._strangers is not None:
            size = min(size, self.held)
            self.held -= size
            self._strangers.held -= size

    def move(self, strangers: "Strangers") -> None:
        """Count the connection among others from now on."""
        self.leave()
        self._strangers = strangers
        strangers.register(self)

    def leave(self) -> None:
        """Count the connection no more: it was admitted, or has ended."""
        self.progressed()
        if self._strangers is not None:
            self._strangers.remove(self)
            self._strangers = None


class Strangers:
    """Strangers with one budget, such as those on all ports of a program.

    ``held`` is in bytes, and ``held_max`` the budget; without ``count_max`` somebody
    else limits their number.
    """

    def __init__(
        self, held_max: int = HELD_MAX, count_max: int | None = STRANGERS_MAX
    ) -> None:
        self.held = 0
        self._held_max = held_max
        self._count_max = count_max
        self._strangers: dict[Stranger, None] = {}  # the oldest first
        self._per_address = Counter[str]()

    def __len__(self) -> int:
        return len(self._strangers)

    def has_room(self, address: str) -> bool:
        """Return whether one more connection from an address may be accepted."""
        from_there = self._per_address[network_key(address)]
        return from_there < PER_ADDRESS_MAX or is_loopback(address)

    def add(self, address: str, drop: Callable[[str], None]) -> Stranger:
        """Count a new connection; beyond the limit this drops the oldest."""
        stranger = Stranger(self, address, drop)
        self.register(stranger)
        return stranger

    # For its strangers.

    def register(self, stranger: Stranger) -> None:
        """Count a connection that holds nothing."""
        self._strangers[stranger] = None
        self._per_address[stranger.network] += 1
        if self._count_max is not None and len(self._strangers) > self._count_max:
            self._drop(next(iter(self._strangers)), TOO_MANY)

    def on_received(self, size: int) -> None:
        """Count bytes of a stranger; beyond the budget drop who holds the most."""
        self.held += size
        while self.held > self._held_max:
            # Not the last that sent: that may be the only honest one.
            largest = max(self._strangers, key=lambda stranger: stranger.held)
            self._drop(largest, OVER_BUDGET)

    def remove(self, stranger: Stranger) -> None:
        """Forget a stranger that holds nothing."""
        del self._strangers[stranger]
        self._per_address[stranger.network] -= 1
        if not self._per_address[stranger.network]:
            del self._per_address[stranger.network]

    @staticmethod
    def _drop(stranger: Stranger, reason: str) -> None:
        stranger.leave()
        stranger.drop(reason)
