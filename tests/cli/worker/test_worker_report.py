"""Reports of a worker to the user."""

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.cli.worker.join_target import JoinTarget
from shoal.cli.worker.worker_report import worker_reporter
from shoal.protocols import discover
from shoal.worker.agent import WorkerEvent

WIRE = next(iter(discover().values()))
THERE = JoinTarget("http://host", WIRE, "", None)
TASKS = [f"sums.t{number}" for number in range(13)]


@pytest.mark.parametrize(
    ("about", "happening", "line"),
    [
        (
            {"tasks": TASKS},
            WorkerEvent("joined"),
            f"joined vm with tasks {', '.join(TASKS[:10])} and 3 more",
        ),
        (
            {"tasks": TASKS},
            WorkerEvent("lost", "cut off"),
            "lost vm: cut off",
        ),
        (
            {"tasks": ["sums.add"]},
            WorkerEvent("left"),
            "left vm with tasks sums.add",
        ),
        (
            {"tasks": []},
            WorkerEvent("joined"),
            "joined vm with tasks that clients send",
        ),
        ({"model": "qwen"}, WorkerEvent("left", "why"), "left vm with qwen: why"),
        ({"public_key": "ab"}, WorkerEvent("x"), "x vm with public key ab"),
        (
            {"throttle": 0},
            WorkerEvent("paused", "its user is active"),
            "paused vm: its user is active",
        ),
        ({"throttle": 0}, WorkerEvent("paused"), "paused vm"),
        ({"throttle": 50}, WorkerEvent("throttled"), "throttled vm with throttle 50"),
        ({"throttle": 100}, WorkerEvent("resumed"), "resumed vm"),
        (
            {"models to load": ["a", "b"]},
            WorkerEvent("joined"),
            "joined vm with models to load a, b",
        ),
        (
            {"model": "qwen"},
            WorkerEvent("loading", "on order: 41%"),
            "loading qwen on order: 41%",
        ),
        (
            {"model": "qwen"},
            WorkerEvent("failed", "it is damaged"),
            "cannot load qwen: it is damaged",
        ),
    ],
)
def test_line_names_what_joins_and_later_the_reason(
    capsys: pytest.CaptureFixture[str],
    about: dict[str, object],
    happening: WorkerEvent,
    line: str,
) -> None:
    worker_reporter(THERE, as_json=False)("vm", about, happening)

    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize(
    ("target", "event", "line"),
    [
        (
            THERE,
            WorkerEvent("refused", "the token has expired: check --token"),
            "shoal join: http://host: the token has expired: check --token",
        ),
        (
            replace(THERE, token_file=Path("/data/join-token")),
            WorkerEvent("refused", "Invalid token: check --token"),
            "shoal join: http://host: Invalid token: check --token (that of "
            "/data/join-token)",
        ),
        (
            replace(THERE, advice="check the address"),
            WorkerEvent("waiting", "http://host: connection refused; trying again"),
            "waiting for http://host: connection refused; trying again (check the "
            "address)",
        ),
        (
            THERE,
            WorkerEvent("waiting", "cannot connect to http://host: no route to host"),
            "waiting for http://host: no route to host",
        ),
        (THERE, WorkerEvent("lost", "cut off"), "lost vm: cut off"),
    ],
)
def test_line_about_a_connection_is_printed_once(
    capsys: pytest.CaptureFixture[str],
    target: JoinTarget,
    event: WorkerEvent,
    line: str,
) -> None:
    report = worker_reporter(target, as_json=False)

    for model in ("qwen", "llama"):
        report("vm", {"model": model}, event)

    assert capsys.readouterr().err == f"{line}\n"


def test_only_the_first_reason_to_wait_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = worker_reporter(THERE, as_json=False)

    for reason in ("no answer", "connection refused"):
        report("vm", {"model": "qwen"}, WorkerEvent("waiting", reason))
        report("vm", {"model": "llama"}, WorkerEvent("waiting", reason))

    assert capsys.readouterr().err == "waiting for http://host: no answer\n"
