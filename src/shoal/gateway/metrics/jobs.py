"""Metrics of jobs, counted from facts: also of jobs without a request over HTTP."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shoal.domain import facts
from shoal.domain.gen_ai import OPERATION_NAMES
from shoal.domain.histogram import observe
from shoal.domain.ids import LeaseNumber, WorkerId
from shoal.domain.job import Job
from shoal.gateway.metrics.families import HistogramFamily, counters
from shoal.gateway.metrics.requests import SECONDS, ModelLabels, WorkerLabels
from shoal.pool.state import PoolState

MICROS = 1_000_000  # micro-dollars in a dollar

END_LABELS = {
    facts.JobCompleted: "completed",
    facts.JobFailed: "failed",
    facts.JobCancelled: "cancelled",
    facts.JobExpired: "expired",
}

REQUEUE_CAUSES = ("lost", "refused", "failed", "handed_over")
"""What ``_cause`` returns."""


class _CountedJob(msgspec.Struct):
    """An open job."""

    operation: str
    model: str
    price: int  # micro-dollars
    queued_at: float
    started: bool = False
    workers: dict[LeaseNumber, WorkerId] = msgspec.field(default_factory=dict)


class JobMetrics(Collector):
    """Counts what happens to jobs and workers."""

    def __init__(
        self,
        pool: PoolState,
        now: Callable[[], float],
        models: ModelLabels,
        workers: WorkerLabels,
    ) -> None:
        self._pool = pool
        self._now = now
        self._models = models
        self._workers = workers
        self._facts = dict.fromkeys(facts.FACT_NAMES, 0)
        self._calls = {True: 0, False: 0}
        self._requeues = dict.fromkeys(REQUEUE_CAUSES, 0)
        self._takeovers = 0
        self._ends: Counter[tuple[str, ...]] = Counter()
        self._tokens: Counter[tuple[str, ...]] = Counter()
        self._prices: Counter[tuple[str, ...]] = Counter()
        self._by_worker: Counter[str] = Counter()
        self._waits = HistogramFamily(
            "shoal_job_queue_seconds",
            "Time that jobs waited in the queue for a worker",
            ("gen_ai_operation_name",),
            SECONDS,
        )
        self._open = {
            job_id: self._counted(opened.job) for job_id, opened in pool.jobs.items()
        }

    def count_calls(self, kept: bool, count: int) -> None:
        """Count ended calls: the durable (``kept``) ones, or the others."""
        self._calls[kept] += count

    def on_facts(self, batch: Sequence[facts.Fact]) -> None:
        """Count facts."""
        for fact in batch:
            self._facts[type(fact)] += 1
            if not isinstance(fact, facts.JobFact):
                continue
            match fact:
                case facts.JobSubmitted(job):
                    self._open[job.id] = self._counted(job)
                case facts.JobLeased(job_id, worker_id, lease):
                    if (counted := self._open.get(job_id)) is not None:
                        waited = self._now() - counted.queued_at
                        observe((self._waits.of[(counted.operation,)], waited))
                        counted.workers[lease] = worker_id
                        self._takeovers += counted.started
                case facts.JobHedged(job_id, worker_id, lease):
                    if (counted := self._open.get(job_id)) is not None:
                        counted.workers[lease] = worker_id
                case facts.JobStarted(job_id):
                    if (counted := self._open.get(job_id)) is not None:
                        counted.started = True
                case facts.JobRequeued(job_id):
                    self._requeues[_cause(fact)] += 1
                    if (counted := self._open.get(job_id)) is not None:
                        counted.queued_at = self._now()
                case facts.JobCompleted(job_id):
                    if (counted := self._open.pop(job_id, None)) is not None:
                        self._ends[counted.operation, counted.model, "completed"] += 1
                        self._count_outcome(counted, fact)
                case (
                    facts.JobFailed(job_id)
                    | facts.JobCancelled(job_id)
                    | facts.JobExpired(job_id)
                ):
                    if (counted := self._open.pop(job_id, None)) is not None:
                        end = END_LABELS[type(fact)]
                        self._ends[counted.operation, counted.model, end] += 1
                case facts.JobUnhedged():
                    pass  # only counted

    def forget_worker(self, label: str) -> None:
        """Drop the counters of a worker that has lost its label."""
        self._by_worker.pop(label, None)

    def collect(self) -> Iterator[Metric]:
        yield counters(
            "shoal_facts",
            "Events of jobs and workers",
            ("fact",),
            {(facts.FACT_NAMES[type_],): count for type_, count in self._facts.items()},
        )
        yield counters(
            "shoal_calls",
            "Function calls that have ended",
            ("kept",),
            {(str(kept).lower(),): count for kept, count in self._calls.items()},
        )
        labels = ("gen_ai_operation_name", "gen_ai_request_model")
        yield counters(
            "shoal_jobs_ended", "Ended jobs, by outcome", (*labels, "end"), self._ends
        )
        yield from self._waits.collect()
        yield counters(
            "shoal_job_requeues",
            "Requeued jobs, by reason",
            ("cause",),
            {(cause,): count for cause, count in self._requeues.items()},
        )
        yield counters(
            "shoal_takeovers",
            "Answers that another worker continued after their output had begun",
            (),
            {(): self._takeovers},
        )
        yield counters(
            "shoal_tokens",
            "Tokens of completed jobs, read and written",
            ("gen_ai_request_model", "gen_ai_token_type"),
            self._tokens,
        )
        yield counters(
            "shoal_worker_output_tokens",
            "Tokens that workers wrote in completed jobs",
            ("worker",),
            {(worker,): count for worker, count in self._by_worker.items()},
        )
        yield counters(
            "shoal_prices_dollars",
            "Prices of completed jobs",
            ("gen_ai_request_model",),
            {model: price / MICROS for model, price in self._prices.items()},
        )

    def _counted(self, job: Job) -> _CountedJob:
        model = self._models.label(job.model, self._pool.roster.with_model)
        operation = OPERATION_NAMES[job.kind]
        return _CountedJob(operation, model, job.terms.price, self._now())

    def _count_outcome(self, counted: _CountedJob, fact: facts.JobCompleted) -> None:
        if counted.price:
            self._prices[counted.model,] += counted.price
        if (usage := fact.outcome.usage) is None:
            return
        self._tokens[counted.model, "input"] += usage.prompt_tokens
        self._tokens[counted.model, "output"] += usage.completion_tokens
        worker_id = counted.workers.get(fact.lease)
        if worker_id is not None:
            label = self._workers.label(worker_id, self._now())
            self._by_worker[label] += usage.completion_tokens


def _cause(fact: facts.JobRequeued) -> str:
    if fact.handed_over:
        return "handed_over"
    if fact.failed:
        return "failed"
    return "lost" if fact.refused_by is None else "refused"
