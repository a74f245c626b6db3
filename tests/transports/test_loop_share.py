"""Turns of large inputs, by a clock that is a number."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from shoal.protocols.seam.session import Data
from shoal.transports.clock import LoopClock
from shoal.transports.driver import Driver
from shoal.transports.loop_share import LARGE, LONG, PAUSE, LoopShare
from simulation import virtual
from transports.memory_links import MemoryLink, ScriptedSession

LONG_TURN = 4 * LONG


@dataclass
class ManualClock:
    """A clock that a test sets; timers fire when it passes them."""

    at: float = 100.0
    due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at

    def call_at(self, when: float, call: Callable[[], None]) -> "ManualClock":
        self.due.append((when, call))
        return self

    def cancel(self) -> None:
        raise AssertionError("no timer of a share is cancelled")

    async def pass_time(self, seconds: float = 0.0) -> None:
        """Let timers fire, and those run who are woken."""
        self.at += seconds
        due = self.due
        self.due = [each for each in due if each[0] > self.at]
        for _, call in [each for each in due if each[0] <= self.at]:
            call()
        for _ in range(3):
            await asyncio.sleep(0)


class Peers:
    """Peers that have turns; ``had`` lists them in their order."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.share = LoopShare(self.clock)
        self.had: list[str] = []

    async def have(self, peer: str, took: float) -> None:
        async with self.share.turn(peer):
            self.had.append(peer)
            self.clock.at += took

    async def wait(self, peer: str, took: float = 0.0) -> "asyncio.Task[None]":
        """Let a peer wait for its turn, or have it if that comes at once."""
        waiting = asyncio.create_task(self.have(peer, took))
        await asyncio.sleep(0)
        return waiting


async def test_first_turn_comes_at_once() -> None:
    peers = Peers()

    await peers.have("a", LONG)
    await peers.clock.pass_time()
    await peers.have("b", LONG)

    assert peers.had == ["a", "b"]


async def test_after_a_long_turn_the_loop_is_left_to_others() -> None:
    peers = Peers()
    await peers.have("a", LONG_TURN)
    await peers.wait("b")

    await peers.clock.pass_time(0.9 * PAUSE * LONG_TURN)
    assert peers.had == ["a"]
    await peers.clock.pass_time(0.2 * PAUSE * LONG_TURN)
    assert peers.had == ["a", "b"]


async def test_turns_that_wait_come_one_at_a_time() -> None:
    peers = Peers()
    await peers.have("a", LONG_TURN)
    for peer in ("b", "c", "d"):
        await peers.wait(peer)
    await peers.clock.pass_time(PAUSE * LONG_TURN)

    for had in ("ab", "abc", "abcd"):
        assert "".join(peers.had) == had
        await peers.clock.pass_time()


async def test_peer_that_costs_little_need_not_wait_for_all_that_cost_much() -> None:
    peers = Peers()
    for _ in range(3):
        await peers.wait("greedy", LONG_TURN)
        await peers.wait("large", LONG_TURN)
    for _ in range(4):
        await peers.wait("modest", LONG / 10)
    while peers.clock.due:
        await peers.clock.pass_time(PAUSE * LONG_TURN)

    assert peers.had[0] == "greedy"
    assert peers.had[1:3] == ["large", "modest"]
    assert peers.had[3:6] == ["modest"] * 3
    assert peers.had[6:] == ["greedy", "large", "greedy", "large"]


async def test_newcomer_does_not_overtake_all_for_what_it_has_not_had() -> None:
    peers = Peers()
    for _ in range(4):
        await peers.wait("a", LONG_TURN)
        await peers.wait("b", LONG_TURN)
    for _ in range(4):
        await peers.clock.pass_time(PAUSE * LONG_TURN)
    for _ in range(2):
        await peers.wait("new", LONG_TURN)
    while peers.clock.due:
        await peers.clock.pass_time(PAUSE * LONG_TURN)

    assert peers.had[-6:].count("new") == 2
    assert peers.had[-6:-4] != ["new", "new"]


@pytest.mark.parametrize("woken", [False, True])
async def test_peer_that_leaves_passes_its_turn_on(woken: bool) -> None:
    peers = Peers()
    await peers.have("a", LONG_TURN)
    gone = await peers.wait("gone")
    await peers.wait("b")
    if woken:
        peers.clock.at += PAUSE * LONG_TURN
        (_, call) = peers.clock.due.pop()
        call()

    gone.cancel()
    await peers.clock.pass_time(PAUSE * LONG_TURN)
    await peers.clock.pass_time()
    await peers.clock.pass_time()

    assert peers.had == ["a", "b"]
    await peers.have("c", 0.0)


async def test_turn_that_fails_is_over() -> None:
    peers = Peers()
    with pytest.raises(ZeroDivisionError):
        async with peers.share.turn("a"):
            raise ZeroDivisionError
    await peers.clock.pass_time()

    await peers.have("b", 0.0)


def test_flood_of_large_messages_leaves_most_of_the_loop_to_others() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual.VirtualLoop)
        handled = Counter[int]()

        def take_long(peer: int, data: Data) -> list[object]:
            handled[peer] += 1
            loop.spend(LONG_TURN)
            return []

        clock = LoopClock()
        share = LoopShare(clock)
        floods = []
        for peer in range(3):
            link = MemoryLink()
            link.endless = b"x" * LARGE
            session = ScriptedSession(partial(take_long, peer))
            flood: Driver[object, object] = Driver(session, link, clock, print, share)
            floods.append(asyncio.create_task(flood.run()))
        await asyncio.sleep(100.0)
        for each in floods:
            each.cancel()
        await asyncio.gather(*floods, return_exceptions=True)

        assert 0.2 < handled.total() * LONG_TURN / 100.0 < 0.26
        assert max(handled.values()) - min(handled.values()) <= 1

    virtual.run(scenario())
