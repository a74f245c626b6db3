"""Who leads a fleet, who is which rank, and how much of a batch each node gets.

Source: the MacFleet document, "Election".  Every node computes this for itself, of what
it knows; profiles have finite numbers, so that there is one order for all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise

from shoal.domain.errors import InvalidRequest
from shoal.protocols.macfleet.wire.hardware import UNKNOWN_PROFILE, Profile

VIABLE_MIN = 4  # samples: it does not pay to send a node fewer


class Thermal(Enum):
    """How hot a machine is, and the share of its speed that is left then."""

    NOMINAL = 1.0
    FAIR = 0.9
    SERIOUS = 0.7
    CRITICAL = 0.3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that is there.  ``throughput`` is in samples per second; 0: not known."""

    node_id: str
    profile: Profile = UNKNOWN_PROFILE
    throughput: float = 0.0
    thermal: Thermal = Thermal.NOMINAL


@dataclass(frozen=True, slots=True)
class Portion:
    """How many samples of a batch a node gets; others would rather do without few."""

    node_id: str
    rank: int
    samples: int

    @property
    def viable(self) -> bool:
        return self.samples >= VIABLE_MIN


def score(profile: Profile) -> float:
    """Return how much a node is worth as the one that leads."""
    return 10.0 * profile.gpu_cores + 2.0 * profile.bandwidth_gbps + profile.ram_gb


def coordinator(nodes: Iterable[Candidate]) -> str | None:
    """Return who leads: the highest score, and of equals the last by name."""
    leader = max(nodes, key=lambda n: (score(n.profile), n.node_id), default=None)
    return None if leader is None else leader.node_id


def by_rank(nodes: Iterable[Candidate]) -> list[Candidate]:
    """Return the nodes from rank 0 on: by score, and equals by name.

    So on a tie rank 0 is not the coordinator: real peers have it like this.
    """
    return sorted(nodes, key=lambda n: (-score(n.profile), n.node_id))


def weights(nodes: Sequence[Candidate]) -> list[float]:
    """Return the nodes' shares of the work, in their order; together they are 1."""
    speeds = [_speed(node) for node in nodes]
    total = sum(speeds)
    if total <= 0:
        return [1 / len(nodes) for _ in nodes]
    return [speed / total for speed in speeds]


def portions(nodes: Iterable[Candidate], batch: int) -> list[Portion]:
    """Divide a batch among nodes, from rank 0 on; each gets a sample or more.

    Raises InvalidRequest if there are not enough samples for that.
    """
    ranked = by_rank(nodes)
    if batch < len(ranked):
        raise InvalidRequest(
            f"a batch of {batch} samples is too small for {len(ranked)} nodes: take "
            "a larger one, or fewer nodes"
        )
    divided: list[Portion] = []
    left = batch
    for rank, (node, weight) in enumerate(zip(ranked, weights(ranked), strict=True)):
        after = len(ranked) - rank - 1
        # Real peers may leave the last one less than nothing.
        samples = min(max(1, int(batch * weight)), left - after) if after else left
        divided.append(Portion(node.node_id, rank, samples))
        left -= samples
    return divided


def slices(shares: Sequence[float], total: int) -> list[range]:
    """Divide samples 0 to ``total`` by shares that are 1 together.

    The last one has what is left.  These are what the weighted sampler gives each rank
    of an epoch.
    """
    counts = [int(total * share) for share in shares[:-1]]
    bounds = [*accumulate(counts, initial=0), total]
    return [range(begin, end) for begin, end in pairwise(bounds)]


def _speed(node: Candidate) -> float:
    measured = node.throughput if node.throughput > 0 else node.profile.gpu_cores
    return measured * node.thermal.value
