"""Turns in virtual time: neither clock moves but by a test."""

import asyncio
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocols.seam.session import Data
from shoal.transports.clock import LoopClock
from shoal.transports.driver import Driver
from shoal.transports.loop_share import (
    INPUTS_BURST,
    INPUTS_SHARE,
    KEPT_MIN,
    LARGE,
    LoopShare,
)
from simulation import virtual
from transports.manual_clock import ManualClock, settle
from transports.memory_links import MemoryLink, ScriptedSession

LONG = 0.02  # seconds of a turn that is long


class Crowd:
    """Tasks that work in turns; ``had`` lists whose turns have been.

    Without ``passing``, work takes CPU time, and the clock stands meanwhile.
    """

    def __init__(
        self, share: float = 0.1, burst: float = 1.0, *, passing: bool = False
    ) -> None:
        self.clock = ManualClock()
        meter = None if passing else self.clock.cpu
        self.share = LoopShare(self.clock, share, burst, meter)
        self.had: list[str] = []
        self._passing = passing

    async def work(self, peer: str, took: float, turns: int = 1) -> None:
        for _ in range(turns):
            async with self.share.turn(peer):
                self.do(peer, took)

    def do(self, peer: str, took: float) -> None:
        self.had.append(peer)
        self.clock.used += took
        if self._passing:
            self.clock.time += took

    async def begin(self, peer: str, took: float = 0.0) -> "asyncio.Task[None]":
        """Let a peer wait for its turn, or have it if that comes at once."""
        working = asyncio.create_task(self.work(peer, took))
        await asyncio.sleep(0)
        return working

    async def finish(self) -> None:
        while self.clock.calls:
            await self.clock.advance(1.0)


async def test_work_within_the_burst_waits_for_the_next_iteration_alone() -> None:
    crowd = Crowd()
    working = asyncio.create_task(crowd.work("a", 0.3, turns=4))

    await crowd.clock.advance(0.0)

    assert crowd.had == ["a"] * 4
    assert working.done()


async def test_first_turn_comes_at_once() -> None:
    crowd = Crowd(burst=0.0)

    await crowd.work("a", LONG)

    assert crowd.had == ["a"]


async def test_work_beyond_the_burst_gets_its_share() -> None:
    crowd = Crowd(share=0.1, burst=1.0)
    work = asyncio.create_task(crowd.work("a", 0.5, turns=10_000))

    await crowd.clock.advance(1000.0)

    # 1 second at once, 0.1 in each second, and the last turn may overdraw it.
    assert 99 <= crowd.clock.used <= 101.5
    work.cancel()


async def test_burst_is_not_exceeded_by_idle_time() -> None:
    crowd = Crowd(share=0.1, burst=1.0)
    await crowd.clock.advance(1000.0)
    work = asyncio.create_task(crowd.work("a", 0.5, turns=100))

    await crowd.clock.advance(0.0)

    assert crowd.clock.used <= 1.5
    work.cancel()


async def test_share_counts_the_time_of_the_turns_themselves() -> None:
    crowd = Crowd(INPUTS_SHARE, 0.0, passing=True)
    work = asyncio.create_task(crowd.work("a", LONG, turns=10_000))
    began = crowd.clock.time

    await crowd.clock.advance(10.0)

    part = crowd.clock.used / (crowd.clock.time - began)
    assert part == pytest.approx(INPUTS_SHARE, rel=0.02)
    work.cancel()


async def test_turns_that_wait_come_one_at_a_time() -> None:
    crowd = Crowd(burst=100.0)
    await crowd.work("a", LONG)
    for peer in "bcd":
        await crowd.begin(peer)

    for had in ("ab", "abc", "abcd"):
        (call,) = crowd.clock.calls
        crowd.clock.calls.remove(call)
        call[1]()
        await settle()
        assert "".join(crowd.had) == had


async def test_peers_take_turns_however_many_each_wants() -> None:
    crowd = Crowd(share=0.1, burst=1.0)
    await crowd.work("before", 1.5)
    for _ in range(50):
        await crowd.begin("a", 0.1)
    for peer in "bc":
        await crowd.begin(peer, 0.1)

    await crowd.clock.advance(9.5)

    assert crowd.had[1:5] == ["a", "b", "c", "a"]
    await crowd.finish()
    assert len(crowd.had) == 53


async def test_peer_that_costs_little_need_not_wait_for_all_that_cost_much() -> None:
    crowd = Crowd(burst=0.0)
    for _ in range(3):
        await crowd.begin("greedy", LONG)
        await crowd.begin("large", LONG)
    for _ in range(4):
        await crowd.begin("modest", LONG / 10)
    await crowd.finish()

    assert crowd.had[0] == "greedy"
    assert crowd.had[1:3] == ["large", "modest"]
    assert crowd.had[3:6] == ["modest"] * 3
    assert crowd.had[6:] == ["greedy", "large", "greedy", "large"]


