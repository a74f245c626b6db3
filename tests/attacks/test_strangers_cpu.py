"""What strangers cost in CPU time, whatever they do, and that others get in."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from aiohttp import ClientSession

from attacks.knocking import KINDS, tls
from harness.speed import scaled
from live.programs import KEY, Pool, Programs
from shoal.transports.strangers import (
    ACCEPTING_SHARE,
    STRANGERS_SHARE,
)

TESTS = Path(__file__).parents[1]
WINDOWS_MAX = 8  # until strangers have used up what they may use at once
MEASURED = 1.5  # seconds of a window
UNMEASURED = 0.025  # of a core: on a busy machine, all that is not measured costs more
COST_MAX = ACCEPTING_SHARE + STRANGERS_SHARE + UNMEASURED
ENTERING = scaled(10.0)  # seconds in which somebody with a key gets in
KINDS_BY_FLAGS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    (): tuple(kind for kind in KINDS if kind != tls.__name__),
    ("--tls", "auto"): (tls.__name__,),
}

pytestmark = pytest.mark.long


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    started = Programs(tmp_path)
    yield started
    started.close()


@contextmanager
def flood(kind: str, pool: Pool) -> Iterator[None]:
    ports = pool.ready["ports"]
    at = (str(ports["http"]), str(ports["tealenet"]))
    command = [sys.executable, "-m", "attacks.knocking", kind, *at]
    with subprocess.Popen(
        command, cwd=TESTS, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


async def enter(pool: Pool) -> None:
    """Have a request with a key answered, on a new connection."""
    named = {"Authorization": f"Bearer {KEY}"}
    async with (
        asyncio.timeout(ENTERING),
        ClientSession(headers=named) as session,
        session.get(f"{pool.url}/v1/models", ssl=False) as response,
    ):
        assert response.status == 200


async def used(process: psutil.Process) -> float:
    """Return the part of a core that a process uses for a while."""
    before, began = process.cpu_times(), time.monotonic()
    await asyncio.sleep(MEASURED)
    after, took = process.cpu_times(), time.monotonic() - began
    return (after.user - before.user + after.system - before.system) / took


async def settled_cost(process: psutil.Process, control: float) -> float:
    """Return what strangers cost for good, as part of a core."""
    cost = 1.0
    for _ in range(WINDOWS_MAX):
        if (cost := await used(process) - control) < COST_MAX:
            break
    return cost


@pytest.mark.parametrize("flags", [*KINDS_BY_FLAGS], ids=["plain", "tls"])
async def test_strangers_together_cost_a_twentieth_of_a_core(
    flags: tuple[str, ...], programs: Programs
) -> None:
    pool = programs.serve(*flags)
    process = psutil.Process(pool.program.process.pid)
    await enter(pool)
    control = await used(process)
    costs = dict[str, float]()
    for kind in KINDS_BY_FLAGS[flags]:
        with flood(kind, pool):
            costs[kind] = await settled_cost(process, control)
            await enter(pool)

    assert max(costs.values()) < COST_MAX, costs
