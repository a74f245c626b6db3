from typing import Any

import numpy as np
import pytest

from shoal.domain.errors import InvalidRequest
from shoal.training.all_reduces import Compression
from shoal.training.compression.error_feedback import (
    ErrorFeedback,
    FeedbackCompression,
)
from shoal.training.diloco import OuterOptimizer
from shoal.training.group import RankGroup
from shoal.training.rank_port import GroupEnded
from training.test_group import groups, together

Array = np.ndarray[Any, np.dtype[Any]]

SIZE = 5000


def target(rank: int) -> Array:
    """Return what a rank's data asks for; all ranks together ask for the mean."""
    return np.random.default_rng(rank).normal(size=SIZE).astype(np.float32)


def train_alone(rank: int, parameters: Array) -> Array:
    """Take a few steps down the slope of the distance from the target."""
    for _ in range(5):
        parameters = parameters - np.float32(0.1) * (parameters - target(rank))
    return parameters


def outer_step(group: RankGroup, outer: OuterOptimizer) -> bool:
    local = train_alone(group.place.rank, outer.parameters)
    return outer.step(group, outer.parameters - local)


@pytest.mark.parametrize("compression", [None, "fp16", "bf16", "fp8", "int8", "auto"])
def test_ranks_have_the_same_bits_after_each_outer_step(
    compression: Compression | None,
) -> None:
    def train(group: RankGroup) -> tuple[list[bytes], Array]:
        outer = OuterOptimizer(np.zeros(SIZE), compression=compression)
        bits = []
        for _ in range(25):
            assert outer_step(group, outer)
            bits.append(outer.parameters.tobytes() + outer.momentum.tobytes())
        assert outer.steps == 25
        return bits, outer.parameters

    with groups(3) as members:
        outcomes = together(members, train)

    assert outcomes[0][0] == outcomes[1][0] == outcomes[2][0]
    best = np.mean([target(rank) for rank in range(3)], axis=0)
    distance = np.linalg.norm(outcomes[0][1] - best) / np.linalg.norm(best)
    assert distance < 0.1, "all ranks together find what suits all"


def test_an_outer_step_is_one_of_nesterovs_momentum() -> None:
    random = np.random.default_rng(0)
    outer = OuterOptimizer(np.zeros(40), rate=0.7, momentum=0.9)
    parameters, velocity = np.zeros((2, 40))

    with groups(1) as [group]:
        for _ in range(6):
            slope = random.normal(size=40)
            outer.step(group, slope)
            # Sutskever and others, 2013, as PyTorch's SGD(nesterov=True) has it.
            velocity = 0.9 * velocity + slope
            parameters = parameters - 0.7 * (slope + 0.9 * velocity)

    assert np.allclose(outer.parameters, parameters, atol=1e-5)
    assert outer.parameters.dtype == outer.momentum.dtype == np.float32


def test_a_step_without_momentum_takes_the_mean_of_the_ranks() -> None:
    def train(group: RankGroup) -> bool:
        outer = OuterOptimizer(np.ones(SIZE), rate=1, momentum=0)
        outer.step(group, outer.parameters - target(group.place.rank))
        mean = (target(0) + target(1)) / 2
        return np.allclose(outer.parameters, mean, atol=1e-6)

    with groups(2) as members:
        assert together(members, train) == [True, True]


def test_a_failed_outer_step_changes_nothing_and_is_taken_again() -> None:
    def fail(group: RankGroup) -> OuterOptimizer:
        outer = OuterOptimizer(np.ones(SIZE), compression=ErrorFeedback("int8"))
        assert outer_step(group, outer)
        group.barrier()
        if group.place.rank == 2:
            group.abort("killed")
        parameters, momentum = outer.parameters.copy(), outer.momentum.copy()
        with pytest.raises(GroupEnded):
            outer_step(group, outer)
        assert np.array_equal(outer.parameters, parameters)
        assert np.array_equal(outer.momentum, momentum)
        assert outer.steps == 1
        return outer

    with groups(3) as members:
        outers = together(members, fail)
    with groups(2) as members:
        steps = together(members, lambda g: outer_step(g, outers[g.place.rank]))

    assert steps == [True, True]
    assert outers[0].parameters.tobytes() == outers[1].parameters.tobytes()
    assert outers[0].steps == outers[1].steps == 2


def test_a_difference_that_is_not_finite_drops_the_step_of_all() -> None:
    def train(group: RankGroup) -> list[Any]:
        outer = OuterOptimizer(np.ones(SIZE), compression="int8")
        difference = np.ones(SIZE, np.float32)
        if group.place.rank == 1:
            difference[7] = np.nan
        dropped = not outer.step(group, difference)
        kept = outer.step(group, np.ones(SIZE, np.float32))
        return [dropped, kept, outer.steps, outer.parameters.tobytes()]

    with groups(3) as members:
        outcomes = together(members, train)

    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][:3] == [True, True, 1]


def test_a_rank_that_joins_takes_over_the_state() -> None:
    old = OuterOptimizer(np.zeros(SIZE))
    with groups(1) as [alone]:
        for _ in range(3):
            outer_step(alone, old)

    def train(group: RankGroup) -> bytes:
        outer = old if group.place.rank == 1 else OuterOptimizer(np.ones(SIZE))
        outer.share(group, root=1)
        assert outer.steps == 3
        for _ in range(2):
            outer_step(group, outer)
        return outer.parameters.tobytes() + outer.momentum.tobytes()

    with groups(3) as members:
        assert len(set(together(members, train))) == 1


def test_a_saved_state_goes_on_with_the_same_bits() -> None:
    first, second = OuterOptimizer(np.zeros(SIZE)), OuterOptimizer(np.ones(SIZE))
    with groups(1) as [group]:
        outer_step(group, first)
        second.restore(first.state())
        for each in (first, second):
            outer_step(group, each)

    assert first.parameters.tobytes() == second.parameters.tobytes()
    assert first.momentum.tobytes() == second.momentum.tobytes()
    assert first.steps == second.steps == 2
    with pytest.raises(InvalidRequest, match="a state of 3 parameters, expected 5000"):
        first.restore({"parameters": np.ones(3), "momentum": np.ones(3), "steps": 1})


@pytest.mark.parametrize("compression", ["topk", "auto"])
def test_differences_must_not_wait(compression: FeedbackCompression) -> None:
    with pytest.raises(InvalidRequest, match="use int8"):
        OuterOptimizer(np.zeros(SIZE), compression=ErrorFeedback(compression))


def test_models_of_different_sizes_are_refused() -> None:
    def train(group: RankGroup) -> None:
        outer = OuterOptimizer(np.zeros(3 + group.place.rank))
        with pytest.raises(InvalidRequest, match="ranks with 3 to 4 parameters"):
            outer.share(group)
        with pytest.raises(InvalidRequest, match="2 differences, expected"):
            outer.step(group, np.zeros(2))

    with groups(2) as members:
        together(members, train)
