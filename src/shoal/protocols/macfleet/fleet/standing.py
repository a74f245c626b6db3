"""How the nodes of a fleet stand to each other: score, rank, weight, coordinator."""

from collections.abc import Sequence

from shoal.protocols.crowd import Listed
from shoal.protocols.macfleet.fleet.registry import COUNTED, Fleet, Node
from shoal.protocols.macfleet.scores import (
    Candidate,
    by_rank,
    coordinator,
    score,
    weights,
)


def listed(fleet: Fleet) -> Sequence[Listed]:
    """Return all nodes for people to read, ourselves first."""
    ranked = by_rank(candidates(fleet))
    leader = coordinator(ranked)
    ranks = {
        each.node_id: (rank, weight)
        for rank, (each, weight) in enumerate(zip(ranked, weights(ranked), strict=True))
    }

    def standing(node: Node) -> Listed:
        rank, weight = ranks.get(node.id, (None, 0.0))
        return Listed(
            node.id,
            str(node.address),
            node.state.value,
            node.since,
            score(node.profile),
            rank,
            weight,
            node.id == leader,
        )

    rank, weight = ranks[fleet.own_id]
    own_score = score(fleet.profile())
    leads = fleet.own_id == leader
    ourselves = Listed(fleet.own_id, "", "here", None, own_score, rank, weight, leads)
    return [ourselves, *map(standing, fleet.nodes)]


def candidates(fleet: Fleet) -> Sequence[Candidate]:
    """Return who takes part in elections, ourselves first.

    Suspected nodes do, as with real nodes, and those that failed do not.
    """
    own = Candidate(fleet.own_id, fleet.profile())
    others = (each for each in fleet.nodes if each.state in COUNTED)
    return [own, *(Candidate(each.id, each.profile) for each in others)]
