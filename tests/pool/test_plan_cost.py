"""The steps that decisions take do not grow with the jobs, owners and models waiting.

Steps are calls of functions and turns of generators, as Python's profiler counts them.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from harness.steps import calls
from pool.builders import assign, gang, job, joined, member
from shoal.domain.facts import JobCompleted, JobSubmitted, WorkerJoined
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, TimeLimits
from shoal.domain.outcome import Outcome
from shoal.domain.work import JobKind, Task
from shoal.domain.worker import Offer
from shoal.pool.job_admission import permanent_rejection, queue_rejection
from shoal.pool.plan import plan
from shoal.pool.state import PoolState

FEW, MANY = 50, 600
STEPS_MORE = 8 * math.log2(MANY / FEW)
PATIENT = TimeLimits(queue=1e9)


steps = partial(calls, counted=("call", "c_call"))


def submit(pool: PoolState, name: str, model: str = "m", owner: str = "") -> None:
    pool.apply(JobSubmitted(job(name, model, owner=owner)), 0.0)


def owners(number: int) -> PoolState:
    """Return a pool in which each of many owners waits for one busy worker."""
    pool = PoolState()
    pool.apply(joined(slots=2), 0.0)
    for each in range(number + 10):
        submit(pool, f"j{each}", owner=f"o{each}")
        submit(pool, f"k{each}", owner="al")
    assign(pool)
    return pool


def models(number: int) -> PoolState:
    """Return a pool in which two owners wait for many models, one of them busy."""
    pool = owners(0)
    for each in range(number):
        pool.roster.expect([f"m{each}"], [], 0.0)
        submit(pool, f"a{each}", f"m{each}", "al")
        submit(pool, f"b{each}", f"m{each}", "o1")
    return pool


def owners_without_permission(number: int) -> PoolState:
    """Return a pool in which many owners wait beside a worker for another's jobs."""
    pool = owners(number)
    pool.apply(joined("idle", only_for=frozenset({"somebody"}), slots=2), 0.0)
    return pool


def jobs_without_a_feature(number: int) -> PoolState:
    """Return a pool in which jobs wait beside a worker that lacks a feature."""
    pool = owners(0)
    for each in range(number):
        pool.apply(JobSubmitted(job(f"s{each}", stop=True, owner=f"p{each}")), 0.0)
    return pool


def jobs_of_before(number: int) -> PoolState:
    """Return a pool in which many jobs wait that had workers before a restart."""
    pool = PoolState()
    for each in range(number + 10):
        pool.restore(job(f"j{each}", owner=f"o{each}"), LeaseNumber(1), 0.0)
    pool.apply(joined(slots=2), 0.0)
    assign(pool)
    return pool


def owners_beside_a_gang(number: int) -> PoolState:
    """Return a pool in which many owners wait beside a gang that cannot begin."""
    pool = owners(number)
    for fact in gang(2):
        pool.apply(fact, 0.0)
    return pool


POOLS = [
    owners_beside_a_gang,
    owners,
    models,
    owners_without_permission,
    jobs_without_a_feature,
    jobs_of_before,
]


def next_job(pool: PoolState) -> None:
    """End a job, and begin the next."""
    job_id, lease = next(iter(pool.workers[joined().worker_id].leases.items()))
    pool.apply(JobCompleted(job_id, lease, Outcome("")), 1.0)
    assert len(assign(pool)) == 1


def admit(pool: PoolState) -> None:
    """Submit a job whose wait is estimated, although it is too long."""
    new = job("new", limits=PATIENT, owner="o1")
    pool.speeds.job_seconds["m"] = 1e10
    assert permanent_rejection(pool, new, 1.0) is None
    rejection = queue_rejection(pool, new, 1_000_000)
    assert rejection is not None
    pool.apply(JobSubmitted(new), 1.0)


@pytest.mark.parametrize("act", [next_job, admit, plan])
@pytest.mark.parametrize("pool", POOLS)
def test_decision_takes_as_many_steps_whoever_waits(
    pool: Callable[[int], PoolState], act: Callable[[PoolState], object]
) -> None:
    few, many = pool(FEW), pool(MANY)
    for each in (few, many):
        next_job(each)

    taken = steps(lambda: act(few))

    assert steps(lambda: act(many)) <= taken + STEPS_MORE


