"""DiLoCo for PyTorch models, each rank in a thread; processes: test_torch_backend."""

import pytest

from harness.slow_imports import nn, torch, torch_diloco
from shoal.domain.errors import InvalidRequest
from shoal.training.group import RankGroup
from shoal.training.rank_port import GroupEnded
from training.test_group import groups, together

pytestmark = pytest.mark.long


def move(model: "nn.Module", distance: float) -> None:
    """Change all parameters, as an inner optimizer does."""
    with torch.no_grad():
        for each in model.parameters():
            each += distance


def numbers(model: "nn.Module") -> "list[torch.Tensor]":
    return [each.detach().clone() for each in (*model.parameters(), *model.buffers())]


def test_a_lost_rank_leaves_the_model_and_the_next_step_tries_again() -> None:
    models = [nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)) for _ in range(3)]
    sessions: dict[int, torch_diloco.DiLoCo] = {}

    def fail(group: RankGroup) -> None:
        rank = group.place.rank
        model = models[rank]
        diloco = sessions[rank] = torch_diloco.DiLoCo(model, group, every=2)
        move(model, 0.25 * rank)
        assert not diloco.step()
        move(model, 0.25 * rank)
        group.barrier()
        if rank == 2:
            group.abort("killed")
        before = numbers(model)
        with pytest.raises(GroupEnded):
            diloco.step()
        assert all(map(torch.equal, before, numbers(model)))
        assert diloco.outer.steps == 0

    def go_on(group: RankGroup) -> bytes:
        diloco = sessions[group.place.rank]
        diloco.set_group(group)
        began = diloco.outer.parameters
        assert diloco.step()
        # 0 and 0.5: the mean is 0.25; the first step of momentum is 1.9 of it.
        assert diloco.outer.parameters == pytest.approx(
            began + 0.25 * 0.7 * 1.9, abs=1e-6
        )
        flat = torch.cat([p.detach().reshape(-1) for p in sessions_model(group)])
        return bytes(flat.numpy().tobytes())

    def sessions_model(group: RankGroup) -> "list[nn.Parameter]":
        return list(models[group.place.rank].parameters())

    with groups(3) as members:
        together(members, fail)
    with groups(2) as members:
        assert len(set(together(members, go_on))) == 1


def test_a_difference_that_is_not_finite_brings_back_parameters_and_buffers() -> None:
    def train(group: RankGroup) -> None:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        diloco = torch_diloco.DiLoCo(model, group, every=1)
        before = numbers(model)
        move(model, float("nan") if group.place.rank else 1.0)
        model[1].running_mean += 5
        assert diloco.step()
        assert all(map(torch.equal, before, numbers(model)))
        move(model, 1.0)
        model[1].running_mean += 2.0 * group.place.rank
        diloco.step()
        assert model[1].running_mean.tolist() == [1.0] * 3, "their mean"

    with groups(2) as members:
        together(members, train)


def test_parameters_of_half_precision_do_not_drift() -> None:
    def train(group: RankGroup) -> None:
        model = nn.Linear(40, 30).to(torch.bfloat16)
        diloco = torch_diloco.DiLoCo(model, group, every=1)
        state = diloco.state_dict()
        state["parameters"] += 1e-5  # less than bfloat16 has
        diloco.load_state_dict(state)
        for _ in range(3):
            diloco.step()
        assert torch.equal(diloco.state_dict()["parameters"], state["parameters"])

    with groups(2) as members:
        together(members, train)


def test_arguments_that_do_not_fit_are_refused() -> None:
    with groups(1) as [group], pytest.raises(InvalidRequest, match="every 0 steps"):
        torch_diloco.DiLoCo(nn.Linear(1, 1), group, every=0)
