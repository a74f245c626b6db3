"""Training loops of one rank and of several, over sockets, each in a thread."""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shoal
from harness.slow_imports import checkpoint_folder, nn, torch
from shoal.domain.errors import InvalidRequest
from shoal.training.group import RankGroup
from shoal.training.launch.script_lines import hash_in, values_in
from shoal.training.loop.plan import TrainingReport
from shoal.training.rank_port import GroupEnded
from training.checkpoints.test_folder import file_size_max
from training.test_group import groups, together

if TYPE_CHECKING:
    from shoal.training.loop.plan import TrainingResult

SAMPLES = 50
BATCH = 12


class Points:
    """A data set that counts how often each sample is used."""

    def __init__(self, length: int = SAMPLES) -> None:
        numbers = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(length, 4, generator=numbers)
        self.used: list[int] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int, /) -> "tuple[torch.Tensor, torch.Tensor]":
        self.used.append(index)
        return self.inputs[index], self.inputs[index].sum().reshape(1)


_drawing = threading.Lock()  # the random numbers of all threads are the same ones


def model_of(seed: int = 0, *layers: "nn.Module") -> "nn.Module":
    with _drawing, torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 16), *layers, nn.Tanh(), nn.Linear(16, 1))


def squares(
    model: "nn.Module", batch: "tuple[torch.Tensor, torch.Tensor]"
) -> "torch.Tensor":
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def run(model: "nn.Module", group: Any = None, **options: Any) -> "TrainingResult":
    optimizer = options.pop("optimizer", None) or torch.optim.Adam(
        model.parameters(), lr=0.01
    )
    return shoal.train(
        model,
        options.pop("dataset", None) or Points(),
        loss=options.pop("loss", squares),
        optimizer=optimizer,
        group=group,
        **{"batch": BATCH, "equal_shares": True, **options},
    )


def parameters_of(model: "nn.Module") -> "torch.Tensor":
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a rank
    yield
    torch.set_num_threads(before)


def test_ranks_train_as_one_process_does() -> None:
    # A step's gradient is the mean of all its samples, whatever the shares.
    alone = model_of()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    expected = run(alone, optimizer=optimizer, epochs=2)
    datasets = [Points() for _ in range(3)]
    reports: list[TrainingReport] = []

    def one(group: RankGroup) -> "tuple[TrainingResult, torch.Tensor]":
        rank = group.place.rank
        model = model_of(rank)  # rank 0's counts
        result = run(
            model,
            group,
            dataset=datasets[rank],
            optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
            epochs=2,
            micro_batch=3,
            on_step=reports.append if rank == 0 else None,
        )
        return result, parameters_of(model)

    with groups(3) as members:
        outcomes = together(members, one)

    for result, found in outcomes:
        assert torch.equal(found, outcomes[0][1])
        assert torch.allclose(found, parameters_of(alone), atol=1e-5)
        assert result.loss == pytest.approx(expected.loss, rel=1e-4)
        assert (result.step, result.epoch) == (10, 2)
    used = [index for each in datasets for index in each.used]
    assert sorted(used) == sorted([*range(SAMPLES)] * 2)
    assert [report.step for report in reports] == [*range(1, 11)]
    assert [sum(report.shares) for report in reports] == [12, 12, 12, 12, 2] * 2
    assert reports[-1].done == 1
    size = parameters_of(alone).numel() * 4
    assert reports[-1].sent == 10 * (2 * 2 * size // 3)
    assert str(reports[0]).startswith("step 1: loss ")


def test_gradients_are_exact_means_with_unequal_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = model_of()
    run(alone, optimizer=torch.optim.SGD(alone.parameters(), lr=0.05), epochs=3)
    clock = threading.local()  # of each rank
    monkeypatch.setattr(
        "shoal.training.loop.training_loop.perf_counter",
        lambda: getattr(clock, "now", 0.0),
    )

    def one(group: RankGroup) -> "tuple[torch.Tensor, list[TrainingReport]]":
        reports: list[TrainingReport] = []
        model = model_of()

        def slower_on_rank_1(model: "nn.Module", batch: Any) -> "torch.Tensor":
            seconds = len(batch[0]) * (0.4 if group.place.rank == 1 else 0.1)
            clock.now = getattr(clock, "now", 0.0) + seconds
            return squares(model, batch)

        run(
            model,
            group,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
            loss=slower_on_rank_1,
            epochs=3,
            equal_shares=False,
            on_step=reports.append,
        )
        return parameters_of(model), reports

    with groups(2) as members:
        (first, reports), (second, others) = together(members, one)

    assert torch.equal(first, second)
    assert torch.allclose(first, parameters_of(alone), atol=1e-5)
    assert [each.shares for each in reports] == [each.shares for each in others]
    assert [[*each.shares] for each in reports[:5]] == [[6, 6]] * 4 + [[1, 1]]
    assert [[*each.shares] for each in reports[5:]] == ([[10, 2]] * 4 + [[2, 0]]) * 2
    assert reports[0].speeds == pytest.approx([10, 2.5])
    assert reports[0].sync == 0


def everything_random() -> tuple[Any, ...]:
    return random.random(), float(np.random.random()), float(torch.rand(1))


def test_a_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    # With dropout, BatchNorm, momentum and a schedule, all of which have a state.
    def go(folder: Path, seed: int, *steps: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        for count in steps:
            model = model_of(seed, nn.BatchNorm1d(16), nn.Dropout(0.3))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
            result = run(
                model,
                optimizer=optimizer,
                scheduler=scheduler,
                steps=count,
                checkpoints=folder,
                checkpoint_every=4,
                seed=2,
            )
            assert result.step == count
            # Another process begins with other numbers.
            seed += 1
            if count != steps[-1]:
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed)
        buffers = torch.cat([each.reshape(-1).double() for each in model.buffers()])
        state = optimizer.state_dict()["state"][0]["max_exp_avg_sq"]
        return parameters_of(model), buffers, state, *everything_random()

    undisturbed = go(tmp_path / "a", 1, 13)
    resumed = go(tmp_path / "b", 1, 4, 8, 13)

    for one, other in zip(undisturbed, resumed, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 2), (1, 3)])
