"""Workers that say how much they can take, and how often."""

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest

from runtime.hubs import Coordinator, Member, play
from shoal.domain.facts import Fact, WorkerConditioned
from shoal.domain.vocabulary import Conditioned, Joined
from shoal.domain.worker import CHATS, Condition, Offer
from shoal.runtime.conditions import (
    ALTERED_EVERY,
    QUEUED_MAX,
    SPEED_MIN,
    UNFIT_MAX,
)

HOT = Conditioned(Condition("is too hot"))
FIT = Conditioned(Condition())


def with_worker(
    script: Callable[[Coordinator, Member, list[WorkerConditioned]], Awaitable[None]],
) -> None:
    async def whole(its: Coordinator) -> None:
        facts: list[WorkerConditioned] = []

        def saw(fact: Fact) -> None:
            if isinstance(fact, WorkerConditioned):
                facts.append(fact)

        its.hub.watch(saw)
        await script(its, await its.join(), facts)

    play(whole)


def condition(its: Coordinator) -> Condition:
    (worker,) = its.hub.pool.workers.values()
    return worker.condition


def test_worker_that_is_fit_again_gets_what_waits() -> None:
    async def script(its: Coordinator, w: Member, facts: object) -> None:
        w.say(HOT)
        client = await its.ask()
        assert w.runs == []

        w.say(FIT)
        await asyncio.sleep(ALTERED_EVERY)

        assert len(w.runs) == 1
        w.complete()
        await asyncio.sleep(0.05)
        assert client.outcome is not None

    with_worker(script)


def test_change_counts_at_once_and_what_follows_too_soon_a_little_later() -> None:
    async def script(
        its: Coordinator, w: Member, facts: list[WorkerConditioned]
    ) -> None:
        for number in range(1000):
            w.say(HOT if number % 2 == 0 else FIT)
        await asyncio.sleep(0.05)
        assert [fact.condition.unfit for fact in facts] == ["is too hot"]

        await asyncio.sleep(ALTERED_EVERY)

        assert [fact.condition.unfit for fact in facts] == ["is too hot", ""]
        assert condition(its) == Condition()

    with_worker(script)


def test_what_changes_nothing_is_no_fact() -> None:
    async def script(
        its: Coordinator, w: Member, facts: list[WorkerConditioned]
    ) -> None:
        for _ in range(5):
            w.say(HOT)
            await asyncio.sleep(1.0)

        assert len(facts) == 1
        assert facts[0].turned

    with_worker(script)


def test_conditions_are_not_stored() -> None:
    async def script(its: Coordinator, w: Member, facts: object) -> None:
        its.store.working.clear()  # else it would wait for the disk

        w.say(HOT)
        await asyncio.sleep(0.05)

        assert condition(its).unfit
        its.store.working.set()

    with_worker(script)


def test_beginnings_that_wait_are_stored_though_conditions_come_between() -> None:
    async def script(its: Coordinator, w: Member, facts: object) -> None:
        client = await its.ask()
        w.write("hi")
        for queued in range(20):
            w.say(Conditioned(Condition(queued=queued)))
            await asyncio.sleep(0.05)

        names = [type(fact).__name__ for fact in await its.story(client.job_id)]
        assert names == ["JobSubmitted", "JobLeased", "JobStarted"]

    with_worker(script)


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        (Condition(speed=0.0), Condition(speed=SPEED_MIN)),
        (Condition(speed=-1.0), Condition(speed=SPEED_MIN)),
        (Condition(speed=7.0, queued=1), Condition(queued=1)),
        (Condition(speed=math.nan, queued=1), Condition(queued=1)),
        (Condition(queued=-3, speed=0.5), Condition(speed=0.5)),
        (Condition(queued=1 << 70), Condition(queued=QUEUED_MAX)),
        (Condition("x" * 1000), Condition("x" * UNFIT_MAX)),
    ],
)
def test_condition_that_cannot_be_is_taken_for_the_nearest(
    said: Condition, taken: Condition
) -> None:
    async def script(its: Coordinator, w: Member, facts: object) -> None:
        w.say(Conditioned(said))
        await asyncio.sleep(0.05)

        assert condition(its) == taken

    with_worker(script)


def test_worker_that_joins_anew_is_as_fit_as_any() -> None:
    async def script(its: Coordinator, w: Member, facts: object) -> None:
        w.say(HOT, FIT)  # the second is still to be passed on
        w.say(Joined("w", Offer(CHATS, frozenset({"m"}))))
        w.say(Conditioned(Condition(queued=3)))
        await asyncio.sleep(2 * ALTERED_EVERY)

        assert condition(its) == Condition(queued=3)

    with_worker(script)


def test_worker_that_has_gone_says_nothing_more() -> None:
    async def script(
        its: Coordinator, w: Member, facts: list[WorkerConditioned]
    ) -> None:
        w.say(HOT, FIT)
        w.port.gone("cut off")
        await asyncio.sleep(2 * ALTERED_EVERY)

        assert its.hub.pool.workers == {}
        assert len(facts) <= 1

    with_worker(script)
