"""Training loops whose groups lose ranks and take new ones in."""

import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.slow_imports import checkpoint_folder, nn, torch
from shoal.training.elastic_group import ElasticGroup
from shoal.training.loop.plan import TrainingReport
from training.elastic_runs import LIMIT, each_rank, hosting, open_group
from training.loop.test_train import model_of, parameters_of, run, squares

STEPS = 10
ROUNDS = 12
ROUNDS_OF_ALL = 200  # with --every


class Killed(Exception):
    """A rank that stops where it is."""


def go(
    group: ElasticGroup,
    on_loss: Callable[[int], None] = lambda step: None,
    on_step: Callable[[TrainingReport], None] = lambda report: None,
    *,
    seed: int | None = None,
    **options: Any,
) -> "tuple[torch.Tensor, list[TrainingReport]]":
    """Train as one rank, up to the end of the run.

    Ranks begin with models of their own, without a ``seed``; that of rank 0 counts.
    """
    reports: list[TrainingReport] = []
    model = model_of(group.gang_ranks[group.place.rank] if seed is None else seed)

    def loss(model: "nn.Module", batch: Any) -> "torch.Tensor":
        on_loss(reports[-1].step + 1 if reports else 1)
        return squares(model, batch)

    def report(each: TrainingReport) -> None:
        reports.append(each)
        on_step(each)

    run(
        model,
        group,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        steps=STEPS,
        on_step=report,
        **options,
    )
    group.close()
    return parameters_of(model), reports


@pytest.fixture(scope="module")
def alone() -> "torch.Tensor":
    model = model_of()
    run(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), steps=STEPS)
    return parameters_of(model)


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 2])
def test_a_step_in_which_a_rank_is_lost_is_repeated_without_it(
    killed: int, alone: "torch.Tensor"
) -> None:
    def train(group: ElasticGroup) -> Any:
        rank = group.place.rank

        def on_loss(step: int) -> None:
            if rank == killed and step == 4:
                raise Killed

        return go(group, on_loss)

    with hosting(3) as host:
        outcomes: list[Any] = each_rank(host, 3, train)

    assert isinstance(outcomes.pop(killed), Killed)
    for found, reports in outcomes:
        assert torch.equal(found, outcomes[0][0])
        # All samples of all steps, each once: as one process has them.
        assert torch.allclose(found, alone, atol=1e-5)
        assert [len(each.shares) for each in reports] == [3] * 3 + [2] * 7
        assert reports[3].remarks[0].startswith(f"rank {killed} was lost at step 4")


def test_a_rank_that_is_lost_at_a_checkpoint_costs_none(
    tmp_path: Path, alone: "torch.Tensor"
) -> None:
    def train(group: ElasticGroup) -> Any:
        rank = group.place.rank

        def on_step(report: TrainingReport) -> None:
            if rank == 1 and report.step == 4:
                raise Killed  # the others write a checkpoint now

        return go(group, on_step=on_step, checkpoints=tmp_path, checkpoint_every=4)

    with hosting(3) as host:
        outcomes: list[Any] = each_rank(host, 3, train)

    assert isinstance(outcomes.pop(1), Killed)
    for found, _ in outcomes:
        assert torch.equal(found, outcomes[0][0])
        assert torch.allclose(found, alone, atol=1e-5)
    kept = checkpoint_folder.CheckpointFolder(tmp_path)
    assert kept.steps == [4, 8, 10]
    assert [kept.load(step).step for step in kept.steps] == [4, 8, 10]


class Killing:
    """A group of which one rank is killed before or in the middle of an operation."""

    def __init__(self, group: ElasticGroup, at: int, *, within: bool) -> None:
        self._group = group
        self._left = at
        self._within = within

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        if name not in ("all_reduce", "all_gather", "broadcast"):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                if self._within:
                    threading.Thread(target=self._group.abort).start()
                else:
                    raise Killed
            return found(*arguments, **options)

        return call


@pytest.mark.long
def test_each_sample_counts_once_wherever_ranks_are_killed(
    tmp_path: Path, alone: "torch.Tensor", request: pytest.FixtureRequest
) -> None:
    draw = random.Random(3)
    rounds = ROUNDS_OF_ALL if request.config.getoption("every") else ROUNDS
    for number in range(rounds):
        # About six operations a step: gradients, rows, comparisons, checkpoints.
        at = {rank: draw.randrange(1, 120) for rank in draw.sample(range(4), 2)}
        within = draw.random() < 0.5
        folder = tmp_path / str(number)

        left = survivors(folder, at, within=within)

        assert len(left) >= 2, number
        for found, reports in left:
            assert torch.equal(found, left[0][0]), number
            # All samples of all steps, each once: as one process has them.
            assert torch.allclose(found, alone, atol=1e-5), number
            assert [each.step for each in reports] == [*range(1, STEPS + 1)], number
        assert checkpoint_folder.CheckpointFolder(folder).load(STEPS).step == STEPS


def survivors(
    folder: Path, at: Mapping[int, int], *, within: bool
) -> "list[tuple[torch.Tensor, list[TrainingReport]]]":
    """Train with four ranks, of which some are killed at their n-th operation."""

    def train(group: ElasticGroup) -> "tuple[torch.Tensor, list[TrainingReport]]":
        killing: Any = Killing(group, at.get(group.place.rank, -1), within=within)
        # The same model: rank 0 may be lost before it has shared its own.
        return go(
            killing, seed=0, checkpoints=folder, checkpoint_every=3, compare_every=2
        )

    with hosting(4) as host:
        outcomes = each_rank(host, 4, train)
    return [each for each in outcomes if not isinstance(each, BaseException)]


def test_a_rank_that_joins_gets_the_state_and_has_its_share(
    alone: "torch.Tensor",
) -> None:
    joined: list[Future[Any]] = []
    waits = threading.Event()
    with ThreadPoolExecutor(1) as threads, hosting(3) as host:

        def join() -> Any:
            return go(open_group(host, 1, admits=True, name="again"))

        def train(group: ElasticGroup) -> Any:
            rank = group.place.rank

            def on_loss(step: int) -> None:
                if rank == 1 and step == 2:
                    raise Killed
                if rank == 0 and step == 3 and not joined:
                    joined.append(threads.submit(join))

            def on_step(report: TrainingReport) -> None:
                # The new rank has said so by then, however slow this machine is.
                if rank == 0 and report.step == 3:
                    while not group.waiting:
                        assert not waits.wait(0.01)

            return go(group, on_loss, on_step)

        outcomes: list[Any] = each_rank(host, 3, train, admits=True)
        outcomes[1] = joined[0].result(LIMIT)

    for found, reports in outcomes:
        assert torch.equal(found, outcomes[0][0])
        assert torch.allclose(found, alone, atol=1e-5)
        assert len(reports[-1].shares) == 3
        assert min(reports[-2].shares) > 0  # the last batch has 2 samples
    assert outcomes[1][1][0].step in (4, 5)
