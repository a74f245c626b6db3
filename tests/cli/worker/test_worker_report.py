"""Reports of a worker to the user."""

import pytest

from shoal.cli.worker.join_target import JoinTarget
from shoal.cli.worker.worker_report import worker_reporter
from shoal.protocols import discover
from shoal.worker.agent import WorkerEvent

THERE = JoinTarget("http://host", next(iter(discover().values())), "", None)
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
            "lost vm with 13 tasks: cut off",
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
