"""Log lines as text and JSON."""

import json
import logging
import sys

import click
from click.testing import CliRunner

from shoal.cli.command_loop import JsonFormatter, StrangerFilter, log_options


def written(record: logging.LogRecord) -> dict[str, object]:
    line = JsonFormatter().format(record)
    assert "\n" not in line
    read: dict[str, object] = json.loads(line)
    return read


def record(message: str, *given: object, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("shoal.x", logging.INFO, "", 0, message, given, None)
    made.created = 0.0
    made.__dict__.update(more)
    return made


def test_json_line_is_one_object() -> None:
    assert written(record("said %r", 'a"\n\ud800')) == {
        "at": "1970-01-01T00:00:00+00:00",
        "level": "info",
        "logger": "shoal.x",
        "message": "said 'a\"\\n\\ud800'",
    }


def test_extra_fields_are_included() -> None:
    line = written(record("a=1 b='x'", fields={"a": 1, "b": "x", "c": b"bytes"}))

    assert (line["a"], line["b"], line["c"]) == (1, "x", "b'bytes'")
    assert "message" not in line


def test_exception_is_logged_completely() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        failed = record("failed", exc_info=sys.exc_info())

    line = written(failed)

    assert line["message"] == "failed"
    assert "ValueError: two\nlines" in str(line["exception"])


def passed(*records: logging.LogRecord) -> list[str]:
    limit = StrangerFilter()
    return [each.getMessage() for each in records if limit.filter(each)]


def at(seconds: float, text: str, **more: object) -> logging.LogRecord:
    made = record("%s", text, **more)
    made.created = seconds
    return made


def test_lines_that_strangers_cause_are_counted_beyond_one_a_second() -> None:
    records = [
        at(100 + tenth / 10, f"at {tenth}", by_stranger=True) for tenth in range(25)
    ]

    assert passed(*records) == ["at 0", "at 10 left_out=9", "at 20 left_out=9"]


def test_lines_that_nobody_strange_causes_all_pass() -> None:
    flood = [at(1.0, "flood", by_stranger=True) for _ in range(9)]

    assert passed(*flood, at(1.0, "mine"), at(1.0, "mine")) == ["flood", "mine", "mine"]


def test_count_is_a_field_in_json() -> None:
    fields = {"status": 401}
    records = [at(when, "x", by_stranger=True, fields=fields) for when in (1, 1.5, 3)]
    limit = StrangerFilter()

    last = [written(each) for each in records if limit.filter(each)][-1]

    assert (last["status"], last["left_out"]) == (401, 1)
    assert fields == {"status": 401}


def test_options_of_the_log_have_defaults_and_name_what_they_take() -> None:
    @click.command()
    @log_options("warning")
    def command(log_level: str, log_format: str) -> None:
        click.echo(f"{log_level} {log_format}")

    assert CliRunner().invoke(command, []).output == "warning text\n"
    given = ["--log-level", "DEBUG", "--log-format", "json"]
    assert CliRunner().invoke(command, given).output == "debug json\n"
    wrong = CliRunner().invoke(command, ["--log-level", "loud"])
    assert wrong.exit_code == 2
    assert "'debug', 'info', 'warning', 'error'" in wrong.output
