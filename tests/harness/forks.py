"""Runs the tests in forks of the process that has collected them: ``--processes 3``.

Collecting takes seconds and hundreds of megabytes, which the forks share.  Each runs
one file after another, in the order of collection.  When a fork ends in the middle of a
test, that test has failed, and a fresh fork runs what it had before it.

Linux only: elsewhere, one process runs all.  That is why pytest-xdist is not used here:
each of its processes collects all tests anew, and what it sends for each test took a
sixth of the processor time of the whole suite.
"""

import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

import pytest

LINUX = sys.platform.startswith("linux")
PRELOADED = ("openai", "torch")  # imported once, if all forks would
PRELOADED_FROM = 1000  # tests

# What a fork sends; a place is one in ``session.items``.


class Began(NamedTuple):
    """It begins a test."""

    place: int


class Wants(NamedTuple):
    """It is about to begin its last test, and asks for another file."""


class Report(NamedTuple):
    """A phase of a test is over."""

    data: dict[str, Any]


class Done(NamedTuple):
    """It has run all that it was given, and measured this."""

    costs: Any


Message = Began | Wants | Report | Done


class Fork:
    """A fork, seen from the process that started it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.left = deque[int]()  # places of tests that it was given and has not begun
        self.running: int | None = None


class Forks:
    """The plugin of the process that collects and prints."""

    def __init__(self, count: int, set_up: Callable[[pytest.Config], None]) -> None:
        """``set_up`` is called in each fork before its first test."""
        self._count = count
        self._set_up = set_up
        self._files = deque[Sequence[int]]()  # that no fork has: places of tests
        self._forks: dict[Connection, Fork] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest does that
        if len(session.items) >= PRELOADED_FROM:
            for name in PRELOADED:
                import_module(name)
            gc.freeze()
        places = range(len(session.items))
        by_file = groupby(places, lambda place: session.items[place].path)
        self._files.extend([*file] for _, file in by_file)
        # Of temporary folders, too, each fork has its own.  Failed tests leave them.
        folder = tempfile.mkdtemp(prefix="tests-")
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        try:
            for _ in range(min(self._count, len(self._files))):
                self._start(session)
            while self._forks:
                for connection in wait([*self._forks]):
                    assert isinstance(connection, Connection)
                    self._read(session, connection)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for fork in self._forks.values():
                os.kill(fork.pid, signal.SIGKILL)
                os.waitpid(fork.pid, 0)
            if not session.testsfailed:
                shutil.rmtree(folder, ignore_errors=True)
        return True

    def _start(self, session: pytest.Session) -> None:
        """Start a fork, with the next file."""
        ours, theirs = Pipe()
        sys.stdout.flush()
        if pid := os.fork():
            theirs.close()
            self._forks[ours] = Fork(pid)
            self._give(ours)
            return
        status = 1
        try:
            for connection in (ours, *self._forks):
                connection.close()
            self._set_up(session.config)
            run_files(session, theirs)
            status = 0
        except BaseException:  # of the suite itself
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)  # with threads that tests have left

    def _give(self, connection: Connection) -> None:
        """Give a fork another file, or none."""
        file = [*self._files.popleft()] if self._files else []
        self._forks[connection].left.extend(file)
        connection.send(file)

    def _read(self, session: pytest.Session, connection: Connection) -> None:
        fork, hook = self._forks[connection], session.config.hook
        try:
            message: Message | None = connection.recv()
        except (EOFError, ConnectionError):
            message = None
        match message:
            case None:
                del self._forks[connection]
                self._ended(session, fork)
            case Began(place):
                fork.left.popleft()
                fork.running = place
            case Wants():
                self._give(connection)
            case Report(data):
                report = hook.pytest_report_from_serializable(
                    config=session.config, data=data
                )
                hook.pytest_runtest_logreport(report=report)
            case Done(costs):
                fork.running = None
                if costs is not None:
                    session.config.pluginmanager.getplugin("costs").add(costs)

    def _ended(self, session: pytest.Session, fork: Fork) -> None:
        """Unless it was done, fail the test that it ran; start another for the rest."""
        _, status = os.waitpid(fork.pid, 0)
        if fork.running is None:
            if not fork.left:
                return
            fork.running = fork.left.popleft()
        code = os.waitstatus_to_exitcode(status)
        why = f"signal {-code}" if code < 0 else f"status {code}"
        item = session.items[fork.running]
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"the process that ran it ended with {why}",
            when="call",
        )
        session.config.hook.pytest_runtest_logreport(report=report)
        if fork.left:
            self._files.appendleft(fork.left)
        if self._files:
            self._start(session)


class Reports:
    """The plugin of a fork: it sends what the tests did."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return  # nobody counts these
        data = self._config.hook.pytest_report_to_serializable(
            config=self._config, report=report
        )
        self._connection.send(Report(data))


def run_files(session: pytest.Session, connection: Connection) -> None:
    """Run the files that come over the connection, until one without tests comes."""
    config, items = session.config, session.items
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(Reports(config, connection))
    # What tests write is caught in files: in those of the other forks, without this.
    if capture := config.pluginmanager.getplugin("capturemanager"):
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    random.seed()
    file = connection.recv()
    while file:
        following: Sequence[int] = ()
        for place, after in zip(file, [*file[1:], None], strict=True):
            if after is None:
                # Fixtures that the next test uses, too, are kept: it has to be known.
                connection.send(Wants())
                following = connection.recv()
                after = following[0] if following else None
            connection.send(Began(place))
            config.hook.pytest_runtest_protocol(
                item=items[place], nextitem=None if after is None else items[after]
            )
        file = following
    costs = config.pluginmanager.getplugin("costs")
    connection.send(Done(costs.of_tests() if costs else None))
