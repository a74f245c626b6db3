"""A guard against tests that hang: it fails the one test, and the run goes on.

Each phase of a test (set-up, call, tear-down) has a time limit.  Then SIGALRM raises an
exception in the main thread, and again every second until the phase ends: one alone
can be lost, for an event loop gives it to whichever task runs at that moment.  That is
why pytest-timeout, which raises once, is not used here.

What no exception ends (a call into C that never returns, an event loop in C) ends with
the process, after its threads' stacks were printed.  Under pytest-xdist that is one
failed test as well, and a fresh process runs the rest.  Without SIGALRM, as on Windows,
it is the only way.
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Generator
from types import FrameType

import pytest

from harness.speed import scaled

LIMIT = 120.0  # seconds for a phase of a test, on the reference machine
LONG_LIMIT = 600.0  # seconds for one of those that are marked as long
AGAIN = 1.0  # seconds between exceptions
GRACE = 60.0  # seconds from the first exception to the end of the process
EXIT = 60.0  # seconds for the process to end once all tests have

ALARM = hasattr(signal, "SIGALRM")


class Guard:
    """The plugin: one for each process that runs tests."""

    def __init__(self) -> None:
        self._stderr = os.dup(2)  # pytest catches what is written to the other
        self._previous = signal.getsignal(signal.SIGALRM) if ALARM else None
        self._limit = 0.0
        if ALARM:
            signal.signal(signal.SIGALRM, self._fail)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        return (yield from self._guarded(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        return (yield from self._guarded(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        return (yield from self._guarded(item))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if ALARM:
            signal.signal(signal.SIGALRM, self._previous)
        # A thread that a test has left keeps the interpreter from its end.  The
        # processes of pytest-xdist wait here for each other, and are ended by it.
        if "PYTEST_XDIST_WORKER" not in os.environ:
            faulthandler.dump_traceback_later(
                scaled(EXIT), exit=True, file=sys.__stderr__ or self._stderr
            )

    def _guarded(self, item: pytest.Item) -> Generator[None]:
        self._limit = limit_of(item)
        faulthandler.dump_traceback_later(
            self._limit + min(self._limit, scaled(GRACE)), exit=True, file=self._stderr
        )
        if ALARM:
            signal.setitimer(signal.ITIMER_REAL, self._limit, AGAIN)
        try:
            return (yield)
        finally:
            if ALARM:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            faulthandler.cancel_dump_traceback_later()

    def _fail(self, number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(2)  # into the report of this test
        pytest.fail(f"hung: not over after {self._limit:.0f} seconds")


def limit_of(item: pytest.Item) -> float:
    """Return for how long a phase of a test may take, in seconds."""
    given = item.config.getoption("--hang-after")
    if given is not None:
        return float(given)
    return scaled(LONG_LIMIT if item.get_closest_marker("long") else LIMIT)
