"""Speeds of workers, estimated from completed jobs."""

import pytest

from pool.builders import job, joined, pool_after
from shoal.domain.facts import JobSubmitted
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.outcome import Outcome, Usage
from shoal.pool.open_job import CHARACTERS_PER_TOKEN
from shoal.pool.state import PoolState
from shoal.pool.worker import NEWEST, TOKENS_MIN, SpeedEstimates, Worker

J = JobId("j")


def ready() -> tuple[PoolState, Worker]:
    pool = pool_after(joined(), JobSubmitted(job()))
    return pool, pool.workers[WorkerId("w")]


def written(tokens: int) -> Outcome:
    return Outcome("", usage=Usage(1, tokens))


@pytest.mark.parametrize(
    ("outcome", "seconds", "pace"),
    [
        (written(100), 4.0, 25.0),
        (Outcome("x" * 100 * CHARACTERS_PER_TOKEN), 4.0, 25.0),
        (written(TOKENS_MIN), 1.0, TOKENS_MIN),
        (written(TOKENS_MIN - 1), 1.0, None),
        (written(100), 0.0, None),
        (Outcome(""), 4.0, None),
    ],
)
def test_speed_is_tokens_over_total_time(
    outcome: Outcome, seconds: float, pace: float | None
) -> None:
    pool, worker = ready()
    speeds = SpeedEstimates()

    speeds.measure(pool.jobs[J], worker, outcome, seconds)

    assert worker.pace == speeds.typical_pace == pace
    assert speeds.job_seconds == {"m": seconds}


def test_single_piece_answer_is_not_measured_as_fast() -> None:
    pool, worker = ready()
    opened = pool.jobs[J]
    opened.leased_at, opened.since = 10.0, 19.999

    pool.speeds.measure(opened, worker, written(100), 20.0)

    assert worker.pace == 10.0


def test_later_measurements_are_averaged() -> None:
    pool, worker = ready()

    for seconds in (10.0, 5.0):
        pool.speeds.measure(pool.jobs[J], worker, written(100), seconds)

    assert worker.pace == 10.0 + NEWEST * (20.0 - 10.0)
    assert pool.speeds.job_seconds["m"] == 10.0 + NEWEST * (5.0 - 10.0)
    assert pool.speeds.jobs_done["m"] == 2


def test_model_without_workers_is_forgotten() -> None:
    pool, worker = ready()
    pool.speeds.measure(pool.jobs[J], worker, written(100), 1.0)

    pool.speeds.forget("m")
    pool.speeds.forget("never known")

    assert pool.speeds.job_seconds == pool.speeds.jobs_done == {}
