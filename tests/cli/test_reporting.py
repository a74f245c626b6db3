"""What a person is told of a worker."""

import pytest

from shoal.cli.reporting import reporter
from shoal.cli.whereto import Target
from shoal.protocols import discover
from shoal.worker.agent import Happening

THERE = Target("http://host", next(iter(discover().values())), "", None)
TASKS = [f"sums.t{number}" for number in range(13)]


@pytest.mark.parametrize(
    ("about", "happening", "line"),
    [
        (
            {"tasks": TASKS},
            Happening("joined"),
            f"joined vm with tasks {', '.join(TASKS[:10])} and 3 more",
        ),
        (
            {"tasks": TASKS},
            Happening("lost", "cut off"),
            "lost vm with 13 tasks: cut off",
        ),
        (
            {"tasks": ["sums.add"]},
            Happening("left"),
            "left vm with tasks sums.add",
        ),
        (
            {"tasks": []},
            Happening("joined"),
            "joined vm with tasks that are sent along",
        ),
        ({"model": "qwen"}, Happening("left", "why"), "left vm with qwen: why"),
        ({"public_key": "ab"}, Happening("x"), "x vm with public key ab"),
    ],
)
def test_a_line_names_what_joins_and_afterwards_the_reason(
    capsys: pytest.CaptureFixture[str],
    about: dict[str, object],
    happening: Happening,
    line: str,
) -> None:
    reporter(THERE, as_json=False)("vm", about, happening)

    assert capsys.readouterr().err == f"{line}\n"
