"""Log lines as text and JSON."""

import json
import logging
import sys

from shoal.cli.command_loop import JsonFormatter


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
