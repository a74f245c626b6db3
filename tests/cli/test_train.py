"""``shoal train``: its options, and what it shows."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.cli.use import train
from shoal.cli.use.train.run_display import (
    JsonDisplay,
    LineDisplay,
    RunStatus,
    display,
    event_lines,
    rank_table,
)
from shoal.training.run_events import Message


def parsed(*words: str) -> dict[str, Any]:
    return train.command.make_context("train", [*words]).params


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("--nodes 3 t.py", ""),
        ("--nodes 3 t.py --epochs 2 data", "--epochs 2 data"),
        (
            "--nodes=3 t.py --lr=0.1 -vh --nodes=5 --help",
            "--lr=0.1 -vh --nodes=5 --help",
        ),
        ("--nodes 3 t.py --output out --env x", "--output out --env x"),
        ("--nodes 3 t.py -- -x", "-- -x"),
        ("--nodes 3 -- t.py -x", "-x"),
        ("--nodes 3 t.py -1 -", "-1 -"),
    ],
)
def test_all_that_follows_the_script_is_its_own(words: str, arguments: str) -> None:
    """As with torchrun."""
    given = parsed(*words.split())

    assert (given["script"], given["nodes"]) == ("t.py", 3)
    assert (given["output"], given["variables"]) == (None, ())
    assert " ".join(given["arguments"]) == arguments


def test_repeated_options_add_up() -> None:
    given = parsed("--with", "a", "--with", "b", "--env", "X=1", "--json", "t.py")

    assert given["files"] == (Path("a"), Path("b"))
    assert given["variables"] == ("X=1",)
    assert given["as_json"] is True


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (["--env", "=1", "t.py"], 1, "--env =1: expected NAME=VALUE"),
        (["--nodes", "2"], 2, "Missing argument 'SCRIPT'"),
        (["--epochs", "2", "t.py"], 2, "No such option '--epochs'"),
        (["--nodes", "two", "t.py"], 2, "'two' is not a valid integer"),
        (["--nodes", "0", "t.py"], 2, "'--nodes': 0 is not in the range 1<=x<=256"),
        (["--min-nodes", "2", "t.py"], 1, "--min-nodes 2: expected at most --nodes, 1"),
        (["--output", "/dev/null/x", "t.py"], 1, "--output /dev/null/x: Not a direct"),
        (["--detach", "--output", "out", "t.py"], 1, "--output: the files of a det"),
    ],
)
def test_unusable_options_are_named(
    capsys: pytest.CaptureFixture[str], words: list[str], status: int, reason: str
) -> None:
    assert main(["train", *words]) == status

    error = capsys.readouterr().err
    assert error.startswith("shoal train: ")
    assert reason in error


OUTPUT: Message = {"event": "output", "rank": 2, "lines": ["a", "\x1b[31mb"]}
STARTED: Message = {"event": "started", "rank": 2, "text": "t.py on beagle"}
VALUES = {"step": 12.0, "loss": 3.14159, "samples_per_s": 1234.5, "sync": 0.251}
PROGRESS: Message = {"event": "progress", "rank": 2, "values": VALUES}
REMARK: Message = {"event": "remark", "text": "rank 1 is lost"}


def test_events_are_lines_with_their_rank() -> None:
    lines = [
        line
        for each in (STARTED, OUTPUT, PROGRESS, REMARK)
        for line in event_lines(each)
    ]

    assert lines == [
        "[rank 2] started: t.py on beagle",
        "[rank 2] a",
        "[rank 2] \\x1b[31mb",
        "[run] rank 1 is lost",
    ]


def test_table_has_a_row_for_each_rank() -> None:
    status = RunStatus(nodes=2, processes=2)
    status.update(STARTED)
    status.update(PROGRESS)
    status.update({"event": "progress", "rank": 99, "values": VALUES})

    assert status.rows() == [
        ("0", "waiting", "", "", "", "", ""),
        ("1", "waiting", "", "", "", "", ""),
        ("2", "running", "12", "3.142", "1234", "25%", ""),
        ("3", "running", "", "", "", "", ""),
    ]
    assert rank_table(status).row_count == 4


def test_display_fits_where_the_output_goes(capsys: pytest.CaptureFixture[str]) -> None:
    with display(1, 1, as_json=True) as shown:
        assert isinstance(shown, JsonDisplay)
        shown.show(OUTPUT)
    assert json.loads(capsys.readouterr().out) == OUTPUT
    with display(1, 1, as_json=False) as shown:
        assert isinstance(shown, LineDisplay)
        shown.show(OUTPUT)
    assert capsys.readouterr().out == "[rank 2] a\n[rank 2] \\x1b[31mb\n"


def test_progress_bar_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with display(1, 1, as_json=False) as shown:
        for text in ("10%|#\r", "20%|##\r", "done"):
            shown.show({"event": "output", "rank": 0, "lines": [text]})

    assert capsys.readouterr().out == "[rank 0] 10%|#\r[rank 0] 20%|##\r[rank 0] done\n"
