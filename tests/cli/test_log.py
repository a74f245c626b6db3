"""The log of a command: lines as text and JSON, and files."""

import json
import logging
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from shoal.cli.log import (
    OLDER,
    SIZE_MAX,
    JsonFormatter,
    StrangerFilter,
    TextFormatter,
    log_options,
    log_to_file,
)
from shoal.domain.errors import ConfigError


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


def test_names_cannot_change_lines_of_text() -> None:
    line = TextFormatter().format(record("node=%s", "a\x1b[2J\u202eb"))

    assert line.endswith("node=a\\x1b[2J\\u202eb")


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


no_modes = pytest.mark.skipif(sys.platform == "win32", reason="no such permissions")


@contextmanager
def logging_to(file: Path) -> Iterator[tuple[logging.Logger, StringIO]]:
    """Log to a file within the block; gives the log and what the screen shows."""
    root = logging.getLogger()
    before, level, screen = root.handlers[:], root.level, StringIO()
    root.handlers[:] = [logging.StreamHandler(screen)]
    root.setLevel(logging.INFO)
    try:
        log_to_file(file, "info", "text")
        yield root, screen
    finally:
        for each in root.handlers:
            with suppress(OSError):  # as logging itself does at the end
                each.close()
        root.handlers[:] = before
        root.setLevel(level)


@no_modes
def test_file_has_the_log_and_the_screen_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "x.log"

    with logging_to(file) as (log, screen):
        log.info("well")
        log.warning("ill")

    assert screen.getvalue() == "ill\n"
    first, second = file.read_text().splitlines()
    assert first.endswith("INFO root well")
    assert second.endswith("WARNING root ill")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@no_modes
def test_log_is_limited_and_every_part_of_it_private(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    line = "x" * (SIZE_MAX // 2)

    with logging_to(file) as (log, _):
        for _ in range(3 * (OLDER + 2)):
            log.info(line)

    parts = sorted(tmp_path.iterdir())
    assert [each.name for each in parts] == ["x.log", "x.log.1", "x.log.2", "x.log.3"]
    assert all(each.stat().st_size <= SIZE_MAX for each in parts)
    assert {stat.S_IMODE(each.stat().st_mode) for each in parts} == {0o600}


@no_modes
def test_permissions_of_a_file_that_exists_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.touch(0o640)
    file.chmod(0o640)

    with logging_to(file) as (log, _):
        log.info("well")

    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert file.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_full_disk_is_told_once_and_stops_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with logging_to(Path("/dev/full")) as (log, screen):
        log.info("one")
        log.warning("two")

    told = "the log is incomplete: /dev/full: No space left on device\n"
    assert capsys.readouterr().err == told
    assert screen.getvalue() == "two\n"


def test_folder_that_does_not_exist_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"No such file.*`--log-file -` logs to"),
        logging_to(tmp_path / "none" / "x.log"),
    ):
        pass