def test_a_group_goes_on_from_a_checkpoint(
    tmp_path: Path, before: int, after: int
) -> None:
    def go(
        folder: Path, size: int, steps: int
    ) -> "list[tuple[torch.Tensor, list[int], list[str]]]":
        def one(group: RankGroup) -> "tuple[torch.Tensor, list[int], list[str]]":
            model, dataset, remarks = model_of(group.place.rank), Points(), []
            run(
                model,
                group,
                dataset=dataset,
                steps=steps,
                checkpoints=folder,
                on_step=lambda report: remarks.extend(report.remarks),
            )
            return parameters_of(model), dataset.used, remarks

        with groups(size) as members:
            return together(members, one)

    undisturbed = go(tmp_path / "a", before, 9)
    first = go(tmp_path / "b", before, 3)
    second = go(tmp_path / "b", after, 9)

    used = sorted(at for _, some, _ in [*first, *second] for at in some)
    assert used == sorted(at for _, some, _ in undisturbed for at in some)
    for found, _, _ in second:
        assert torch.equal(found, second[0][0])
        if before == after:
            assert torch.equal(found, undisturbed[0][0]), "bit by bit"
        else:
            assert torch.allclose(found, undisturbed[0][0], atol=1e-5)
    remarks = [remark for _, _, some in second for remark in some]
    assert bool(remarks) == (before != after)


@pytest.mark.parametrize("compression", ["int8", "topk"])
def test_compressed_gradients_train_and_keep_replicas_equal(compression: str) -> None:
    def one(group: RankGroup) -> "tuple[TrainingResult, torch.Tensor]":
        model = model_of()
        steps = 0

        def loss(model: "nn.Module", batch: Any) -> "torch.Tensor":
            nonlocal steps
            steps += 1
            return squares(model, batch) * (float("nan") if steps == 3 else 1)

        result = run(model, group, loss=loss, epochs=8, compression=compression)
        return result, parameters_of(model)

    with groups(2) as members:
        (result, first), (_, second) = together(members, one)

    assert torch.equal(first, second)
    assert result.skipped == 1
    assert bool(first.isfinite().all()), "what was left out is finite as well"
    assert result.loss < 3


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_full_disk_at_a_checkpoint_ends_nothing(tmp_path: Path) -> None:
    disk = ExitStack()

    def one(group: RankGroup) -> "tuple[TrainingResult, torch.Tensor, dict[int, Any]]":
        remarks = {}

        def on_step(report: TrainingReport) -> None:
            remarks[report.step] = [*report.remarks]
            # Before the checkpoint of the step, which no rank writes without rank 0.
            if group.place.rank == 0 and report.step == 4:
                disk.enter_context(file_size_max(100))
            if group.place.rank == 0 and report.step == 5:
                disk.close()

        model = model_of()
        result = run(
            model,
            group,
            steps=8,
            checkpoints=tmp_path,
            checkpoint_every=2,
            on_step=on_step,
        )
        return result, parameters_of(model), remarks

    with disk, groups(2) as members:
        outcomes = together(members, one)

    alone = model_of()
    run(alone, steps=8)
    for result, found, remarks in outcomes:
        assert result.step == 8
        assert torch.allclose(found, parameters_of(alone), atol=1e-5)
        failed = (
            f"checkpoint failed: rank 0: cannot write to {tmp_path}: File too large"
        )
        assert failed in remarks.pop(5)
        assert not any(remarks.values())
    assert checkpoint_folder.CheckpointFolder(tmp_path).steps == [2, 6, 8]


