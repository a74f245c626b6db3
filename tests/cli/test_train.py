"""``shoal train``: its options, and what it shows."""

import argparse
import json
from pathlib import Path

import pytest

from shoal.cli import train
from shoal.cli.train import script_arguments
from shoal.cli.train.run_display import (
    JsonDisplay,
    LineDisplay,
    RunStatus,
    display,
    event_lines,
    rank_table,
)
from shoal.domain.errors import ConfigError
from shoal.training.run_events import Message


def parsed(*words: str) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    args = parser.parse_args([*words])
    return args, script_arguments(args)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["--nodes", "3", "t.py"], []),
        (["t.py", "--nodes", "3"], []),
        (["--nodes", "3", "t.py", "--epochs", "2", "data"], ["--epochs", "2", "data"]),
        (["t.py", "--epochs", "2", "--nodes", "3", "data"], ["--epochs", "2", "data"]),
        (["--nodes=3", "t.py", "--", "--nodes", "5"], ["--nodes", "5"]),
        (["t.py", "--nodes", "3", "--", "--", "-x"], ["--", "-x"]),
        (
            ["--nodes", "3", "t.py", "--node", "5", "--env-file", "x"],
            ["--node", "5", "--env-file", "x"],
        ),
    ],
)
def test_options_stand_before_or_after_the_script(
    words: list[str], arguments: list[str]
) -> None:
    args, rest = parsed(*words)

    assert (args.command[0], args.nodes, rest) == ("t.py", 3, arguments)


def test_repeated_options_add_up() -> None:
    args, _ = parsed("--with", "a", "t.py", "--with", "b", "--env", "X=1")

    assert args.files == [Path("a"), Path("b")]
    assert args.env == ["X=1"]


def test_environment_variable_needs_a_name(tmp_path: Path) -> None:
    args, _ = parsed("t.py", "--env", "=1")

    with pytest.raises(ConfigError, match="NAME=VALUE"):
        train.run(args)


def test_script_is_required() -> None:
    args = argparse.ArgumentParser()
    train.add_arguments(args)

    with pytest.raises(ConfigError, match="SCRIPT"):
        train.run(args.parse_args(["--nodes", "2"]))


def test_files_of_a_detached_run_are_not_fetched() -> None:
    args, _ = parsed("t.py", "--detach", "--output", "out")

    with pytest.raises(ConfigError, match="--output"):
        train.run(args)


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
