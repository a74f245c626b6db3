"""Coordinator, ranks and weights of the nodes of a fleet.

Source: the MacFleet document, "Election".  Every node computes them from what it knows;
the numbers in a profile are finite, so all nodes compute the same order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.protocols.macfleet.codec import hardware
from shoal.protocols.macfleet.membership import MEMBER_STATES, FleetNode, FleetRegistry
from shoal.protocols.seam.endpoints import ListedNode

NO_HARDWARE = "reported no hardware"


@dataclass(frozen=True, slots=True)
class ElectionCandidate:
    """A node in an election."""

    node_id: str
    profile: hardware.HardwareProfile = hardware.UNKNOWN_PROFILE


def compute_score(profile: hardware.HardwareProfile) -> float:
    """Return the score of a node, by which nodes are elected and ranked."""
    return 10.0 * profile.gpu_cores + 2.0 * profile.bandwidth_gbps + profile.ram_gb


def elect_coordinator(nodes: Iterable[ElectionCandidate]) -> str | None:
    """Return the id of the node with the highest score; the largest id breaks ties."""
    leader = max(
        nodes,
        key=lambda node: (compute_score(node.profile), node.node_id),
        default=None,
    )
    return None if leader is None else leader.node_id


def rank_nodes(nodes: Iterable[ElectionCandidate]) -> list[ElectionCandidate]:
    """Return the nodes in order of rank: by score, and by id on a tie.

    On a tie rank 0 is therefore not the coordinator, as in upstream.
    """
    return sorted(nodes, key=lambda node: (-compute_score(node.profile), node.node_id))


def work_weights(nodes: Sequence[ElectionCandidate]) -> list[float]:
    """Return the nodes' weights, in their order; the sum is 1.

    Nodes do not tell each other what else changes upstream's weights: how fast they
    are, and how hot.
    """
    cores = [node.profile.gpu_cores for node in nodes]
    total = sum(cores)
    if total <= 0:
        return [1 / len(nodes) for _ in nodes]
    return [each / total for each in cores]


def membership_table(registry: FleetRegistry) -> Sequence[ListedNode]:
    """Return a row for each node, this node first."""
    ranked = rank_nodes(election_candidates(registry))
    leader = elect_coordinator(ranked)
    ranks = {
        each.node_id: (rank, weight)
        for rank, (each, weight) in enumerate(
            zip(ranked, work_weights(ranked), strict=True)
        )
    }

    def list_node(node: FleetNode) -> ListedNode:
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
            note=_note(node),
            hardware=hardware.reported_hardware(node.profile),
        )

    rank, weight = ranks[registry.own_id]
    own = registry.own_profile()
    own_entry = ListedNode(
        registry.own_id,
        "",
        "here",
        None,
        compute_score(own),
        rank,
        weight,
        registry.own_id == leader,
        hardware=hardware.reported_hardware(own),
    )
    return [own_entry, *map(list_node, registry.nodes)]


def _note(node: FleetNode) -> str:
    """Return a remark on a member whose hardware is not known; empty: none."""
    if node.has_hardware or node.state not in MEMBER_STATES:
        return ""
    if node.stated_port:
        return NO_HARDWARE
    return f"{NO_HARDWARE}; port {node.data_port} is dialled"


def election_candidates(registry: FleetRegistry) -> Sequence[ElectionCandidate]:
    """Return the candidates of an election, this node first.

    Suspected nodes are candidates, as in upstream; failed nodes are not.
    """
    this_node = ElectionCandidate(registry.own_id, registry.own_profile())
    candidates = (each for each in registry.nodes if each.state in MEMBER_STATES)
    return [
        this_node,
        *(ElectionCandidate(each.id, each.profile) for each in candidates),
    ]