def waiting_gang(size: int, machines: int) -> PoolState:
    """Return a pool in which a gang waits for one machine more, which are all idle."""
    pool = PoolState()
    for each in range(machines):
        pool.apply(joined(f"w{each}"), 0.0)
    for fact in gang(size)[1:]:
        pool.apply(fact, 0.0)
    return pool


def test_gang_takes_as_many_steps_for_each_member() -> None:
    def leases(size: int) -> int:
        pool = waiting_gang(size, size)
        pool.apply(gang(size)[0], 0.0)
        taken = steps(lambda: plan(pool))
        assert len(assign(pool)) == size
        return taken

    assert leases(200) / 200 <= 1.2 * leases(20) / 20


def test_gangs_that_wait_for_the_same_machines_are_examined_once() -> None:
    def wait(number: int) -> int:
        pool = waiting_gang(1, 1)
        submit(pool, "busy")
        assign(pool)
        pool.apply(joined("n", "other"), 0.0)
        submit(pool, "other", "other")
        for each in range(number):
            waiting = member(0, 1, run=f"{each:032x}")
            named = replace(waiting, id=JobId(f"g{each}"))
            pool.apply(JobSubmitted(named), 0.0)
        return steps(lambda: plan(pool))

    few, many = wait(FEW), wait(MANY)

    assert (many - few) / (MANY - FEW) <= 12


def test_restored_jobs_take_as_many_steps_each() -> None:
    def restore(number: int) -> None:
        pool = PoolState()
        for each in range(number):
            pool.restore(job(f"{each}", owner=f"{each}"), LeaseNumber(each % 2), 0.0)

    few = steps(lambda: restore(FEW))

    assert steps(lambda: restore(MANY)) / MANY <= 1.2 * few / FEW


def pool_of(workers: int, models: int, **offer: Any) -> PoolState:
    """Return a pool in which half of the workers are busy."""
    pool = PoolState()
    names = [f"m{number}" for number in range(1, models)]
    for number in range(workers):
        pool.apply(joined(f"w{number}", "m", *names, slots=2, **offer), 0.0)
    for number in range(workers // 2):
        submit(pool, f"busy{number}")
    assign(pool)
    return pool


def run_job(pool: PoolState, name: str) -> None:
    """Admit a job, lease it and end it."""
    assert permanent_rejection(pool, job(name), 1.0) is None
    assert queue_rejection(pool, job(name), 1_000_000) is None
    submit(pool, name)
    assert len(assign(pool)) == 1
    ended = JobCompleted(JobId(name), LeaseNumber(1), Outcome(""))
    pool.apply(ended, 2.0)


@pytest.mark.parametrize(
    "offer", [{}, {"needs_question": True}, {"context": 4096}], ids=str
)
@pytest.mark.parametrize(("workers", "models"), [(32, 1), (200, 1), (1, 50), (200, 50)])
def test_a_job_calls_as_many_functions_in_any_pool(
    workers: int, models: int, offer: dict[str, Any]
) -> None:
    taken = []
    for pool in (pool_of(2, 1, **offer), pool_of(workers, models, **offer)):
        run_job(pool, "first")  # which finds what holds for the next
        taken.append(calls(partial(run_job, pool, "next")))

    assert taken[1] <= 1.05 * taken[0]


def test_a_task_calls_as_many_functions_with_many_workers() -> None:
    def reject(pool: PoolState, name: str) -> None:
        assert permanent_rejection(pool, Job(JobId(name), Task("sum")), 1.0) is None

    offer = Offer(frozenset({JobKind.TASK}), slots=1, tasks=frozenset({"sum"}))
    taken = []
    for workers in (2, 200):
        pool = PoolState()
        for number in range(workers):
            pool.apply(WorkerJoined(WorkerId(f"w{number}"), offer, cancels=True), 0.0)
        reject(pool, "first")
        taken.append(calls(partial(reject, pool, "next")))

    assert taken[1] == taken[0]
