"""The log of a command: on standard error, and in a file with warnings on both."""

import json
import logging
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TypeVar

import click

from shoal.cli.terminal import printable
from shoal.config.private_files import FILE_MODE
from shoal.domain.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
H = TypeVar("H", bound=logging.Handler)

LEVELS = ("debug", "info", "warning", "error")
STRANGER_INTERVAL = 1.0  # seconds between lines that strangers cause
TIME = "%Y-%m-%d %H:%M:%S"  # of a line of text, in local time


def log_options(level: str) -> Callable[[F], F]:
    """Return a decorator that adds the options of the log; ``level`` is the default.

    The command gets them as ``log_level`` and ``log_format``, for ``log_to_stderr``.
    """

    def add(function: F) -> F:
        function = click.option(
            "--log-format",
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            help="Format of the log; json: one object per line.",
        )(function)
        return click.option(
            "--log-level",
            type=click.Choice(LEVELS, case_sensitive=False),
            default=level,
            show_default=True,
            help="Level of the log; debug also writes every line about unauthenticated "
            "clients, otherwise one a second.",
        )(function)

    return add


def log_to_stderr(level: str, form: str) -> None:
    """Log to standard error; ``level`` and ``form`` are values of ``log_options``."""
    handler = _prepared(logging.StreamHandler(sys.stderr), level, form)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _prepared(handler: H, level: str, form: str) -> H:
    """Return a handler with what ``log_options`` ask for."""
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    if level.upper() != "DEBUG":
        handler.addFilter(StrangerFilter())
    return handler


class StrangerFilter(logging.Filter):
    """Passes one record a second of those that strangers cause; counts the others.

    Anybody who reaches a port could otherwise fill the disk.  The next record that
    passes reports how many were left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left_out = 0
        self._closed_until = 0.0  # Unix time

    def filter(self, record: logging.LogRecord) -> bool:
        # aiohttp warns about the upgrades that it reads.
        by_stranger = hasattr(record, "by_stranger") or (
            record.name.startswith("aiohttp.") and record.levelno < logging.ERROR
        )
        if not by_stranger:
            return True
        if record.created < self._closed_until:
            self._left_out += 1
            return False
        self._closed_until = record.created + STRANGER_INTERVAL
        if self._left_out:
            record.msg = f"{record.getMessage()} left_out={self._left_out}"
            record.args = ()
            if fields := getattr(record, "fields", None):
                record.fields = {**fields, "left_out": self._left_out}
            self._left_out = 0
        return True


class TextFormatter(logging.Formatter):
    """Formats a record as text, with control characters escaped as in ``printable``."""

    def format(self, record: logging.LogRecord) -> str:
        # Not the inherited one, which makes ten calls for the same line.
        at = datetime.fromtimestamp(record.created, UTC).astimezone().strftime(TIME)
        head = f"{at},{int(record.msecs):03} {record.levelname} {record.name}"
        text = f"{head} {record.getMessage()}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return printable(text)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object, with its extra ``fields``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


LOG_FILE = "serve.log"  # of a coordinator, in its data folder
SIZE_MAX = 10 << 20  # bytes of a file, before another one is begun
OLDER = 3  # files that are kept beside it, as FILE.1 to FILE.3


def log_to_file(file: Path, level: str, form: str) -> None:
    """Log to a file, which only its owner can read if it is new.

    Standard error, on which ``log_to_stderr`` began, gets warnings and errors only.

    Raises ConfigError if the file cannot be written.
    """
    try:
        _create(file)
        handler = _LogFile(file, maxBytes=SIZE_MAX, backupCount=OLDER, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--log-file {file}: {error.strerror}; `--log-file -` logs to standard "
            "error"
        ) from error
    handler.rotator = _rotate
    log = logging.getLogger()
    for screen in log.handlers:
        screen.setLevel(logging.WARNING)
    log.addHandler(_prepared(handler, level, form))


class _LogFile(RotatingFileHandler):
    """A log file that says once on standard error if it cannot be written."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  its name
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            print(
                f"the log is incomplete: {self.baseFilename}: {error.strerror}",
                file=sys.stderr,
            )


def _rotate(source: str, target: str) -> None:
    os.replace(source, target)
    _create(Path(source))


def _create(file: Path) -> None:
    os.close(os.open(file, os.O_CREAT | os.O_WRONLY, FILE_MODE))
