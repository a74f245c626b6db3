"""What a coordinator restores when it starts."""

import asyncio
import sys
from types import FrameType
from typing import Any

from coordinator.hubs import SlowStore
from pool.builders import gang, job, leased
from protocols.contexts import SIGNER
from shoal.coordinator.call_grants import CallGrants
from shoal.coordinator.hub import Hub
from shoal.coordinator.recovery import restore_pool
from shoal.domain.facts import (
    Fact,
    JobCompleted,
    JobFailed,
    JobLeased,
    JobRequeued,
    JobSubmitted,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import Outcome
from shoal.pool.lifecycle import JobState
from shoal.pool.state import PoolState
from shoal.store.port import CommitId, Epoch
from shoal.transports.clock import LoopClock
from simulation import virtual

FEW, MANY = 50, 400


async def steps_of_restore(jobs: int) -> int:
    """Return the calls of functions in which a hub restores as many owners' jobs.

    Half of them had workers.
    """
    store = SlowStore()
    await store.open()
    facts: list[Fact] = []
    for each in range(jobs):
        facts.append(JobSubmitted(job(f"j{each}", f"m{each % 100}", owner=f"o{each}")))
        if each % 2:
            leased = JobLeased(JobId(f"j{each}"), WorkerId("w"), LeaseNumber(1), "")
            facts.append(leased)
    await store.append(facts, 0.0)
    loop = asyncio.get_running_loop()
    hub = Hub(store, LoopClock(loop.time), lambda: JobId("new"), SIGNER)
    count = 0

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        restored = await hub.restore()
    finally:
        sys.setprofile(None)
    assert restored == hub.pool.queued == len(hub.pool.queued_by_owner) == jobs
    await store.close()
    return count


def test_restored_jobs_take_as_many_steps_each() -> None:
    few = virtual.run(steps_of_restore(FEW))
    many = virtual.run(steps_of_restore(MANY))

    assert many / MANY <= few / FEW


async def restored_pool(facts: list[Fact]) -> PoolState:
    store = SlowStore()
    await store.open()
    await store.append(facts, 0.0)
    pool = PoolState()
    loop = asyncio.get_running_loop()
    commit = CommitId(Epoch(0), "hub", 1)
    clock, grants = LoopClock(loop.time), CallGrants(b"", pool, {})
    await restore_pool(pool, store, clock, commit, grants)
    await store.close()
    return pool


def test_members_of_a_gang_wait_for_their_last_workers() -> None:
    facts: list[Fact] = [*gang(3), leased("r0", "a"), leased("r1", "b")]
    facts += [leased("r2", "c"), JobRequeued(JobId("r2"), LeaseNumber(1), "lost")]
    facts += [leased("r2", "d", 2), *gang(1, run="f" * 32)]

    pool = virtual.run(restored_pool(facts))

    begun, waiting = pool.gangs.in_order()
    assert begun.returning == {0: "a", 1: "b", 2: "d"}
    assert (waiting.formed, waiting.returning) == (False, {})


def test_ends_of_a_gangs_members_are_restored() -> None:
    facts: list[Fact] = [*gang(4, least=2), *gang(1, run="f" * 32)]
    facts += [leased(f"r{rank}", f"w{rank}") for rank in range(4)]
    facts += [
        JobFailed(JobId("r1"), "exploded"),
        JobCompleted(JobId("r2"), LeaseNumber(1), Outcome("")),
    ]

    pool = virtual.run(restored_pool(facts))

    begun, waiting = pool.gangs.in_order()
    assert begun.ended == {1: JobState.FAILED, 2: JobState.DONE}
    assert waiting.ended == {}
