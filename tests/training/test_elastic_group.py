"""Groups that lose ranks and go on: each rank in a thread, over real sockets."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shoal.training.elastic_group import ElasticGroup
from shoal.training.generations.messages import RankMissing
from shoal.training.group import RankGroup
from shoal.training.rank_port import GroupEnded
from training.elastic_runs import LIMIT, RunHost, each_rank, hosting, open_group

STEPS = 6


class Killed(Exception):
    """A rank that stops where it is."""


def test_the_collectives_of_a_group() -> None:
    def train(group: ElasticGroup) -> tuple[Any, ...]:
        rank, size = group.place
        gradient = np.full(5, rank + 1, np.float32)
        mean = group.all_reduce(gradient, "mean", np.empty_like(gradient))
        group.all_reduce(halves := np.full(2000, rank, np.float32), compression="fp16")
        part = group.reduce_scatter(np.arange(6) * rank)
        everyone = group.all_gather(np.array([rank]))
        begun = group.broadcast(np.full(3, rank), root=1)
        gathered = group.gather(np.array([rank]), root=2)
        numbers = [np.array([r]) for r in range(size)] if rank == 0 else ()
        scattered = group.scatter(np.zeros(1, np.int64), numbers)
        group.barrier()
        group.all_reduce(np.empty(0, np.float32))
        group.compare(b"the same")
        assert not group.admit()
        group.close()
        assert (gradient == rank + 1).all()
        return mean, halves, part, everyone, begun, gathered, scattered

    with hosting(3) as host:
        outcomes: list[Any] = each_rank(host, 3, train)

    for rank, outcome in enumerate(outcomes):
        mean, halves, part, everyone, begun, gathered, scattered = outcome
        assert (mean == 2).all()
        assert (halves == 3).all()
        assert part.tolist() == [3 * 2 * rank, 3 * (2 * rank + 1)]
        assert everyone.tolist() == [[0], [1], [2]]
        assert begun.tolist() == [1, 1, 1]
        assert (gathered is not None) == (rank == 2)
        assert scattered.tolist() == [rank]


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_survivors_complete_the_operation_and_go_on(killed: int) -> None:
    def train(group: ElasticGroup) -> Any:
        rank = group.place.rank
        sums = []
        for step in range(STEPS):
            if rank == killed and step == 3:
                raise Killed
            group.set_step(step)
            sums.append(float(group.all_reduce(np.full(9, 10.0**rank))[0]))
        story = [*group.story]
        group.close()
        return sums, story, [*group.gang_ranks]

    with hosting(3) as host:
        outcomes: list[Any] = each_rank(host, 3, train)

    left = [rank for rank in range(3) if rank != killed]
    assert isinstance(outcomes[killed], Killed)
    for rank in left:
        sums, story, gang_ranks = outcomes[rank]
        assert sums == [111.0] * 3 + [111.0 - 10.0**killed] * 3
        assert gang_ranks == left
        assert story[0].startswith(f"rank {killed} was lost at step 3")


def test_several_ranks_are_lost_one_after_the_other() -> None:
    def train(group: ElasticGroup) -> Any:
        rank = group.place.rank
        group.barrier()
        for step in range(STEPS):
            if rank == step:
                raise Killed
            total = group.all_reduce(np.full(1000, rank))
        group.close()
        return total

    with hosting(STEPS + 1) as host:
        outcomes: list[Any] = each_rank(host, STEPS + 1, train)

    assert all(isinstance(each, Killed) for each in outcomes[:-1])
    assert (outcomes[-1] == STEPS).all()


def test_a_paused_rank_is_left_behind_and_told() -> None:
    wakes = threading.Event()
    with hosting(3) as host:

        def train(group: ElasticGroup) -> Any:
            rank = group.place.rank
            for step in range(STEPS * 3):
                if rank == 1 and step == STEPS:
                    host.links["1"].freeze()
                    wakes.wait(LIMIT)
                    host.links["1"].thaw()
                total = group.all_reduce(np.full(9, rank + 1))
            wakes.set()
            group.close()
            return total

        outcomes: list[Any] = each_rank(host, 3, train)

    assert isinstance(outcomes[1], GroupEnded)
    assert "did not answer" in str(outcomes[1])
    assert (outcomes[0] == 4).all()
    assert (outcomes[2] == 4).all()


@pytest.mark.parametrize("transfers", [False, True])
def test_a_rank_that_computes_for_long_stays(transfers: bool) -> None:
    with hosting(2) as host:

        def train(group: ElasticGroup) -> int:
            group.barrier()
            present = group.sequence.present
            if group.place.rank == 1:
                assert host.asked.wait(LIMIT)
                if transfers:
                    present.send(np.ones(1), 0)
            elif transfers:
                present.receive(np.zeros(1), 1)
            group.barrier()
            size = group.place.size
            group.close()
            return size

        assert each_rank(host, 2, train) == [2, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda group, rank: group.all_reduce(np.full(700_000, 0.1 + rank, np.float32)),
        lambda group, rank: group.broadcast(np.full(9, rank), root=1),
        lambda group, rank: group.all_gather(np.full(9, rank)),
        lambda group, rank: group.reduce_scatter(np.full(6, rank)),
    ],
    ids=["all-reduce", "broadcast", "all-gather", "reduce-scatter"],
)
@pytest.mark.parametrize("fails", [0, 2])
@pytest.mark.parametrize("after", [1, 2], ids=["operation", "barrier"])
def test_a_result_that_one_rank_misses_is_the_same_in_all(
    call: Callable[[ElasticGroup, int], Any],
    fails: int,
    after: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The rank fails after its last message of the operation, so the others have it.
    messages = 0
    run = RankGroup.run

    def run_and_fail(group: RankGroup, kind: Any, operation: Any) -> None:
        nonlocal messages
        run(group, kind, operation)
        if threading.current_thread().name == "fails":
            messages += 1
            if messages == after:
                group.abort("its connection was reset")
                raise GroupEnded("its connection was reset")

    monkeypatch.setattr(RankGroup, "run", run_and_fail)

    def train(group: ElasticGroup) -> Any:
        rank = group.place.rank
        if rank == fails:
            threading.current_thread().name = "fails"
        result = np.copy(call(group, rank))
        total = group.all_reduce(np.full(3, 1.0))
        group.close()
        return result, total

    with hosting(3) as host:
        outcomes: list[Any] = each_rank(host, 3, train)

    assert host.rendezvous.generation == 1
    for result, total in outcomes:
        assert total.tolist() == [3.0] * 3
        assert np.array_equal(result, outcomes[0][0]) or result.shape == (2,)


def test_wrong_shapes_end_the_run_and_name_the_rank() -> None:
    def train(group: ElasticGroup) -> None:
        group.barrier()
        group.all_reduce(np.zeros(9 if group.place.rank == 1 else 8))

    with hosting(3) as host:
        outcomes: list[Any] = each_rank(host, 3, train)

    assert all(isinstance(each, GroupEnded) for each in outcomes)
    assert "do not agree on the size" in host.rendezvous.over
    assert "rank 1" in host.rendezvous.over


def test_another_operation_or_step_ends_the_run() -> None:
    def train(group: ElasticGroup) -> None:
        group.barrier()
        if group.place.rank == 1:
            group.set_step(4)
        group.all_reduce(np.zeros(8))

    with hosting(2) as host:
        outcomes: list[Any] = each_rank(host, 2, train)

    assert all(isinstance(each, GroupEnded) for each in outcomes)
    assert "a segment of step" in host.rendezvous.over


@pytest.mark.parametrize("compression", [None, "fp16", "bf16", "fp8", "int8"])
def test_all_ranks_agree_that_a_gradient_is_not_finite(compression: Any) -> None:
    def train(group: ElasticGroup) -> list[bool]:
        verdicts = []
        for odd in (0.0, np.nan, np.inf, -np.inf):
            gradient = np.ones(3000, np.float32)
            gradient[group.place.rank * 7] = odd if group.place.rank == 1 else 1
            group.all_reduce(gradient, "mean", compression=compression)
            verdicts.append(bool(np.isfinite(gradient).all()))
        group.close()
        return verdicts

    with hosting(3) as host:
        outcomes = each_rank(host, 3, train)

    assert outcomes == [[True, False, False, False]] * 3


def test_replicas_that_differ_end_the_run_and_the_odd_one_is_named() -> None:
    def train(group: ElasticGroup) -> None:
        group.compare(b"a hash")
        group.compare(b"odd" if group.place.rank == 2 else b"one")

    with hosting(4) as host:
        outcomes: list[Any] = each_rank(host, 4, train)

    assert all(isinstance(each, GroupEnded) for each in outcomes)
    assert "rank 2 does not have the parameters of the others" in host.rendezvous.over


def test_training_goes_on_while_the_coordinator_restarts() -> None:
    with hosting(3) as host:

        def train(group: ElasticGroup) -> Any:
            rank = group.place.rank
            for step in range(STEPS):
                if rank == 0 and step == 2:
                    host.restart()
                if rank == 2 and step == 4:
                    raise Killed
                total = group.all_reduce(np.full(4, rank + 1))
            gang_ranks = [*group.gang_ranks]
            group.close()
            return total, gang_ranks

        outcomes: list[Any] = each_rank(host, 3, train)

    assert isinstance(outcomes[2], Killed)
    for total, gang_ranks in outcomes[:2]:
        assert (total == 3).all()
        assert gang_ranks == [0, 1]


def test_the_root_of_an_operation_is_lost() -> None:
    def train(group: ElasticGroup) -> Any:
        group.barrier()
        if group.place.rank == 0:
            raise Killed
        replica = group.broadcast(np.full(3, 7), root=0, replicated=True)
        assert (replica == 7).all()
        group.broadcast(np.zeros(3), root=1)
        return None

    def miss(group: ElasticGroup) -> Any:
        group.barrier()
        if group.place.rank == 0:
            raise Killed
        group.broadcast(np.zeros(3), root=0)

    with hosting(3) as host:
        kept: list[Any] = each_rank(host, 3, train)
    with hosting(3) as host:
        missed: list[Any] = each_rank(host, 3, miss)

    assert isinstance(kept[0], Killed)
    assert kept[1:] == [None, None]
    assert all(isinstance(each, RankMissing) for each in missed[1:])
    assert "rank 0, the root of a broadcast, is lost" in str(missed[1])


def test_a_new_rank_joins_where_the_loop_admits_it() -> None:
    def join(host: RunHost) -> Any:
        group = open_group(host, 1, admits=True, name="new")
        assert group.is_new
        assert group.newest == 0
        state = group.broadcast(np.zeros(3), group.newest)
        total = group.all_reduce(np.ones(2))
        group.close()
        return state, total

    with hosting(3) as host, ThreadPoolExecutor(1) as threads:
        joined: list[Any] = []

        def train(group: ElasticGroup) -> Any:
            rank = group.place.rank
            group.barrier()
            if rank == 1:
                raise Killed
            group.barrier()
            if rank == 0:
                joined.append(threads.submit(join, host))
            while not group.admit():
                group.barrier()
            group.broadcast(np.full(3, 5.0), group.newest)
            total = group.all_reduce(np.ones(2))
            gang_ranks = [*group.gang_ranks]
            group.close()
            return total, gang_ranks

        outcomes: list[Any] = each_rank(host, 3, train, admits=True)
        state, total = joined[0].result(LIMIT)

    assert host.rendezvous.history[1:] == ["rank 1 has joined"]
    assert state.tolist() == [5.0] * 3
    assert total.tolist() == [3.0] * 2
    for rank in (0, 2):
        total, gang_ranks = outcomes[rank]
        assert total.tolist() == [3.0] * 2
        assert gang_ranks == [0, 1, 2]


def test_a_run_with_too_few_ranks_left_ends() -> None:
    def train(group: ElasticGroup) -> None:
        group.barrier()
        if group.place.rank == 1:
            raise Killed
        group.barrier()

    with hosting(2, least=2) as host:
        outcomes: list[Any] = each_rank(host, 2, train)

    assert isinstance(outcomes[0], GroupEnded)
    assert str(outcomes[0]).startswith("1 of 2 ranks are left, and the run needs 2")
