"""Turns in virtual time: neither clock moves but by a test."""

import asyncio
from collections.abc import Callable

import pytest

from shoal.transports.cpu_share import RESERVED, CpuShare


class ManualClock:
    """A clock, and the CPU time of the loop's thread."""

    def __init__(self) -> None:
        self.time = 100.0
        self.used = 0.0
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    def cpu(self) -> float:
        return self.used

    def call_at(self, when: float, call: Callable[[], None]) -> "ManualTimer":
        entry = (when, call)
        self.calls.append(entry)
        return ManualTimer(lambda: self.calls.remove(entry))

    async def advance(self, seconds: float) -> None:
        """Let time pass, and everybody run who is due."""
        end = self.time + seconds
        await settle()
        while due := [each for each in self.calls if each[0] <= end]:
            first = min(due, key=lambda each: each[0])
            self.calls.remove(first)
            self.time = max(self.time, first[0])
            first[1]()
            await settle()
        self.time = end


class ManualTimer:
    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Crowd:
    """Tasks that work in turns; ``done`` lists whose turns have been."""

    def __init__(self, share: float = 0.1, burst: float = 1.0) -> None:
        self.clock = ManualClock()
        self.share = CpuShare(self.clock, share, burst, self.clock.cpu)
        self.done: list[str] = []

    async def work(self, network: str, seconds: float, turns: int = 1) -> None:
        for _ in range(turns):
            await self.share.wait(network)
            with self.share.turn():
                self.clock.used += seconds
                self.done.append(network)


async def test_work_within_the_burst_does_not_wait() -> None:
    crowd = Crowd()

    await crowd.work("a", 0.3, turns=4)

    assert crowd.done == ["a"] * 4


async def test_work_beyond_the_burst_gets_its_share() -> None:
    crowd = Crowd(share=0.1, burst=1.0)
    work = asyncio.create_task(crowd.work("a", 0.5, turns=10_000))

    await crowd.clock.advance(1000.0)

    # 1 second at once, 0.1 in each second, and the last turn may overdraw it.
    assert 99 <= crowd.clock.used <= 101.5
    work.cancel()


async def test_networks_take_turns() -> None:
    crowd = Crowd(share=0.1, burst=1.0)
    await crowd.work("before", 1.5)
    many = [asyncio.create_task(crowd.work("a", 0.1)) for _ in range(50)]
    await settle()
    few = [asyncio.create_task(crowd.work(name, 0.1)) for name in ("b", "c")]
    await settle()
    assert crowd.done == ["before"]

    await crowd.clock.advance(9.5)

    assert crowd.done[1:5] == ["a", "b", "c", "a"]
    await crowd.clock.advance(1000.0)
    assert len(crowd.done) == 53
    await asyncio.gather(*many, *few)


async def test_charges_elsewhere_are_waited_for() -> None:
    crowd = Crowd(share=0.1, burst=1.0)
    crowd.share.charge(2.0)
    work = asyncio.create_task(crowd.work("a", 0.0))

    await crowd.clock.advance(9.9)
    assert crowd.done == []
    await crowd.clock.advance(0.2)

    assert crowd.done == ["a"]
    await work


@pytest.mark.parametrize("granted", [False, True])
async def test_whoever_leaves_costs_nothing(granted: bool) -> None:
    crowd = Crowd(share=0.1, burst=1.0)
    crowd.share.charge(2.0)
    leaving = [asyncio.create_task(crowd.work("a", 0.0)) for _ in range(100)]
    await settle()

    if granted:
        crowd.clock.time += 10.0 + 100 * RESERVED / 0.1
        for _, call in [*crowd.clock.calls]:
            call()
    for each in leaving:
        each.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    await crowd.clock.advance(11.0)
    await crowd.work("b", 0.0)

    assert crowd.done == ["b"]


async def test_burst_is_not_exceeded_by_idle_time() -> None:
    crowd = Crowd(share=0.1, burst=1.0)
    await crowd.clock.advance(1000.0)
    work = asyncio.create_task(crowd.work("a", 0.5, turns=100))

    await settle()

    assert crowd.clock.used <= 1.5
    work.cancel()
