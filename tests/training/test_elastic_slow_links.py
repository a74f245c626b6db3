"""Compression and DiLoCo in groups that lose ranks."""

import threading
from typing import Any

import numpy as np
import pytest

from shoal.training.compression.error_feedback import (
    ErrorFeedback,
    FeedbackCompression,
)
from shoal.training.diloco import OuterOptimizer
from shoal.training.elastic_group import ElasticGroup
from shoal.training.group import RankGroup
from shoal.training.rank_port import GroupEnded
from training.elastic_runs import each_rank, hosting
from training.test_elastic_group import Killed


def test_outer_steps_go_on_without_a_lost_rank() -> None:
    def train(group: ElasticGroup) -> Any:
        rank = group.place.rank
        outer = OuterOptimizer(np.full(500, rank), compression="int8")
        outer.share(group)
        for step in range(6):
            if rank == 1 and step == 3:
                raise Killed
            goal = np.full(500, 1.0 + rank, np.float32)
            assert outer.step(group, outer.parameters - goal)
        group.close()
        assert outer.steps == 6
        return outer.parameters.tobytes() + outer.momentum.tobytes()

    with hosting(3) as host:
        outcomes: list[Any] = each_rank(host, 3, train)

    assert isinstance(outcomes[1], Killed)
    assert outcomes[0] == outcomes[2]
    assert isinstance(outcomes[0], bytes)


@pytest.mark.parametrize("compression", ["topk", "int8", "auto"])
@pytest.mark.parametrize("fails", [0, 2])
def test_what_is_left_out_counts_once_when_a_rank_misses_a_result(
    compression: FeedbackCompression, fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rank fails after its last message of an operation, so the others have it.
    messages = 0
    run = RankGroup.run

    def run_and_fail(group: RankGroup, kind: Any, operation: Any) -> None:
        nonlocal messages
        run(group, kind, operation)
        if threading.current_thread().name == "fails":
            messages += 1
            if messages == 2:
                group.abort("its connection was reset")
                raise GroupEnded("its connection was reset")

    monkeypatch.setattr(RankGroup, "run", run_and_fail)

    def train(group: ElasticGroup) -> Any:
        rank = group.place.rank
        if rank == fails:
            threading.current_thread().name = "fails"
        random = np.random.default_rng(rank)
        feedback = ErrorFeedback(compression, 0.1)
        given, got = np.zeros((2, 3000))
        for _ in range(4):
            gradient = random.normal(size=3000).astype(np.float32)
            result = np.empty_like(gradient)
            group.all_reduce(gradient, "mean", result, compression=feedback)
            given += gradient
            got += result
        group.close()
        return given, got, feedback.residual

    with hosting(3) as host:
        outcomes: list[Any] = each_rank(host, 3, train)

    assert host.rendezvous.generation == 1
    given, got, residuals = (
        sum(np.array(each, float) for each in column)
        for column in zip(*outcomes, strict=True)
    )
    assert len({each[1].tobytes() for each in outcomes}) == 1
    assert np.allclose(given, got + residuals, atol=1e-3)