def test_a_gradient_that_is_not_finite_is_skipped_by_all() -> None:
    def one(group: RankGroup) -> "tuple[TrainingResult, torch.Tensor, list[str]]":
        model, remarks = model_of(), []
        steps = 0

        def sometimes_nothing(model: "nn.Module", batch: Any) -> "torch.Tensor":
            nonlocal steps
            steps += 1
            factor = float("inf") if steps == 2 and group.place.rank == 1 else 1.0
            return squares(model, batch) * factor

        result = run(
            model,
            group,
            loss=sometimes_nothing,
            on_step=lambda report: remarks.extend(report.remarks),
        )
        return result, parameters_of(model), remarks

    with groups(2) as members:
        outcomes = together(members, one)

    for result, found, remarks in outcomes:
        assert (result.step, result.skipped) == (5, 1)
        assert torch.equal(found, outcomes[0][1])
        assert bool(found.isfinite().all())
        assert remarks == ["skipped: the gradient of ranks [1] was not finite"]


def fail_on_rank(
    rank: int, error: "Callable[[nn.Module], None]"
) -> Callable[[RankGroup], BaseException | None]:
    def one(group: RankGroup) -> BaseException | None:
        model = model_of()
        count = 0

        def loss(model: "nn.Module", batch: Any) -> "torch.Tensor":
            nonlocal count
            count += 1
            if count == 3 and group.place.rank == rank:
                error(model)
            return squares(model, batch)

        try:
            run(model, group, loss=loss, compare_every=2)
        except Exception as caught:
            return caught
        return None

    return one


def test_hash_is_reported_at_each_comparison(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_RUN", "r")

    with groups(2) as members:
        together(members, fail_on_rank(2, lambda model: None))

    found = [
        each for line in capfd.readouterr().out.split("\n") if (each := hash_in(line))
    ]
    steps = {step for step, _ in found}
    assert min(steps) == 2
    assert len(found) == 2 * len(steps)
    for step in steps:
        assert len({digest for at, digest in found if at == step}) == 1


def test_replicas_that_differ_end_the_run_and_name_the_odd_rank() -> None:
    def change(model: "nn.Module") -> None:
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1e-6

    with groups(3) as members:
        errors = together(members, fail_on_rank(2, change))

    for error in errors:
        assert type(error).__name__ == "ReplicasDiffer"
        assert str(error) == (
            "the replicas differ after step 4: rank 2 does not have the parameters of "
            "the others"
        )


def test_an_error_of_one_rank_ends_the_others_at_once() -> None:
    def fail(model: "nn.Module") -> None:
        raise ZeroDivisionError

    with groups(3) as members:
        errors = together(members, fail_on_rank(1, fail))

    assert isinstance(errors[1], ZeroDivisionError)
    assert isinstance(errors[0], GroupEnded)
    assert isinstance(errors[2], GroupEnded)


def test_ranks_that_train_different_things_are_refused() -> None:
    def one(group: RankGroup) -> str:
        dataset = Points(60 if group.place.rank == 1 else 50)
        with pytest.raises(InvalidRequest) as raised:
            run(model_of(), group, dataset=dataset)
        return str(raised.value)

    with groups(2) as members:
        errors = together(members, one)

    assert (
        errors == ["rank 1 has another data set than rank 0: 60, and rank 0 has 50"] * 2
    )


def test_a_data_set_smaller_than_the_group_is_refused() -> None:
    def one(group: RankGroup) -> None:
        with pytest.raises(
            InvalidRequest, match="has 1 samples, and there are 2 ranks"
        ):
            run(model_of(), group, dataset=Points(1))

    with groups(2) as members:
        together(members, one)


def test_parameters_of_any_dtype_are_trained(tmp_path: Path) -> None:
    # bfloat16 is added as float32; frozen and unused parameters are left as they are.
    def one(group: RankGroup) -> "nn.Module":
        model = nn.ModuleDict(
            {
                "halves": nn.Linear(4, 1, dtype=torch.bfloat16),
                "doubles": nn.Linear(4, 1, dtype=torch.float64),
                "frozen": nn.Linear(4, 1).requires_grad_(False),
                "unused": nn.Linear(4, 1),
            }
        )

        def loss(
            model: Any, batch: "tuple[torch.Tensor, torch.Tensor]"
        ) -> "torch.Tensor":
            both = model["halves"](batch[0].bfloat16()).double() + model["doubles"](
                batch[0].double()
            )
            return nn.functional.mse_loss(both, batch[1].double())

        run(model, group, loss=loss, clip=1.0, checkpoints=tmp_path)
        return model

    with groups(2) as members:
        first, second = together(members, one)

    for name, each in first.state_dict().items():
        assert torch.equal(each, second.state_dict()[name])
    assert first["halves"].weight.dtype == torch.bfloat16


def test_steps_are_reported_to_those_who_watch_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_RUN", "r")

    run(model_of(), steps=2)

    lines = capsys.readouterr().out.split("\n")  # a report begins with a separator
    reports = [values for values, shown in map(values_in, lines) if not shown]
    assert [each["step"] for each in reports] == [1, 2]
    assert reports[0].keys() >= {"loss", "samples_per_s", "sync", "generation"}
