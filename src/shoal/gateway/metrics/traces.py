"""Spans of requests, and of the queue and the attempts of their jobs.

All are made when what they describe has ended: of a request's record, and of facts.
Decision 44 says why.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from aiohttp import web

from shoal.domain import facts
from shoal.domain.gen_ai import SpanAttributes, request_attributes, response_attributes
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job
from shoal.domain.outcome import Outcome
from shoal.domain.trace_context import (
    TraceContext,
    attempt_traceparent,
    read_traceparent,
)
from shoal.gateway.http.ids import new_span_id, new_trace_id
from shoal.gateway.http.request_record import PATH_MAX, RequestRecord
from shoal.pool.state import PoolState
from shoal.transports.clock import Clock
from shoal.transports.spans import Span, SpanKind, SpanSink

SERVER_ERRORS = range(500, 600)


class RequestTracer:
    """Makes the span of each request that a key authorizes."""

    def __init__(self, spans: SpanSink, clock: Clock) -> None:
        self._spans = spans
        self._clock = clock

    def begin(self, record: RequestRecord) -> None:
        """Give a request its place in the trace of its client, or in a new one."""
        parent = read_traceparent(record.traceparent)
        trace_id = new_trace_id() if parent is None else parent.trace_id
        sampled = self._spans.samples(trace_id, parent)
        record.span = TraceContext(trace_id, new_span_id(), sampled)
        record.client_span = "" if parent is None else parent.span_id
        record.traceparent = str(record.span)

    def end(
        self, request: web.Request, record: RequestRecord, status: int, seconds: float
    ) -> None:
        """Make the span of a request that has ended."""
        if record.span is None or not record.span.sampled:
            return
        resource = request.match_info.route.resource
        attributes: SpanAttributes = {
            "http.request.method": request.method,
            "http.response.status_code": status,
            "url.path": request.path[:PATH_MAX],
            "url.scheme": request.scheme,
            "client.address": request.remote or "",
            "shoal.request.id": record.id,
            "shoal.key": record.owner,
        }
        name = request.method
        if resource is not None:
            attributes["http.route"] = resource.canonical
            name = f"{name} {resource.canonical}"
        if record.job_id is not None:
            attributes["shoal.job.id"] = record.job_id
        error = record.error or (str(status) if status in SERVER_ERRORS else "")
        ended = self._clock.wall()
        self._spans.export(
            Span(
                name,
                SpanKind.SERVER,
                record.span,
                record.client_span,
                ended - seconds,
                ended,
                attributes,
                error,
            )
        )


@dataclass(slots=True)
class _Attempt:
    """A lease that has not ended; times are in Unix seconds."""

    context: TraceContext
    worker_id: WorkerId
    began: float
    first_output: float | None = None


@dataclass(slots=True)
class _TracedJob:
    """An open job; ``parent`` is the span of its request."""

    id: JobId
    parent: TraceContext
    about: SpanAttributes
    queued_at: float | None
    attempts: dict[LeaseNumber, _Attempt] = field(default_factory=dict)


class JobTraces:
    """Makes the spans of traced jobs from facts."""

    def __init__(self, spans: SpanSink, clock: Clock, pool: PoolState) -> None:
        self._spans = spans
        self._clock = clock
        self._jobs: dict[JobId, _TracedJob] = {}
        for opened in pool.jobs.values():
            self._add(opened.job)

    def on_facts(self, batch: Sequence[facts.Fact]) -> None:
        """Make the spans of what has ended by facts."""
        now = self._clock.wall()
        for fact in batch:
            self._on_fact(fact, now)

    def _on_fact(self, fact: facts.Fact, now: float) -> None:
        if isinstance(fact, facts.JobSubmitted):
            self._add(fact.job)
            return
        if not isinstance(fact, facts.JobFact):
            return
        if (job := self._jobs.get(fact.job_id)) is None:
            return
        match fact:
            case facts.JobLeased(_, worker_id, lease):
                self._end_wait(job, now)
                self._begin_attempt(job, lease, worker_id, now)
            case facts.JobHedged(_, worker_id, lease):
                self._begin_attempt(job, lease, worker_id, now)
            case facts.JobUnhedged(_, lease):
                self._end_attempt(job, lease, now, "lost" if fact.lost else "unhedged")
            case facts.JobStarted(_, lease):
                if (attempt := job.attempts.get(lease)) is not None:
                    attempt.first_output = now
            case facts.JobRequeued():
                if fact.handed_over:
                    cause = "handed_over"
                else:
                    cause = "lost" if fact.refused_by is None else "rejected"
                self._end_attempts(job, now, cause)
                job.queued_at = now
            case facts.JobCompleted(_, lease, outcome):
                if fact.first_output and lease in job.attempts:
                    job.attempts[lease].first_output = fact.first_output
                self._end_attempt(job, lease, now, outcome=outcome)
                self._end(job, now, "cancelled")
            case facts.JobFailed():
                self._end(job, now, "lost" if fact.lost else fact.fault.value)
            case facts.JobCancelled():
                self._end(job, now, "cancelled")
            case facts.JobExpired():
                self._end(job, now, "timeout")

    def _add(self, job: Job) -> None:
        if not job.terms.trace:
            return
        parent = read_traceparent(job.terms.trace)
        if parent is None or not parent.sampled:
            return
        about = request_attributes(job.work) | {"shoal.job.id": job.id}
        self._jobs[job.id] = _TracedJob(job.id, parent, about, self._clock.wall())

    def _end(self, job: _TracedJob, now: float, error: str) -> None:
        """End what is left of a job."""
        del self._jobs[job.id]
        self._end_attempts(job, now, error)
        self._end_wait(job, now, error)

    def _end_wait(self, job: _TracedJob, now: float, error: str = "") -> None:
        if job.queued_at is None:
            return
        context = TraceContext(job.parent.trace_id, new_span_id(), sampled=True)
        self._spans.export(
            Span(
                "queue",
                SpanKind.INTERNAL,
                context,
                job.parent.span_id,
                job.queued_at,
                now,
                job.about,
                error,
            )
        )
        job.queued_at = None

    def _begin_attempt(
        self, job: _TracedJob, lease: LeaseNumber, worker_id: WorkerId, now: float
    ) -> None:
        own = read_traceparent(attempt_traceparent(str(job.parent), job.id, lease))
        assert own is not None, "it was made just now"
        job.attempts[lease] = _Attempt(own, worker_id, now)

    def _end_attempts(self, job: _TracedJob, now: float, error: str) -> None:
        for lease in list(job.attempts):
            self._end_attempt(job, lease, now, error)

    def _end_attempt(
        self,
        job: _TracedJob,
        lease: LeaseNumber,
        now: float,
        error: str = "",
        outcome: Outcome | None = None,
    ) -> None:
        attempt = job.attempts.pop(lease, None)
        if attempt is None:
            return
        attributes = job.about | {
            "gen_ai.response.id": job.id,
            "shoal.lease": lease,
            "shoal.worker.id": attempt.worker_id,
        }
        if outcome is not None:
            attributes |= response_attributes(_finish_reasons(outcome), outcome.usage)
        events: Sequence[tuple[str, float]] = ()
        if attempt.first_output is not None:
            events = (("first output", attempt.first_output),)
            attributes["gen_ai.response.time_to_first_chunk"] = max(
                0.0, attempt.first_output - attempt.began
            )
        self._spans.export(
            Span(
                f"{job.about['gen_ai.operation.name']} "
                f"{job.about['gen_ai.request.model']}",
                SpanKind.CLIENT,
                attempt.context,
                job.parent.span_id,
                attempt.began,
                now,
                attributes,
                error,
                events,
            )
        )


def _finish_reasons(outcome: Outcome) -> Sequence[str]:
    """Return why each choice ended."""
    if outcome.choices:
        return [choice.finish_reason for choice in outcome.choices]
    return [outcome.finish_reason]
