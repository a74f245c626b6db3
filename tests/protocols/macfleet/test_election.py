"""Election, ranks and weights."""

import pytest

from protocols.macfleet.recorded import Case, recorded
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.election import (
    ElectionCandidate,
    compute_score,
    elect_coordinator,
    rank_nodes,
    work_weights,
)

UNTOLD = {"throughput", "thermal"}


def candidate(said: Case) -> ElectionCandidate:
    return ElectionCandidate(
        said["node_id"],
        HardwareProfile(
            gpu_cores=said["gpu_cores"],
            ram_gb=said["ram_gb"],
            bandwidth_gbps=said["bandwidth"],
        ),
    )


@recorded("cluster")
def test_nodes_are_ranked_as_upstream_does(case: Case) -> None:
    everybody = {said["node_id"]: candidate(said) for said in case["input"]["nodes"]}
    there = [
        everybody[said["node_id"]]
        for said in case["input"]["nodes"]
        if not said.get("failed")
    ]
    expected = case["expect"]

    scores = {
        node_id: compute_score(node.profile) for node_id, node in everybody.items()
    }
    assert scores == expected["scores"]
    assert elect_coordinator(there) == expected["coordinator"]
    ranked = [node.node_id for node in rank_nodes(there)]
    assert ranked == sorted(expected["ranks"], key=expected["ranks"].__getitem__)
    # Nodes do not exchange these, which change upstream's weights.
    if any(UNTOLD & said.keys() for said in case["input"]["nodes"]):
        return
    weights = dict(zip([n.node_id for n in there], work_weights(there), strict=True))
    assert weights == pytest.approx(expected["weights"])


def test_an_empty_fleet_has_no_coordinator() -> None:
    assert elect_coordinator([]) is None
