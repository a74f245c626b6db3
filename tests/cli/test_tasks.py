"""``shoal tasks``: the list of functions, and their results."""

import json
from typing import Any

import numpy as np
import pytest

from client.coordinator import KEY
from client.coordinator_thread import CoordinatorThread
from shoal.cli.main import main


def run(there: CoordinatorThread, *words: str) -> int:
    action, *rest = words
    address = ("--url", there.coordinator.url, "--api-key", KEY)
    return main(["tasks", action, *address, *rest])


def test_functions_are_listed(
    beside: CoordinatorThread,
    capsys: pytest.CaptureFixture[str],
) -> None:
    beside.functions(**{"sums.add": lambda a, b: a + b})

    assert run(beside, "ls") == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["sums.add", "1", "2"]
    assert lines[2] == "1 of 1 workers run functions that clients send"


def test_functions_are_listed_as_json(
    beside: CoordinatorThread,
    capsys: pytest.CaptureFixture[str],
) -> None:
    beside.functions(add=lambda a, b: a + b)

    run(beside, "ls", "--json")

    assert json.loads(capsys.readouterr().out)["tasks"][0]["name"] == "add"


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["1", "2"], "[[1, 2], {}]"),
        (["text", '"1"', "[1, null]"], '[["text", "1", [1, null]], {}]'),
        (["--kwarg", "x=1", "--kwarg", "name=a=b"], '[[], {"x": 1, "name": "a=b"}]'),
        (["-1", "--kwarg", "x=-1", "-2.5e3"], '[[-1, -2500.0], {"x": -1}]'),
        (["--", "--timeout", "-x", "-0"], '[["--timeout", "-x", 0], {}]'),
    ],
)
def test_arguments_are_json_or_text(
    beside: CoordinatorThread,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    printed: str,
) -> None:
    beside.functions(echo=lambda *args, **kwargs: [[*args], kwargs])

    assert run(beside, "run", "echo", *words) == 0

    assert json.loads(capsys.readouterr().out) == json.loads(printed)
    assert beside.coordinator.calls[0][5]["exact"] is False, "hints convert them"


@pytest.mark.parametrize(
    ("value", "flags", "printed"),
    [
        ("two\nlines", [], "two\nlines\n"),
        ("text", ["--json"], '"text"\n'),
        (np.arange(3), [], "[0,1,2]\n"),
        ({"a": np.float64(0.5)}, [], '{"a":0.5}\n'),
        (1j, [], '"1j"\n'),
        ([float("nan"), -float("inf")], ["--json"], "[NaN,-Infinity]\n"),
    ],
)
def test_values_are_printed_as_text_or_json(
    beside: CoordinatorThread,
    capsys: pytest.CaptureFixture[str],
    value: Any,
    flags: list[str],
    printed: str,
) -> None:
    beside.functions(give=lambda: value)

    run(beside, "run", "give", *flags)

    assert capsys.readouterr().out == printed


def test_function_error_prints_only_its_traceback(
    beside: CoordinatorThread,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise ValueError("zap")

    beside.functions(fail=fail)

    assert run(beside, "run", "fail") == 1

    told = capsys.readouterr().err
    assert told.startswith("Traceback")
    assert told.endswith("ValueError: zap\n")


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (["nobody"], 1, "nobody"),
        (["echo", "--kwarg", "5"], 1, "--kwarg 5: expected NAME=VALUE"),
        (["echo", "--tiemout", "5"], 2, "Did you mean '--timeout'?"),
    ],
)
def test_call_that_cannot_be_made_says_why(
    beside: CoordinatorThread,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    status: int,
    reason: str,
) -> None:
    assert run(beside, "run", *words) == status

    assert reason in capsys.readouterr().err
