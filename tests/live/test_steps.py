"""Work takes no more calls of functions than bench/steps.json has: no time is taken."""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness.fork_server import LINUX, started

BENCH = Path(__file__).parents[2] / "bench"
KEPT: dict[str, Any] = json.loads((BENCH / "steps.json").read_text())
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
ROUNDS_MAX = 7  # of which the least counts: on a busy machine less is done together
NAMED = 3  # parts that grew, and functions of the one that grew most

pytestmark = [
    pytest.mark.short,
    pytest.mark.skipif(
        not LINUX or KEPT["python"] != PYTHON,
        reason=f"bench/steps.json is of Python {KEPT['python']} on Linux",
    ),
]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    names = [each.stem for each in BENCH.glob("*.py")]
    for name in names:  # some are names of folders of tests as well
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(BENCH))
    import steps  # type: ignore[import-not-found]  # bench/ is no package

    yield steps
    for name in names:
        sys.modules.pop(name, None)


def test_each_unit_of_work_takes_no_more_calls_than_is_kept(
    steps: ModuleType, tmp_path: Path
) -> None:
    more: list[str] = []

    @contextmanager
    def start(*arguments: str) -> Iterator[Any]:
        with (tmp_path / "log").open("a") as errors:
            process = started("counted", arguments, str(BENCH), {**os.environ}, errors)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, f"it did not begin:\n{(tmp_path / 'log').read_text()}"
            yield steps.Program(process, json.loads(line))
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    async def measured(programs: Any, unit: Any) -> None:
        if not unit.alone:
            return
        least: dict[str, Counter[str]] = {}
        async with aclosing(steps.rounds_of(unit, programs)) as all_rounds:
            for _ in range(ROUNDS_MAX):
                for role, calls in (await anext(all_rounds)).items():
                    row = f"{role}, {unit.name}"
                    least[row] = min(least.get(row, calls), calls, key=Counter.total)
                over = [row for row in least if least[row].total() > limit(steps, row)]
                if not over:
                    break
        more.extend(told(steps, row, least[row]) for row in over)

    steps.run(steps.each_unit(measured, start))
    assert not more, "\n".join(
        [*more, "Make it less, or accept it: make bench NAME=steps WRITE=1"]
    )


def kept(row: str) -> dict[str, float]:
    """Return the calls that are kept of a row, by part of the program."""
    parts: dict[str, float] = KEPT["calls"].get(row, {})
    return parts


def limit(steps: ModuleType, row: str) -> float:
    return sum(kept(row).values()) * float(steps.AT_MOST)


def told(steps: ModuleType, row: str, calls: Counter[str]) -> str:
    """Say how much a row has grown, in which parts, and what these call most."""
    parts: dict[str, float] = steps.by_part(calls)
    if not (before := sum(kept(row).values())):
        return f"{row}: {calls.total():,.1f} calls, of which nothing is kept"
    growth = Counter(parts)
    growth.subtract(kept(row))
    most_grown = [each for each in growth.most_common(NAMED) if each[1] >= 1.0]
    grown = ", ".join(f"{part} {n:+.1f}" for part, n in most_grown)
    ((most, _),) = growth.most_common(1)
    functions = Counter(
        {each: n for each, n in calls.items() if steps.part(each) == most}
    )
    called = "".join(f"\n  {n:.1f} {each}" for each, n in functions.most_common(NAMED))
    percent = calls.total() / before - 1
    return (
        f"{row}: {calls.total():,.1f} calls, {percent:.0%} more than {before:,.1f}: "
        f"{grown}; most called in {most}:{called}"
    )
