"""Admitted peers that send all that they may, and peers that hardly send at all.

What they cost is counted in CPU time of the event loop's thread, so that a busy machine
changes nothing.  The control does the same with peers that send a little.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from attacks.flooding import FLEET_HUB, SENT
from attacks.lan import PASSCODE
from attacks.siege import TOKEN, ask, besieged, join
from gateway.serving import WAIT_MAX, Node, Pool, eventually
from harness import speed
from shoal.protocols import dispatch, macfleet, tealenet
from shoal.transports.loop_share import INPUTS_SHARE

TESTS = Path(__file__).parents[1]
TICK = 0.001  # seconds
WATCHED = 2.0  # seconds
CHATS = 5
LARGE_INPUTS = dict.fromkeys(("chats", "images", "bombs", "calls", "macs"), 2.0) | {
    "providers": 5.0,
    "fleet": 7.0,
    "mixed": 7.0,
}
"""How long each may hold the loop at most, in units of 50 ms."""
LONG = 0.005  # seconds of a tick in which a large input may have been handled

pytestmark = pytest.mark.long


@pytest.fixture
async def pool(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Pool]:
    wires = {
        "dispatch": dispatch.Config(open=True),
        "macfleet": macfleet.Config(token=TOKEN, heartbeat_port=0, transport_port=0),
        "tealenet": tealenet.Config(passcode=PASSCODE),
    }
    async with besieged(tmp_path, caplog, wires=wires, name=FLEET_HUB) as running:
        yield running


class LoopMeter:
    """CPU time of the event loop's thread, as timers of a millisecond see it."""

    def __init__(self) -> None:
        self.spent = 0.0  # seconds
        self.long = 0.0  # seconds of ticks that took longer than ``LONG``
        self.longest = 0.0
        self._last = time.thread_time()
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        now = time.thread_time()
        took, self._last = now - self._last, now
        self.spent += took
        self.longest = max(self.longest, took)
        if took > LONG:
            self.long += took
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    def stop(self) -> None:
        self._timer.cancel()


@asynccontextmanager
async def metered() -> AsyncIterator[LoopMeter]:
    meter = LoopMeter()
    try:
        yield meter
    finally:
        meter.stop()


@contextmanager
def flood(kind: str, pool: Pool) -> Iterator["subprocess.Popen[str]"]:
    """Run a flood within the block, as a process."""
    lan = f"tcp://127.0.0.1:{pool.ports['tealenet']['tcp']}"
    url = lan if kind == "macs" else pool.url
    command = [sys.executable, "-m", "attacks.flooding", kind, url]
    with subprocess.Popen(
        command, cwd=TESTS, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def sent(process: "subprocess.Popen[str]", count: int = 1) -> None:
    """Wait until a flood has sent so many inputs."""
    assert process.stdout is not None
    for _ in range(count):
        async with asyncio.timeout(WAIT_MAX):
            line = await asyncio.to_thread(process.stdout.readline)
        assert line == f"{SENT}\n", "the flood has ended"


async def talk(pool: Pool, node: Node) -> None:
    """Have honest people served."""
    for number in range(CHATS):
        asking = asyncio.create_task(ask(pool))
        await node.answer("mine", number=number)
        assert "mine" in await asking


async def cost(pool: Pool, kind: str = "") -> LoopMeter:
    """Return what a flood costs while honest people are served; "": without one."""
    async with join(pool) as node, AsyncExitStack() as stack:
        await eventually(lambda: "m1" in pool.hub.pool.roster.with_model)
        process = stack.enter_context(flood(kind, pool)) if kind else None
        if process is not None:
            await sent(process)
        async with metered() as meter:
            await asyncio.gather(asyncio.sleep(WATCHED), talk(pool, node))
        if process is not None:
            await sent(process, 2)  # it goes on: nobody has disconnected it
    return meter


def unit() -> float:
    """Return the CPU time of 50 ms of the reference machine, here and now."""
    began = time.thread_time()
    for _ in range(2):
        speed.run_round()
    return max(time.thread_time() - began, 2 * speed.REFERENCE)


@pytest.mark.parametrize("kind", [*LARGE_INPUTS])
async def test_flood_of_large_inputs_has_a_share_of_the_loop(
    kind: str, pool: Pool
) -> None:
    before = unit()
    meter = await cost(pool, kind)

    # Reading costs as well, and short turns that come together count as a long one.
    assert meter.long < 2 * INPUTS_SHARE * WATCHED
    assert meter.longest < LARGE_INPUTS[kind] * max(before, unit())


async def test_peers_that_send_slowly_cost_hardly_anything(pool: Pool) -> None:
    control = await cost(pool)
    meter = await cost(pool, "slow")

    assert meter.spent < 2 * control.spent + 0.05 * WATCHED
    assert meter.longest < unit()


async def test_streams_that_nobody_reads_do_not_hold_the_loop(pool: Pool) -> None:
    meter = await cost(pool, "unread")

    assert meter.long < 2 * INPUTS_SHARE * WATCHED
    assert meter.longest < 2 * unit()
