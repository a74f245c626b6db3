"""Runs a command's coroutine until it ends or the process receives a stop signal."""

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from shoal.domain.errors import ConfigError
from shoal.transports.clock import fast_loop_factory

TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
STRANGER_INTERVAL = 1.0  # seconds between lines that strangers cause
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_loop(main: Callable[[asyncio.Event], Coroutine[Any, Any, int]]) -> int:
    """Run ``main`` on the fastest event loop; return its exit status.

    The argument of ``main`` is an event that the first SIGINT or SIGTERM sets; the
    second one cancels ``main``.
    """
    try:
        with asyncio.Runner(loop_factory=fast_loop_factory()) as runner:
            return runner.run(_with_signals(main))
    except BaseExceptionGroup as group:
        raise _cause(group) from group


def add_log_arguments(parser: argparse.ArgumentParser, level: str) -> None:
    """Add the flags of the log; ``level`` is the default level."""
    parser.add_argument(
        "--log-level",
        default=level,
        metavar="LEVEL",
        help="log level: debug, info, warning or error; debug also writes every line "
        "that strangers cause, not one a second (default: %(default)s)",
    )
    parser.add_argument(
        "--log-format",
        default="text",
        choices=("text", "json"),
        help="log format; json: one object per line (default: %(default)s)",
    )


def log_to_stderr(args: argparse.Namespace) -> None:
    """Log to standard error, as the flags configure.

    Raises ConfigError for an unknown level.
    """
    level = args.log_level
    if level.upper() not in logging.getLevelNamesMapping():
        raise ConfigError(
            f"--log-level {level}: expected debug, info, warning or error"
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if args.log_format == "json" else logging.Formatter(TEXT)
    )
    if level.upper() != "DEBUG":
        handler.addFilter(StrangerFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


class StrangerFilter(logging.Filter):
    """Passes one record a second of those that strangers cause; counts the others.

    Whoever reaches a port could otherwise fill the disk.  The next record that passes
    tells how many were left out.
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


def _cause(group: BaseException) -> BaseException:
    """Return the only error of a task group, else the group."""
    while isinstance(group, BaseExceptionGroup) and len(group.exceptions) == 1:
        (group,) = group.exceptions
    return group


async def _with_signals(
    main: Callable[[asyncio.Event], Coroutine[Any, Any, int]],
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    for number in STOP_SIGNALS:
        try:
            loop.add_signal_handler(number, on_signal)
        except NotImplementedError:
            # Windows delivers signals outside the loop.
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(on_signal))
    try:
        return await main(stop)
    except asyncio.CancelledError:
        return 130