async def test_newcomer_does_not_overtake_all_for_what_it_has_not_had() -> None:
    crowd = Crowd(burst=0.0)
    for _ in range(4):
        await crowd.begin("a", LONG)
        await crowd.begin("b", LONG)
    await crowd.clock.advance(4 * LONG / 0.1)
    for _ in range(2):
        await crowd.begin("new", LONG)
    await crowd.finish()

    assert crowd.had[-5:].count("new") == 2
    assert "newnew" not in "".join(crowd.had)


async def test_charges_outside_a_turn_are_waited_for() -> None:
    crowd = Crowd(share=0.1, burst=1.0)
    crowd.share.charge("b", 2.0)
    work = await crowd.begin("a")

    await crowd.clock.advance(9.9)
    assert crowd.had == []
    await crowd.clock.advance(0.2)

    assert crowd.had == ["a"]
    await work


async def test_what_is_paid_back_lets_others_go_on() -> None:
    crowd = Crowd(share=0.1, burst=1.0)
    crowd.share.charge("b", 1000.0)
    work = await crowd.begin("a")

    crowd.share.charge("b", -999.0)
    await crowd.clock.advance(0.0)

    assert crowd.had == ["a"]
    await work


async def test_a_request_is_called_in_its_turn_and_charged() -> None:
    crowd = Crowd(share=0.1, burst=0.0)
    crowd.share.charge("x", 1.0)
    for peer in "ab":
        crowd.share.request(peer, partial(crowd.do, peer, 1.0))
    await settle()
    assert crowd.had == []

    await crowd.clock.advance(10.1)
    assert crowd.had == ["a", "b"]  # its costs are charged by whoever calls ``charge``


@pytest.mark.parametrize("granted", [False, True])
async def test_peer_that_leaves_passes_its_turn_on(granted: bool) -> None:
    crowd = Crowd(share=0.1, burst=0.0)
    await crowd.work("a", 1.0)
    leaving = [await crowd.begin("gone") for _ in range(100)]
    await crowd.begin("b")

    if granted:
        crowd.clock.time += 10.0
        (call,) = crowd.clock.calls
        crowd.clock.calls.remove(call)
        call[1]()
    for each in leaving:
        each.cancel()
    await crowd.clock.advance(11.0)

    assert crowd.had == ["a", "b"]
    await crowd.work("c", 0.0)


async def test_turn_that_fails_is_over() -> None:
    crowd = Crowd()
    with pytest.raises(ZeroDivisionError):
        async with crowd.share.turn("a"):
            raise ZeroDivisionError
    await crowd.clock.advance(0.0)

    await crowd.work("b", 0.0)


async def test_a_flood_from_new_addresses_fills_no_memory() -> None:
    crowd = Crowd(share=0.1, burst=0.0)
    waiting = [await crowd.begin("a", 1.0) for _ in range(2)]
    for number in range(10 * KEPT_MIN):
        crowd.share.charge(number, 0.0)

    assert crowd.share.peers <= 2 * KEPT_MIN + 1
    await crowd.finish()
    await asyncio.gather(*waiting)


@given(
    costs=st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0.001, 1.0)), min_size=1
    ),
    share=st.floats(0.01, 0.5),
    burst=st.floats(0.0, 1.0),
)
def test_nothing_exceeds_the_share_and_everything_is_done(
    costs: list[tuple[str, float]], share: float, burst: float
) -> None:
    async def scenario() -> None:
        crowd = Crowd(share, burst)
        began = crowd.clock.time
        for peer, took in costs:
            await crowd.begin(peer, took)
        while len(crowd.had) < len(costs):
            passed = crowd.clock.time - began
            largest = max(took for _, took in costs)
            assert crowd.clock.used <= burst + share * passed + largest + 1e-6
            await crowd.clock.advance(0.5)

        assert Counter(crowd.had) == Counter(peer for peer, _ in costs)

    asyncio.run(scenario())


def test_flood_of_large_messages_leaves_most_of_the_loop_to_others() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual.VirtualLoop)
        handled = Counter[int]()

        def take_long(peer: int, data: Data) -> list[object]:
            handled[peer] += 1
            loop.spend(LONG)
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

        used = handled.total() * LONG
        assert 0.2 < (used - INPUTS_BURST) / 100.0 < 0.26
        assert max(handled.values()) - min(handled.values()) <= 1

    virtual.run(scenario())
