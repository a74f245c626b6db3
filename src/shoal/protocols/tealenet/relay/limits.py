"""A relay's limits, and the token bucket that counts against a rate."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """So much a second in the long run, and ``burst`` at once."""

    per_second: float
    burst: float


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What a relay takes: much more than honest nodes ask for.

    A node beyond ``messages`` or ``size`` is read from more slowly and loses nothing;
    beyond the other rates it is told when to try again.
    """

    messages: Rate = Rate(10_000, 100_000)
    size: Rate = Rate(64 << 20, 256 << 20)  # bytes
    openings: Rate = Rate(100, 500)  # sessions, and offers of some
    discoveries: Rate = Rate(2, 20)  # who is there?
    lookups: Rate = Rate(200_000, 2_000_000)  # at nodes, for questions of one address
    registrations: Rate = Rate(2, 20)
    pause_max: float = 1.0  # seconds for which a node is not read from, at a time
    links: int = 24_000
    links_per_address: int = 1024
    nodes: int = 20_000
    stored_size: int = 256 << 20  # bytes that all nodes' capabilities have together
    sessions: int = 200_000
    sessions_per_node: int = 1024  # that it opened
    sessions_per_address: int = 50_000  # that nodes of one address opened
    registration_timeout: float = (
        30.0  # seconds after which who has not registered must go
    )
    node_ttl: float = 300.0  # seconds that a node is known after it was heard last
    results: int = 50  # nodes that are told of to who does not say how many
    results_max: int = 1000
    results_size: int = 4 << 20  # bytes, about, that an answer has at most
    name_max: int = 256  # characters of a displayName that are kept
    session_id_max: int = 256  # characters
    capabilities_max: int = 128 << 10  # bytes


@dataclass(slots=True)
class RateBucket:
    """Counts against a rate.  Full at first."""

    rate: Rate
    level: float
    at: float  # when the level was that

    @classmethod
    def full(cls, rate: Rate, now: float) -> "RateBucket":
        return cls(rate, rate.burst, now)

    def charge(self, amount: float, now: float) -> float:
        """Take it in any case; return for how many seconds it is too much."""
        rate = self.rate
        level = self.level + (now - self.at) * rate.per_second
        self.level = level = min(level, rate.burst) - amount
        self.at = now
        return -level / rate.per_second if level < 0 else 0.0

    def try_charge(self, amount: float, now: float) -> float:
        """Take it if it is there; else return in how many seconds it will be."""
        wait = self.charge(amount, now)
        if wait:
            self.level += amount
        return wait

    def try_charge_one(self, now: float) -> float:
        """The same of one."""
        return self.try_charge(1, now)
