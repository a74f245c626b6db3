"""States as JSON and tensors."""

import json
from collections import OrderedDict
from typing import Any

import pytest
import torch

from shoal.domain.errors import InvalidRequest
from shoal.training.checkpoints.state_tree import flatten, memory_of, restore


def there_and_back(state: Any) -> Any:
    skeleton, tensors = flatten(state)
    return restore(json.loads(json.dumps(skeleton)), tensors)


def test_state_of_an_optimizer_comes_back() -> None:
    average = torch.ones(3)
    group = {"params": [0, 1], "betas": (0.8, 0.99), "lr": 1e-3, "foreach": None}
    state = {
        "state": {0: {"step": torch.tensor(2.0)}, 1: {"exp_avg": average}},
        "param_groups": [group],
    }

    found = there_and_back(state)

    assert found["param_groups"] == [group]
    assert [*found["state"]] == [0, 1]
    assert found["state"][1]["exp_avg"] is average


@pytest.mark.parametrize(
    "state",
    [
        {"a": [1, None, True, 0.1, "x"], "b": ((), b"\0\xff"), 3: {"$map": 1}},
        {(1, 2): "pair", "$tensor": "none"},
        {"large": 2**70, "tiny": 5e-324},
        [],
    ],
)
def test_plain_values_come_back(state: Any) -> None:
    assert there_and_back(state) == state


def test_keys_with_dots_do_not_collide() -> None:
    first, second = torch.zeros(1), torch.ones(1)

    found = there_and_back({"a": {"b.c": first}, "a.b": {"c": second}})

    assert found["a"]["b.c"] is first
    assert found["a.b"]["c"] is second


def test_ordered_maps_and_parameters_are_maps_of_tensors() -> None:
    found = there_and_back(OrderedDict(weight=torch.nn.Parameter(torch.ones(2))))

    assert found["weight"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"a": {"b": object()}}, "a.b is a object"),
        ({"f": print}, "f is a builtin_function_or_method"),
    ],
)
def test_other_values_are_refused_with_their_path(state: Any, error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        flatten(state)


def test_missing_tensors_and_other_json_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tensor a"):
        restore({"$tensor": "a"}, {})


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
)
def test_memory_is_that_of_the_tensor(dtype: torch.dtype) -> None:
    tensor = torch.zeros((2, 3), dtype=dtype)

    memory_of(tensor)[:] = memory_of(torch.ones((2, 3), dtype=dtype))

    assert bool((tensor == torch.ones((2, 3), dtype=dtype)).all())
    assert memory_of(torch.zeros(0, 4)).numel() == 0
