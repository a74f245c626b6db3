"""What clients are told that wait for a model which is being loaded."""

import math
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from shoal.coordinator.answer import Answer
from shoal.domain.facts import JobExpired, LoadState
from shoal.domain.ids import JobId, WorkerId, peer_of
from shoal.domain.job import TimeLimit
from shoal.pool.eligibility import awaits_load
from shoal.pool.models.machine import some_of
from shoal.pool.state import PoolState

RETRY_UNKNOWN = 10  # seconds until a client may try again, without an estimate
RETRY_MAX = 60  # seconds
SECONDS_MAX = 86_400.0  # of an estimate: a machine may report any share


def load_states(
    pool: PoolState, model: str, answers: Mapping[JobId, Answer], now: float
) -> Iterator[LoadState]:
    """Yield how far the loads of a model are, one for each machine."""
    for each in pool.model_orders.loading(model):
        job, answer = pool.jobs[each.job_id], answers.get(each.job_id)
        share, step = (None, "") if answer is None else answer.progress
        machine = WorkerId(each.order.machine)
        known = pool.roster.loadable.get(model, {}).get(machine)
        size = None if known is None or not known.size else known.size
        done = None if size is None or share is None else int(size * share)
        seconds = None
        if share and job.worker_id is not None:
            left = (now - job.leased_at) * (1 - share) / share
            seconds = min(SECONDS_MAX, left)
        yield LoadState(model, peer_of(machine), step, done, size, seconds)


def describe_loads(
    pool: PoolState, model: str, answers: Mapping[JobId, Answer], now: float
) -> str:
    """Return where a model is being loaded, and how far that is, in one line."""
    found = [
        f"{each.machine}{_progress(each)}"
        for each in load_states(pool, model, answers, now)
    ]
    if found:
        return f"{model} is being loaded on {', '.join(found)}"
    return f"{model} is loaded nowhere, and waits for a machine that can load it"


def with_load_state(
    fact: JobExpired, pool: PoolState, answers: Mapping[JobId, Answer], now: float
) -> JobExpired:
    """Return the end of a job that waited, with how far the load of its model is."""
    job = pool.jobs[fact.job_id]
    if fact.limit is not TimeLimit.QUEUE or not awaits_load(pool, job.model):
        return fact
    over = f"({fact.limit.value}: over the limit of {job.job.limits.queue:g} s)"
    state = next(load_states(pool, job.model, answers, now), None)
    if state is None:
        resting = _resting(pool, job.model)
        return replace(fact, error=f"{resting} {over}") if resting else fact
    said = describe_loads(pool, job.model, answers, now)
    left = RETRY_UNKNOWN if state.seconds is None else math.ceil(state.seconds)
    return replace(
        fact,
        error=f"{said} {over}",
        retry_after=max(1, min(RETRY_MAX, left)),
        loading=state,
    )


def _resting(pool: PoolState, model: str) -> str:
    """Return why the machines that can load a model do not; empty: some could."""
    machines = [pool.workers[each] for each in pool.roster.loadable[model]]
    if any(each.accepts_jobs for each in machines):
        return ""
    said = [
        f"{peer_of(each.id)} {each.unfit or 'takes no jobs now'}" for each in machines
    ]
    return f"no machine loads {model} now: {some_of(said)}"


def _progress(state: LoadState) -> str:
    said = [state.step] if state.step else []
    if state.bytes is not None and state.size:
        said.insert(0, f"{state.bytes / state.size:.0%}")
    return f" ({', '.join(said)})" if said else ""
