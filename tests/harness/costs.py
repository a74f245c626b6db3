"""What the suite costs, in processor seconds: ``make test-costs`` prints the tables.

Each process adds up what it and the programs that it has waited for use, by test and by
fixture, and what it used before its first test: that is the cost of collection, which
every process pays.  The process that started the others adds their figures up.
"""

import resource
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import pytest

from harness import fork_server

ROWS = 30  # of each table

Figures = Mapping[str, Any]
"""What one process has measured, in types that pytest-xdist sends between processes."""


class Costs:
    """The plugin of a process that runs tests."""

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

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["costs"] = self._figures()

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        write(terminalreporter, [self._figures()])

    def _figures(self) -> Figures:
        return {
            "before tests": self._before_tests,
            "peak": self._peak,
            "tests": self._tests,
            "fixtures": self._fixtures,
        }


class SumOfCosts:
    """The plugin of the process that starts those that run tests."""

    def __init__(self) -> None:
        self._measured: list[Figures] = []

    def pytest_testnodedown(self, node: Any) -> None:
        figures = getattr(node, "workeroutput", {}).get("costs")
        if figures is not None:
            self._measured.append(figures)

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        write(terminalreporter, self._measured)


def processor_seconds() -> float:
    """Return what this process, and the children that it has waited for, have used."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time() + children.ru_utime + children.ru_stime
    return own + fork_server.processor_seconds()


def write(reporter: pytest.TerminalReporter, measured: Sequence[Figures]) -> None:
    """Print the tables, the most expensive rows first."""
    tests, folders, files, fixtures = (Counter[str]() for _ in range(4))
    counts = Counter[str]()
    for figures in measured:
        for test, seconds in figures["tests"].items():
            file = test.partition("::")[0]
            folder = file.rpartition("/")[0]
            for table, name in ((tests, test), (files, file), (folders, folder)):
                table[name] += seconds
                counts[name] += 1
        for name, set_ups in figures["fixtures"].items():
            fixtures[name] += sum(set_ups)
            counts[name] += len(set_ups)
    reporter.section("processor seconds")
    for figures in measured:
        reporter.write_line(
            f"{figures['before tests']:7.1f}  before the first test of a process,"
            f" {figures['peak'] / 1024:.0f} MiB"
        )
    total = sum(tests.values()) + sum(each["before tests"] for each in measured)
    reporter.write_line(f"{sum(tests.values()):7.1f}  tests")
    reporter.write_line(f"{total:7.1f}  all")
    for title, table in (
        ("folder, tests in it", folders),
        ("file, tests in it", files),
        ("test", tests),
        ("fixture, set-ups", fixtures),
    ):
        reporter.write_line(f"\nseconds  {title}")
        for name, seconds in table.most_common(ROWS):
            count = "" if table is tests else f", {counts[name]}"
            reporter.write_line(f"{seconds:7.1f}  {name}{count}")
