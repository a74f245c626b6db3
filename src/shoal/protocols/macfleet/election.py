"""Coordinator, ranks, weights and batch shares of the nodes of a fleet.

Source: the MacFleet document, "Election".  Every node computes them for itself from
what it knows; the numbers of a profile are finite, so every node finds the same order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise

from shoal.domain.errors import InvalidRequest
from shoal.protocols.macfleet.codec.hardware import UNKNOWN_PROFILE, HardwareProfile
from shoal.protocols.macfleet.membership import MEMBER_STATES, FleetNode, FleetRegistry
from shoal.protocols.seam.multi_peer import ListedNode

VIABLE_MIN = 4  # samples: it does not pay to send a node fewer


class ThermalState(Enum):
    """How hot a machine is, and the share of its speed that is left then."""

    NOMINAL = 1.0
    FAIR = 0.9
    SERIOUS = 0.7
    CRITICAL = 0.3


@dataclass(frozen=True, slots=True)
class ElectionCandidate:
    """A node that is there.  ``throughput`` is in samples per second; 0: not known."""

    node_id: str
    profile: HardwareProfile = UNKNOWN_PROFILE
    throughput: float = 0.0
    thermal: ThermalState = ThermalState.NOMINAL


@dataclass(frozen=True, slots=True)
class BatchShare:
    """How many samples of a batch a node gets; others would rather do without few."""

    node_id: str
    rank: int
    samples: int

    @property
    def viable(self) -> bool:
        return self.samples >= VIABLE_MIN


def compute_score(profile: HardwareProfile) -> float:
    """Return how much a node is worth as the one that leads."""
    return 10.0 * profile.gpu_cores + 2.0 * profile.bandwidth_gbps + profile.ram_gb


def elect_coordinator(nodes: Iterable[ElectionCandidate]) -> str | None:
    """Return who leads: the highest score, and of equals the last by name."""
    leader = max(
        nodes, key=lambda n: (compute_score(n.profile), n.node_id), default=None
    )
    return None if leader is None else leader.node_id


def rank_nodes(nodes: Iterable[ElectionCandidate]) -> list[ElectionCandidate]:
    """Return the nodes from rank 0 on: by score, and equals by name.

    So on a tie rank 0 is not the coordinator: real peers have it like this.
    """
    return sorted(nodes, key=lambda n: (-compute_score(n.profile), n.node_id))


def work_weights(nodes: Sequence[ElectionCandidate]) -> list[float]:
    """Return the nodes' shares of the work, in their order; together they are 1."""
    speeds = [_speed(node) for node in nodes]
    total = sum(speeds)
    if total <= 0:
        return [1 / len(nodes) for _ in nodes]
    return [speed / total for speed in speeds]


def batch_shares(nodes: Iterable[ElectionCandidate], batch: int) -> list[BatchShare]:
    """Divide a batch among nodes, from rank 0 on; each gets a sample or more.

    Raises InvalidRequest if there are not enough samples for that.
    """
    ranked = rank_nodes(nodes)
    if batch < len(ranked):
        raise InvalidRequest(
            f"a batch of {batch} samples is too small for {len(ranked)} nodes: take "
            "a larger one, or fewer nodes"
        )
    divided: list[BatchShare] = []
    left = batch
    for rank, (node, weight) in enumerate(
        zip(ranked, work_weights(ranked), strict=True)
    ):
        after = len(ranked) - rank - 1
        # Real peers may leave the last one less than nothing.
        samples = min(max(1, int(batch * weight)), left - after) if after else left
        divided.append(BatchShare(node.node_id, rank, samples))
        left -= samples
    return divided


def sample_ranges(shares: Sequence[float], total: int) -> list[range]:
    """Divide samples 0 to ``total`` by shares that are 1 together.

    The last one has what is left.  These are what the weighted sampler gives each rank
    of an epoch.
    """
    counts = [int(total * share) for share in shares[:-1]]
    bounds = [*accumulate(counts, initial=0), total]
    return [range(begin, end) for begin, end in pairwise(bounds)]


def _speed(node: ElectionCandidate) -> float:
    measured = node.throughput if node.throughput > 0 else node.profile.gpu_cores
    return measured * node.thermal.value


def membership_table(registry: FleetRegistry) -> Sequence[ListedNode]:
    """Return all nodes for people to read, ourselves first."""
    ranked = rank_nodes(election_candidates(registry))
    leader = elect_coordinator(ranked)
    ranks = {
        each.node_id: (rank, weight)
        for rank, (each, weight) in enumerate(
            zip(ranked, work_weights(ranked), strict=True)
        )
    }

    def row_of(node: FleetNode) -> ListedNode:
        rank, weight = ranks.get(node.id, (None, 0.0))
        return ListedNode(
            node.id,
            str(node.address),
            node.state.value,
            node.since,
            compute_score(node.profile),
            rank,
            weight,
            node.id == leader,
        )

    rank, weight = ranks[registry.own_id]
    own_score = compute_score(registry.own_profile())
    leads = registry.own_id == leader
    ourselves = ListedNode(
        registry.own_id, "", "here", None, own_score, rank, weight, leads
    )
    return [ourselves, *map(row_of, registry.nodes)]


def election_candidates(registry: FleetRegistry) -> Sequence[ElectionCandidate]:
    """Return who takes part in elections, ourselves first.

    Suspected nodes do, as with real nodes, and those that failed do not.
    """
    own = ElectionCandidate(registry.own_id, registry.own_profile())
    others = (each for each in registry.nodes if each.state in MEMBER_STATES)
    return [own, *(ElectionCandidate(each.id, each.profile) for each in others)]
