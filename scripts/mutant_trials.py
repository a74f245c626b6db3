"""Runs the tests that reach a changed line on the changed module, in a copied tree.

Each trial is a fork of a process that has imported whatever does not import the module,
so that it takes little more than its tests.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import coverage
import pytest
from mutants import Mutant

SECONDS_MAX = 5.0  # of other modules' tests for one mutant, as they take unchanged
LOOPS_AFTER = 1.0  # seconds of processor time beyond five times what a test takes
HANGS_AFTER = 30.0  # seconds beyond three times its duration

OPTIONS = (
    *("-q", "--no-header", "--tb=no", "--assert=plain", "-p", "no:cacheprovider"),
    *("-m", "not long", "-W", "ignore::DeprecationWarning:multiprocessing"),
)

_FORK = multiprocessing.get_context("fork")


class Verdict(Enum):
    """How a trial ended."""

    KILLED = "killed"
    HUNG = "hung"
    SURVIVED = "survived"
    UNREACHED = "no test reaches it"


@dataclass(slots=True)
class Reach:
    """Which tests reach which lines, and how long each test takes unchanged."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of processor time: on a busy machine, few would seem to be fast enough."""
    durations: dict[str, float] = field(default_factory=dict)
    """In seconds, with those that it waits."""
    tests: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    """By module and line."""
    imported: list[str] = field(default_factory=list)
    """What the tests have imported."""
    environment: dict[str, str] = field(default_factory=dict)
    """What the tests have put there for those below them."""

    failed: list[str] = field(default_factory=list)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach a mutant, those of its module first."""
        lines = self.tests[mutant.path]
        first, last = mutant.lines
        found = {
            test for line in range(first, last + 1) for test in lines.get(line, ())
        }
        if "" in found:  # it is run by the import: any test of the module may tell
            found = {test for tests in lines.values() for test in tests}
        found.discard("")
        ordered = sorted(
            found, key=lambda test: (not _is_own(test, mutant), self.seconds[test])
        )
        chosen: list[str] = []
        total = 0.0
        for test in ordered:
            total += 0.0 if _is_own(test, mutant) else self.seconds[test]
            if total > SECONDS_MAX:
                break
            chosen.append(test)
        return chosen


class _Watch:
    """Records what tests reach; a plug-in of pytest."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.reach = Reach()
        self._paths = paths
        self._coverage = coverage.Coverage(
            data_file=None, config_file=False, include=[*paths], messages=False
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        began = time.process_time()
        result = yield
        self.reach.seconds[item.nodeid] = time.process_time() - began
        self._coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        durations = self.reach.durations
        durations[report.nodeid] = durations.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.reach.failed.append(report.nodeid)

    def finished(self) -> Reach:
        self._coverage.stop()
        data = self._coverage.get_data()
        for path in self._paths:
            lines = data.contexts_by_lineno(str(Path(path).resolve()))
            self.reach.tests[path] = {line: {*tests} for line, tests in lines.items()}
        self.reach.imported = [*filter(_is_preloaded, sys.modules)]
        return self.reach


class _Ends:
    """Ends the process with the first test that fails or runs on and on; a plug-in."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        # Of processor time: on a busy machine, a test waits longer than it runs.
        limit = LOOPS_AFTER + 5 * self._seconds.get(nodeid, 0.0)
        signal.setitimer(signal.ITIMER_PROF, limit)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os._exit(1)


def reach_of(paths: Sequence[str], tests: Sequence[str]) -> Reach:
    """Run the tests on the unchanged tree, which is the working folder."""
    receiving, sending = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_measure, args=(sending, paths, tests))
    process.start()
    sending.close()
    try:
        reach: Reach = receiving.recv()
    finally:
        process.join()
    return reach


def _measure(sending: Connection, paths: Sequence[str], tests: Sequence[str]) -> None:
    _silence()
    before = {*os.environ}
    watch = _Watch(paths)
    status = pytest.main([*OPTIONS, *tests], plugins=[watch])
    reach = watch.finished()
    reach.environment = {
        name: value for name, value in os.environ.items() if name not in before
    }
    if status and not reach.failed:
        reach.failed.append(f"pytest ended with {status}")
    sending.send(reach)
    sending.close()
    _end(0)


def try_all(
    mutants: Sequence[Mutant],
    reach: Reach,
    source: str,
    told: Callable[[Mutant, Verdict], None],
) -> None:
    """Try the mutants of one module; ``told`` is called with the verdict on each.

    Raises RuntimeError if the tests fail on the unchanged module, run so.
    """
    receiving, sending = _FORK.Pipe(duplex=False)
    nursery = _FORK.Process(target=_nurse, args=(sending, mutants, reach, source))
    nursery.start()
    sending.close()
    try:
        for mutant in mutants:
            told(mutant, receiving.recv())
    except EOFError as error:
        raise RuntimeError(f"{mutants[0].path}: its tests fail unchanged") from error
    finally:
        nursery.join()


def _nurse(
    sending: Connection, mutants: Sequence[Mutant], reach: Reach, source: str
) -> None:
    path = Path(mutants[0].path)
    os.environ.update(reach.environment)
    _import_all_but(path.relative_to(source).with_suffix("").parts, reach.imported)
    unchanged = path.read_bytes()
    control: dict[str, None] = {}
    for mutant in mutants:
        control.update(dict.fromkeys(reach.tests_of(mutant)[:20]))
    if _trial([*control], reach) is not Verdict.SURVIVED:
        _end(1)
    for cached in path.parent.glob(f"__pycache__/{path.stem}.*"):
        cached.unlink()
    try:
        for mutant in mutants:
            path.write_bytes(mutant.applied_to(unchanged))
            sending.send(_verdict_on(mutant, reach))
    finally:
        path.write_bytes(unchanged)
    sending.close()
    _end(0)


def _verdict_on(mutant: Mutant, reach: Reach) -> Verdict:
    """Try the tests of the module first: they import the least, and know the most."""
    tests = reach.tests_of(mutant)
    own = [test for test in tests if _is_own(test, mutant)]
    verdict = Verdict.UNREACHED
    for batch in (own, tests[len(own) :]):
        if batch:
            verdict = _trial(batch, reach)
        if verdict in (Verdict.KILLED, Verdict.HUNG):
            break
    return verdict


def _is_own(test: str, mutant: Mutant) -> bool:
    return f"/test_{Path(mutant.path).stem}.py::" in test


def _import_all_but(parts: Sequence[str], names: Sequence[str]) -> None:
    """Import all but one module and what imports it."""
    blocked = ".".join(parts).removesuffix(".__init__")

    class Block:
        @staticmethod
        def find_spec(
            name: str, path: object = None, target: ModuleType | None = None
        ) -> ModuleSpec | None:
            if name == blocked:
                raise ImportError(name)
            return None

    own = blocked.partition(".")[0]
    sys.meta_path.insert(0, Block)
    for name in names:
        before = {*sys.modules}
        try:
            importlib.import_module(name)
        except Exception:  # it imports the module, or what is left for later
            # What it has imported first, in an order that the tests never have, may
            # import it in a circle.
            for each in {*sys.modules} - before:
                if each.partition(".")[0] == own:
                    del sys.modules[each]
    sys.meta_path.remove(Block)


def _is_preloaded(name: str) -> bool:
    """Say whether a module is imported once, and not by each trial.

    Not what is under test: half imported, without the blocked module, its folders would
    hide those that pytest finds under the same names.
    """
    file = getattr(sys.modules[name], "__file__", None)
    in_tests = file is not None and Path(file).is_relative_to(Path("tests").resolve())
    return not (in_tests or name.startswith("_") or name.endswith("__main__"))


def _trial(tests: Sequence[str], reach: Reach) -> Verdict:
    process = _FORK.Process(target=_test, args=(tests, reach.seconds))
    process.start()
    limit = HANGS_AFTER + 3 * sum(reach.durations[test] for test in tests)
    process.join(limit)
    hung = process.exitcode is None
    assert process.pid is not None
    with suppress(ProcessLookupError):  # it leads a group, for what it has started
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    if hung or process.exitcode == -signal.SIGPROF:
        return Verdict.HUNG
    return Verdict.KILLED if process.exitcode else Verdict.SURVIVED


def _test(tests: Sequence[str], seconds: dict[str, float]) -> None:
    os.setsid()
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    _silence()
    _end(pytest.main([*OPTIONS, "-x", *tests], plugins=[_Ends(seconds)]))


def _silence() -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)


def _end(status: int) -> None:
    """End a fork, and what its parent began in it as well."""
    sys.stdout.flush()
    os._exit(status)
