"""Who leads, who is which rank, and who gets how much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.macfleet.recorded import Case, recorded
from shoal.domain.errors import InvalidRequest
from shoal.protocols.macfleet.scores import (
    Candidate,
    Thermal,
    by_rank,
    coordinator,
    portions,
    score,
    slices,
    weights,
)
from shoal.protocols.macfleet.wire.hardware import Profile


def candidate(said: Case) -> Candidate:
    return Candidate(
        said["node_id"],
        Profile(
            gpu_cores=said["gpu_cores"],
            ram_gb=said["ram_gb"],
            bandwidth_gbps=said["bandwidth"],
        ),
        said.get("throughput", 0.0),
        Thermal[said.get("thermal", "nominal").upper()],
    )


@recorded("cluster")
def test_fleets_are_ordered_as_real_peers_order_them(case: Case) -> None:
    everybody = {said["node_id"]: candidate(said) for said in case["input"]["nodes"]}
    there = [
        everybody[said["node_id"]]
        for said in case["input"]["nodes"]
        if not said.get("failed")
    ]
    expected = case["expect"]

    scores = {node_id: score(node.profile) for node_id, node in everybody.items()}
    assert scores == expected["scores"]
    assert coordinator(there) == expected["coordinator"]
    ranked = [node.node_id for node in by_rank(there)]
    assert ranked == sorted(expected["ranks"], key=expected["ranks"].__getitem__)
    shares = dict(zip([n.node_id for n in there], weights(there), strict=True))
    assert shares == pytest.approx(expected["weights"])
    assert [
        [each.node_id, each.rank, each.samples, each.viable]
        for each in portions(there, case["input"]["global_batch"])
    ] == expected["assignments"]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.integers(20, 10_000))
def test_every_sample_is_somebodys_and_everybody_has_one(
    speeds: list[float], batch: int
) -> None:
    nodes = [Candidate(f"n{n}", throughput=speed) for n, speed in enumerate(speeds)]

    divided = portions(nodes, batch)

    assert sum(each.samples for each in divided) == batch
    assert min(each.samples for each in divided) >= 1
    assert [each.rank for each in divided] == [*range(len(nodes))]


def test_a_batch_that_is_too_small_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="a batch of 1 samples is too small"):
        portions([Candidate("a"), Candidate("b")], 1)


def test_of_an_epoch_each_rank_has_its_slice() -> None:
    assert slices([0.5, 0.3, 0.2], 11) == [range(5), range(5, 8), range(8, 11)]
    assert slices([1.0], 4) == [range(4)]


def test_nobody_leads_where_nobody_is() -> None:
    assert coordinator([]) is None
    assert portions([], 10) == []
