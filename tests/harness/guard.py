"""A guard against tests that hang: it fails the one test, and the run goes on.

Each phase of a test (set-up, call, tear-down) has two limits: seconds in all, by the
speed of the machine, and seconds in which the test and the programs that it has started
use next to no processor time.  The second notices what waits for something that never
comes, on a machine of any speed.  Before either is enforced, the speed is measured once
more, for other work may have begun since.

SIGALRM then raises an exception in the main thread, and again every second until the
phase ends: one alone can be lost, for an event loop gives it to whichever task runs at
that moment.  That is why pytest-timeout, which raises once, is not used here.

What no exception ends (a call into C that never returns, an event loop in C) ends with
the process, after its threads' stacks were printed.  With ``--processes`` that is one
failed test as well, and a fresh process runs the rest.  Without SIGALRM, as on Windows,
it is the only way.
"""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Container, Generator
from contextlib import suppress
from types import FrameType

import psutil
import pytest

from harness.speed import measured, scaled, slowness
from harness.stacks import write_stacks

LIMIT = 60.0  # seconds for a phase of a test, on the reference machine
IDLE_MAX = 25.0  # seconds in which a phase uses next to no processor time
LONG_LIMIT = 600.0  # seconds for a phase of a test that is marked as long
LONG_IDLE_MAX = 150.0  # seconds: real peers have timers of a minute and more
IDLE = 0.1  # of a free core: what polls for something that never comes uses less
LOOKS = 5  # at the processor time in this while
LOOK = 0.05  # seconds of processor time that a look itself may take
AGAIN = 1.0  # seconds between exceptions
GRACE = 30.0  # seconds from the first exception to the end of the process
EXIT = 60.0  # seconds for the process to end once all tests have

ALARM = hasattr(signal, "SIGALRM")


class Phase:
    """The limits of one phase of a test, and what it has used of them."""

    def __init__(self, item: pytest.Item) -> None:
        self.limit, self.idle_max = limits_of(item)
        self.every = self.idle_max / LOOKS
        self.end = 2 * self.limit + min(self.limit, GRACE)  # seconds for the process
        self.hung = ""
        self._began = self._active = self._looked = time.monotonic()
        self._idle_looks = 0  # one after the other: a paused machine makes a look late
        self._most = 0.0  # of a core, in one look since then
        self._used = 0.0  # until the first look: looking takes longer than most tests

    def why_hung(self) -> str:
        """Return why this phase is taken to hang; empty if it is not."""
        if self.hung:
            return self.hung
        now, used = time.monotonic(), processor_seconds()
        # Less than before, if a program has ended that nobody waited for.
        spent = max(abs(used - self._used) - LOOK, 0.0)
        share = spent / (now - self._looked)
        self._most = max(self._most, share)
        # On a busy machine, or one with slow disks, a test gets less than a free core.
        if share > IDLE / slowness():
            self._active, self._most, self._idle_looks = now, 0.0, 0
        else:
            self._idle_looks += 1
        self._looked, self._used = now, used
        idle = self._idle_looks >= LOOKS
        if idle and self._most > IDLE / measured():
            # It has become busy since.
            self._active, self._most, self._idle_looks = now, 0.0, 0
        elif idle:
            self.hung = f"hung: idle for {now - self._active:.0f} seconds"
        elif now - self._began >= self.limit:
            # At most twice: soon after that the process ends, see ``_guarded``.
            twice = now - self._began >= 2 * self.limit
            limit = self.limit * (1 if twice else max(measured() / slowness(), 1.0))
            if now - self._began >= limit:
                self.hung = f"hung: not over after {now - self._began:.0f} seconds"
        return self.hung


class Guard:
    """The plugin: one for each process that runs tests."""

    def __init__(self, besides: Container[int] = ()) -> None:
        """``besides`` has the ids of processes that belong to no test."""
        self._besides = besides
        self._stderr = os.dup(2)  # pytest catches what is written to the other
        self._previous = signal.getsignal(signal.SIGALRM) if ALARM else None
        self._phase: Phase | None = None
        self._ends_at = 0.0  # when this process is ended, as of time.monotonic()
        if ALARM:
            signal.signal(signal.SIGALRM, self._look)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        return (yield from self._guarded(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        return (yield from self._guarded(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None]:
        try:
            return (yield from self._guarded(item))
        finally:
            if nextitem is None:
                faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if ALARM:
            signal.signal(signal.SIGALRM, self._previous)
        # A thread that a test has left keeps the interpreter from its end.
        faulthandler.dump_traceback_later(
            scaled(EXIT), exit=True, file=sys.__stderr__ or self._stderr
        )

    def _guarded(self, item: pytest.Item) -> Generator[None]:
        self._phase = phase = Phase(item)
        # Twice: on a machine that has become busy, a test may take longer.  Each time,
        # a thread is started: not for each phase, of which most take a millisecond.
        if not 0.9 * phase.end <= self._ends_at - time.monotonic() <= phase.end:
            self._end_after(phase.end)
        if ALARM:
            signal.setitimer(signal.ITIMER_REAL, phase.every, phase.every)
        try:
            return (yield)
        finally:
            if ALARM:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            self._phase = None

    def _end_after(self, seconds: float) -> None:
        self._ends_at = time.monotonic() + seconds
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stderr)

    def _look(self, number: int, frame: FrameType | None) -> None:
        """Fail the test that is running, if it hangs."""
        __tracebackhide__ = True  # the report is of the line that was interrupted
        phase = self._phase
        if phase is None:
            return
        signal.setitimer(signal.ITIMER_REAL, 0.0)  # looking may take a while
        known = bool(phase.hung)
        if not known:
            self._end_after(phase.end)  # signals arrive; measuring takes a while, too
        if phase.why_hung() and not known:
            self._end_after(GRACE)
            write_stacks(sys.stderr, self._besides)  # into the report of this test
        every = AGAIN if phase.hung else phase.every
        signal.setitimer(signal.ITIMER_REAL, every, every)
        if phase.hung:
            pytest.fail(phase.hung)


def limits_of(item: pytest.Item) -> tuple[float, float]:
    """Return for how long a phase of a test may take, and may be idle, in seconds."""
    given = item.config.getoption("--hang-after")
    if given is not None:
        return 2 * float(given), float(given)
    if item.get_closest_marker("long"):
        return scaled(LONG_LIMIT), LONG_IDLE_MAX
    return scaled(LIMIT), IDLE_MAX


def processor_seconds() -> float:
    """Return what this process and those below it have used so far."""
    own = psutil.Process()
    seconds = sum(own.cpu_times()[:4])  # with those that have ended, but on Windows
    for process in own.children(recursive=True):
        with suppress(psutil.Error):
            seconds += sum(process.cpu_times()[:2])
    return seconds
