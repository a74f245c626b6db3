"""Runs a command's coroutine until it ends or the process receives a stop signal."""

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from shoal.transports.clock import fast_loop_factory

F = TypeVar("F", bound=Callable[..., Any])
H = TypeVar("H", bound=logging.Handler)

TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
LEVELS = ("debug", "info", "warning", "error")
STRANGER_INTERVAL = 1.0  # seconds between lines that strangers cause
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_WITH_STDIN = "SHOAL_STOP_WITH_STDIN"
"""The variable of a command that stops when its standard input ends.

The parent holds the other end of that pipe: even where it is killed, the child ends.
"""


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


def child_environment() -> dict[str, str]:
    """Return the environment of a command that ends with this process."""
    return {**os.environ, STOP_WITH_STDIN: "1"}


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
            help="Level of the log; debug also writes every line that strangers "
            "cause, not one a second.",
        )(function)

    return add


def log_to_stderr(level: str, form: str) -> None:
    """Log to standard error; ``level`` and ``form`` are values of ``log_options``."""
    handler = prepared(logging.StreamHandler(sys.stderr), level, form)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def prepared(handler: H, level: str, form: str) -> H:
    """Return a handler with what ``log_options`` ask for."""
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    if level.upper() != "DEBUG":
        handler.addFilter(StrangerFilter())
    return handler


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
    if os.environ.get(STOP_WITH_STDIN):
        _call_at_end_of_stdin(lambda: loop.call_soon_threadsafe(on_signal))
    try:
        return await main(stop)
    except asyncio.CancelledError:
        return 130


def _call_at_end_of_stdin(stop: Callable[[], object]) -> None:
    """Call ``stop`` in another thread when the standard input ends."""

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)  # nothing is written to it
        with suppress(RuntimeError):  # the loop has ended
            stop()

    threading.Thread(target=wait, daemon=True).start()
