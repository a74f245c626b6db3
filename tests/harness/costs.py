"""What the suite costs, in processor seconds: ``make test-costs`` prints the tables.

What tests use, and the programs that they have waited for, is added up by test and by
fixture.  What was used before the first test is the cost of collection.
"""

import resource
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import pytest

from harness import fork_server

ROWS = 30  # of each table

Figures = tuple[Mapping[str, float], Mapping[str, Sequence[float]]]
"""Seconds of each test, and of the set-ups of each fixture."""


class Costs:
    """The plugin.  A fork of the process has a copy, which measures what runs there."""

    def __init__(self) -> None:
        self._tests: dict[str, float] = {}
        self._fixtures: dict[str, list[float]] = {}
        self._before_tests = 0.0
        self._peak = 0  # KiB
        self._inner = [0.0]  # seconds of fixtures that an unfinished fixture requested

    def pytest_collection_finish(self) -> None:
        self._before_tests = processor_seconds()
        self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item
    ) -> Generator[None, object, object]:
        began = processor_seconds()
        try:
            return (yield)
        finally:
            self._tests[item.nodeid] = processor_seconds() - began

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        began = processor_seconds()
        self._inner.append(0.0)
        try:
            return (yield)
        finally:
            seconds = processor_seconds() - began
            name = f"{fixturedef.argname} ({fixturedef.baseid or 'a plugin'})"
            self._fixtures.setdefault(name, []).append(seconds - self._inner.pop())
            self._inner[-1] += seconds

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        self._write(terminalreporter)

    def of_tests(self) -> Figures:
        """Return what tests and fixtures have cost."""
        return self._tests, self._fixtures

    def add(self, figures: Figures) -> None:
        """Add what another process has measured."""
        tests, fixtures = figures
        self._tests.update(tests)
        for name, set_ups in fixtures.items():
            self._fixtures.setdefault(name, []).extend(set_ups)

    def _write(self, reporter: pytest.TerminalReporter) -> None:
        """Print the tables, the most expensive rows first."""
        tests, folders, files, fixtures = (
            defaultdict[str, float](float) for _ in range(4)
        )
        counts = Counter[str]()
        for test, seconds in self._tests.items():
            file = test.partition("::")[0]
            folder = file.rpartition("/")[0]
            for table, name in ((tests, test), (files, file), (folders, folder)):
                table[name] += seconds
                counts[name] += 1
        for name, set_ups in self._fixtures.items():
            fixtures[name] += sum(set_ups)
            counts[name] += len(set_ups)
        reporter.section("processor seconds")
        reporter.write_line(
            f"{self._before_tests:7.1f}  before the first test,"
            f" {self._peak / 1024:.0f} MiB"
        )
        total = sum(tests.values()) + self._before_tests
        reporter.write_line(f"{sum(tests.values()):7.1f}  tests")
        reporter.write_line(f"{total:7.1f}  all")
        for title, table in (
            ("folder, tests in it", folders),
            ("file, tests in it", files),
            ("test", tests),
            ("fixture, set-ups", fixtures),
        ):
            reporter.write_line(f"\nseconds  {title}")
            for name, seconds in sorted(table.items(), key=itemgetter(1))[
                : -ROWS - 1 : -1
            ]:
                count = "" if table is tests else f", {counts[name]}"
                reporter.write_line(f"{seconds:7.1f}  {name}{count}")


def processor_seconds() -> float:
    """Return what this process, and the children that it has waited for, have used."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time() + children.ru_utime + children.ru_stime
    return own + fork_server.processor_seconds()
