"""A relay's limits, and the token bucket for rates."""

from dataclasses import dataclass

from shoal.protocols.tealenet.codec.relay_messages import CAPABILITIES_MAX


@dataclass(frozen=True, slots=True)
class Rate:
    """A long-term rate per second, and the ``burst`` that is allowed at once."""

    per_second: float
    burst: float


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """The limits of a relay, far above what honest nodes need.

    A node beyond ``messages`` or ``size`` is read from more slowly and loses nothing;
    beyond the other rates it gets an error that says when to try again.  All nodes but
    the coordinator's are read from as slowly if they exceed ``messages_in_all`` or
    ``size_in_all`` together.
    """

    messages: Rate = Rate(10_000, 100_000)
    size: Rate = Rate(64 << 20, 256 << 20)  # bytes
    messages_in_all: Rate = Rate(2_000, 10_000)
    size_in_all: Rate = Rate(8 << 20, 64 << 20)  # bytes
    openings: Rate = Rate(100, 500)  # sessions and offers
    discoveries: Rate = Rate(2, 20)
    lookups: Rate = Rate(200_000, 2_000_000)  # nodes searched for one address
    registrations: Rate = Rate(2, 20)
    pause_max: float = 1.0  # seconds without reading from a node, at a time
    links: int = 24_000
    links_per_address: int = 1024
    nodes: int = 20_000
    stored_size: int = 256 << 20  # bytes of all nodes' capabilities
    sessions: int = 200_000
    sessions_per_node: int = 1024  # opened by it
    sessions_per_address: int = 50_000  # opened by nodes of one address
    registration_timeout: float = 30.0  # seconds to register
    node_ttl: float = 300.0  # seconds from a node's last message to its removal
    results: int = 50  # nodes in an answer, if the request has no maxPeers
    results_max: int = 1000
    results_size: int = 4 << 20  # bytes of an answer, approximately
    name_max: int = 256  # characters of a displayName; the rest is cut off
    session_id_max: int = 256  # characters
    capabilities_max: int = CAPABILITIES_MAX


@dataclass(slots=True)
class RateBucket:
    """A token bucket."""

    rate: Rate
    level: float
    at: float  # time of the level

    @classmethod
    def full(cls, rate: Rate, now: float) -> "RateBucket":
        return cls(rate, rate.burst, now)

    def charge(self, amount: float, now: float) -> float:
        """Charge an amount; return how many seconds the bucket is overdrawn."""
        rate = self.rate
        level = self.level + (now - self.at) * rate.per_second
        self.level = level = min(level, rate.burst) - amount
        self.at = now
        return -level / rate.per_second if level < 0 else 0.0

    def try_charge(self, amount: float, now: float) -> float:
        """Charge an amount if it is available, else return the seconds until then."""
        wait = self.charge(amount, now)
        if wait:
            self.level += amount
        return wait

    def try_charge_one(self, now: float) -> float:
        """Charge an amount of 1 if it is available, as ``try_charge``."""
        return self.try_charge(1, now)
