"""States as JSON and tensors."""

import json
from collections import OrderedDict
from typing import Any

import pytest

from harness.slow_imports import state_tree, torch
from shoal.domain.errors import InvalidRequest


def there_and_back(state: Any) -> Any:
    skeleton, tensors = state_tree.flatten(state)
    return state_tree.restore(json.loads(json.dumps(skeleton)), tensors)


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
        state_tree.flatten(state)


def test_missing_tensors_and_other_json_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tensor a"):
        state_tree.restore({"$tensor": "a"}, {})


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "int64", "complex64"])
def test_memory_is_that_of_the_tensor(name: str) -> None:
    dtype = getattr(torch, name)
    tensor = torch.zeros((2, 3), dtype=dtype)

    state_tree.memory_of(tensor)[:] = state_tree.memory_of(
        torch.ones((2, 3), dtype=dtype)
    )

    assert bool((tensor == torch.ones((2, 3), dtype=dtype)).all())
    assert state_tree.memory_of(torch.zeros(0, 4)).numel() == 0
