"""Election, ranks and shares of the work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.macfleet.recorded import Case, recorded
from shoal.domain.errors import InvalidRequest
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.election import (
    ElectionCandidate,
    ThermalState,
    batch_shares,
    compute_score,
    elect_coordinator,
    rank_nodes,
    sample_ranges,
    work_weights,
)


def candidate(said: Case) -> ElectionCandidate:
    return ElectionCandidate(
        said["node_id"],
        HardwareProfile(
            gpu_cores=said["gpu_cores"],
            ram_gb=said["ram_gb"],
            bandwidth_gbps=said["bandwidth"],
        ),
        said.get("throughput", 0.0),
        ThermalState[said.get("thermal", "nominal").upper()],
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
    shares = dict(zip([n.node_id for n in there], work_weights(there), strict=True))
    assert shares == pytest.approx(expected["weights"])
    assert [
        [each.node_id, each.rank, each.samples, each.viable]
        for each in batch_shares(there, case["input"]["global_batch"])
    ] == expected["assignments"]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.integers(20, 10_000))
def test_every_sample_has_a_node_and_every_node_a_sample(
    speeds: list[float], batch: int
) -> None:
    nodes = [
        ElectionCandidate(f"n{n}", throughput=speed) for n, speed in enumerate(speeds)
    ]

    divided = batch_shares(nodes, batch)

    assert sum(each.samples for each in divided) == batch
    assert min(each.samples for each in divided) >= 1
    assert [each.rank for each in divided] == [*range(len(nodes))]


def test_a_batch_that_is_too_small_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="a batch of 1 samples is too small"):
        batch_shares([ElectionCandidate("a"), ElectionCandidate("b")], 1)


def test_each_rank_has_its_slice_of_an_epoch() -> None:
    assert sample_ranges([0.5, 0.3, 0.2], 11) == [range(5), range(5, 8), range(8, 11)]
    assert sample_ranges([1.0], 4) == [range(4)]


def test_an_empty_fleet_has_no_coordinator() -> None:
    assert elect_coordinator([]) is None
    assert batch_shares([], 10) == []
