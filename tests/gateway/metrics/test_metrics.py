"""What metrics of jobs count, and how many labels they have."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from shoal.domain.facts import (
    Fact,
    JobCompleted,
    JobFailed,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
)
from shoal.domain.histogram import Histogram, observe
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, JobTerms
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.work import Chat, JobKind
from shoal.gateway.metrics.jobs import JobMetrics
from shoal.gateway.metrics.monitoring import LoopLag
from shoal.gateway.metrics.requests import (
    OTHER,
    PER_TOKEN,
    SECONDS,
    TOKENS,
    WORKER_MEMORY,
    WORKERS_MAX,
    AnsweredRequest,
    ModelLabels,
    RequestMetrics,
    WorkerLabels,
)
from shoal.pool.state import PoolState

JOB, ONE, TWO = JobId("job1"), WorkerId("wire:one"), WorkerId("wire:two")
FIRST, SECOND, THIRD = map(LeaseNumber, (1, 2, 3))


def submitted(job_id: JobId = JOB) -> JobSubmitted:
    terms = JobTerms(price=2_500_000)
    return JobSubmitted(Job(job_id, Chat("unknown", ()), terms=terms))


def counted(*facts: tuple[float, Fact]) -> dict[str, float]:
    """Return the samples after facts, each at its time, that are not 0."""
    now = 0.0
    metrics = JobMetrics(PoolState(), lambda: now, ModelLabels(), WorkerLabels())
    for now, fact in facts:  # noqa: B007  # the clock reads it
        metrics.on_facts([fact])
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for metric in metrics.collect()
        for sample in metric.samples
        if sample.value and "_bucket" not in sample.name and "facts" not in sample.name
    }


def test_takeover_is_counted_with_its_waits_and_the_worker_that_ended_it() -> None:
    outcome = Outcome("text", usage=Usage(7, 11))

    samples = counted(
        (0.0, submitted()),
        (1.0, JobLeased(JOB, ONE, FIRST, "free")),
        (2.0, JobStarted(JOB, FIRST)),
        (5.0, JobRequeued(JOB, FIRST, "worker lost")),
        (7.0, JobLeased(JOB, TWO, SECOND, "free")),
        (9.0, JobCompleted(JOB, SECOND, outcome)),
    )

    assert samples == {
        "shoal_job_queue_seconds_count chat": 2,
        "shoal_job_queue_seconds_sum chat": 3.0,
        "shoal_job_requeues_total lost": 1,
        "shoal_takeovers_total": 1,
        "shoal_jobs_ended_total chat other completed": 1,
        "shoal_tokens_total other input": 7,
        "shoal_tokens_total other output": 11,
        "shoal_worker_output_tokens_total wire:two": 11,
        "shoal_prices_dollars_total other": 2.5,
    }


def test_requeue_before_output_is_no_takeover() -> None:
    samples = counted(
        (0.0, submitted()),
        (0.0, JobLeased(JOB, ONE, FIRST, "free")),
        (0.0, JobRequeued(JOB, FIRST, "busy", refused_by=ONE)),
        (0.0, JobLeased(JOB, TWO, SECOND, "free")),
        (0.0, JobRequeued(JOB, SECOND, "drained", handed_over=True)),
        (0.0, JobLeased(JOB, ONE, THIRD, "free")),
        (0.0, JobRequeued(JOB, THIRD, "no room", ONE, failed=True)),
        (1.0, JobFailed(JOB, "no worker")),
        (2.0, JobFailed(JobId("of an earlier start"), "no worker")),
    )

    assert samples == {
        "shoal_job_queue_seconds_count chat": 3,
        "shoal_job_requeues_total refused": 1,
        "shoal_job_requeues_total handed_over": 1,
        "shoal_job_requeues_total failed": 1,
        "shoal_jobs_ended_total chat other failed": 1,
    }


def test_what_fronts_have_counted_adds_up() -> None:
    usage = Usage(7, 11)
    path, kind, model = "/v1/chat/completions", JobKind.CHAT, "m"
    requests = [
        AnsweredRequest("GET", "/healthz", 200, 0.1),
        AnsweredRequest("POST", path, 200, 2.0, kind, model, "", 0.5, usage),
        AnsweredRequest("POST", path, 200, 99.0, kind, model, "", 0.3, usage),
        AnsweredRequest("POST", path, 502, 3.0, kind, "unknown", "WorkerLost"),
    ]

    def metrics() -> RequestMetrics:
        return RequestMetrics(lambda name: name if name == model else OTHER)

    alone, hub, fronts = metrics(), metrics(), [metrics(), metrics()]
    for number, each in enumerate(requests):
        alone.add(each)
        fronts[number % 2].add(each)
        hub.add_counted(fronts[number % 2].take())
        alone.add(each)
        fronts[0].add(each)
    for front in fronts:
        hub.add_counted(front.take())
        assert not front.take().values

    def samples(of: RequestMetrics) -> dict[str, float]:
        return {
            f"{sample.name}{sorted(sample.labels.items())}": sample.value
            for metric in of.collect()
            for sample in metric.samples
        }

    assert samples(hub) == samples(alone)


def test_only_so_many_workers_have_a_label() -> None:
    labels = WorkerLabels()
    names = [WorkerId(f"wire:{number}") for number in range(1000)]

    found = [labels.label(name, now=0.0) for name in names]

    assert found == [*names[:WORKERS_MAX], *[OTHER] * (1000 - WORKERS_MAX)]


def test_worker_that_left_makes_room_after_an_hour() -> None:
    labels = WorkerLabels()
    names = [WorkerId(f"wire:{number}") for number in range(WORKERS_MAX + 1)]
    for name in names:
        labels.label(name, now=0.0)
    staying = names[1:]

    assert labels.update(staying, now=WORKER_MEMORY) == []
    assert labels.update(staying, now=WORKER_MEMORY + 1) == [names[0]]
    assert labels.label(names[-1], now=WORKER_MEMORY + 1) == names[-1]


def test_name_with_a_lone_surrogate_does_not_hide_the_metrics() -> None:
    WorkerLabels().label(WorkerId("wire:\ud800"), 0.0).encode()
    ModelLabels().label("\ud800", ["\ud800"]).encode()


@pytest.mark.parametrize("bounds", [SECONDS, TOKENS, PER_TOKEN])
def test_buckets_are_few_and_narrow_enough_for_quantiles(
    bounds: Sequence[float],
) -> None:
    assert len(bounds) <= 9  # each is a line for each model
    assert max(upper / lower for lower, upper in pairwise(bounds)) <= 4.0


def test_histogram_counts_each_value_once() -> None:
    histogram = Histogram((1.0, 2.0))

    observe(*[(histogram, value) for value in (0.5, 1.0, 1.5, 3.0)])

    assert (histogram.counts, histogram.total) == ([2, 1, 1], 6.0)


class LateClock:
    """Calls what is due when it is told the time."""

    def __init__(self) -> None:
        self.time = 0.0
        self.call: Callable[[], None] = lambda: None
        self.cancelled = False

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    def call_at(self, when: float, call: Callable[[], None]) -> "LateClock":
        self.call = call
        return self

    def cancel(self) -> None:
        self.cancelled = True


def test_loop_lag_is_what_a_timer_is_late() -> None:
    clock = LateClock()
    lag = LoopLag(clock)
    lag.start()

    clock.time = 1.25
    clock.call()
    lag.stop()

    (metric,) = lag.collect()
    sums = [s.value for s in metric.samples if s.name.endswith("_sum")]
    assert sums == [pytest.approx(0.25)]
    assert clock.cancelled
