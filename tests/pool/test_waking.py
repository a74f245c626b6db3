"""Which machines are woken, and when they count as absent."""

from msgspec.structs import replace

from pool.builders import job, joined, pool_after
from shoal.domain.facts import (
    DeploymentSet,
    Fact,
    JobSubmitted,
    MachineCalled,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from shoal.domain.ids import WorkerId
from shoal.domain.job import TimeLimits
from shoal.pool import waking
from shoal.pool.react import next_limit
from shoal.pool.state import PoolState
from shoal.pool.waking import CALL_INTERVAL, CALLS_MAX, WAKE_TIMEOUT

WAKE = ("02:00:00:00:00:01",)
SLEEPER, NEIGHBOUR = WorkerId("shoal:a/m"), WorkerId("shoal:b/other")


def waking_worker(worker_id: WorkerId, model: str) -> WorkerJoined:
    found = joined(worker_id, model)
    return replace(found, offer=replace(found.offer, wake=WAKE))


AWAKE: list[Fact] = [waking_worker(SLEEPER, "m"), waking_worker(NEIGHBOUR, "other")]
ASLEEP = [*AWAKE, WorkerLeft(SLEEPER, "silent for 15 s")]


def called(pool: PoolState, now: float = 0.0) -> list[MachineCalled]:
    found = [*waking.calls(pool, now)]
    for each in found:
        pool.apply(each, now)
    return found


def test_a_machine_is_called_when_a_request_needs_it() -> None:
    pool = pool_after(*ASLEEP)
    assert called(pool) == []
    pool.apply(JobSubmitted(job()), 0.0)

    assert called(pool) == [MachineCalled(SLEEPER, WAKE, (NEIGHBOUR,))]
    assert called(pool) == []  # it needs time to wake


def test_a_machine_is_called_when_a_deployment_needs_it() -> None:
    pool = pool_after(*ASLEEP, DeploymentSet("m", 1, "an operator"))

    assert [each.worker_id for each in called(pool)] == [SLEEPER]


def test_one_that_said_that_it_leaves_is_not_called() -> None:
    facts = [*AWAKE, WorkerDraining(SLEEPER, "stopped"), WorkerLeft(SLEEPER, "bye")]
    pool = pool_after(*facts, JobSubmitted(job()))

    assert called(pool) == []


def test_nobody_calls_without_the_owners_permission() -> None:
    pool = pool_after(joined(SLEEPER, "m"), AWAKE[1])
    pool.apply(WorkerLeft(SLEEPER, "silent"), 0.0)
    pool.apply(JobSubmitted(job()), 0.0)
    assert called(pool) == []

    alone = pool_after(AWAKE[0], joined(NEIGHBOUR, "other"))
    alone.apply(WorkerLeft(SLEEPER, "silent"), 0.0)
    alone.apply(JobSubmitted(job()), 0.0)
    assert called(alone) == []


def test_a_machine_is_called_a_few_times_and_counts_as_absent_then() -> None:
    pool = pool_after(*ASLEEP, JobSubmitted(job()))
    times = [number * CALL_INTERVAL for number in range(CALLS_MAX + 2)]

    assert [len(called(pool, now)) for now in times] == [1] * CALLS_MAX + [0, 0]
    assert waking.next_due(pool, times[-1]) is None
    # Until it is here again.
    pool.apply(AWAKE[0], 1000.0)
    pool.apply(WorkerLeft(SLEEPER, "silent"), 1000.0)
    assert len(called(pool, 1000.0)) == 1


def test_jobs_wait_for_a_machine_that_was_called() -> None:
    limits = TimeLimits(queue=600.0, without_worker=30.0)
    pool = pool_after(*ASLEEP, JobSubmitted(replace(job(), limits=limits)))
    (waiting,) = pool.jobs.values()
    without = next_limit(pool, waiting, 0.0, None)
    called(pool)

    assert isinstance(without, float)
    assert without < WAKE_TIMEOUT
    assert next_limit(pool, waiting, without, None) == WAKE_TIMEOUT
