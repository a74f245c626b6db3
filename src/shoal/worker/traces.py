"""The spans of a worker: one for each job of a traced request."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from shoal.domain.gen_ai import SpanAttributes, request_attributes, response_attributes
from shoal.domain.trace_context import (
    TraceContext,
    attempt_traceparent,
    read_traceparent,
)
from shoal.domain.vocabulary import Completed, Failed, Rejected, RunJob
from shoal.transports.clock import Clock
from shoal.transports.spans import Span, SpanKind, SpanSink

CANCELLED = "cancelled"


@dataclass(slots=True)
class TracedRun:
    """A job that runs; ``end`` is its last event, once there is one.

    ``traceparent`` is what its engine continues; empty: the coordinator's is invalid.
    """

    traceparent: str
    slot_at: float | None = None
    end: Completed | Rejected | Failed | None = None


class JobTracer:
    """Makes spans of jobs, as children of the coordinator's attempts."""

    def __init__(self, spans: SpanSink, clock: Clock, worker: str) -> None:
        self._spans = spans
        self._clock = clock
        self._worker = worker

    @contextmanager
    def job(self, command: RunJob) -> Iterator[TracedRun]:
        """Measure a job, from its arrival to the end of the block."""
        parent = read_traceparent(command.trace)
        if parent is None:
            yield TracedRun("")
            return
        # Its attempt has one worker, so that what names the attempt names this as well.
        own = attempt_traceparent(command.trace, command.job_id, command.lease)
        context = read_traceparent(own)
        assert context is not None, "it was made just now"
        run, began = TracedRun(own), self._clock.wall()
        try:
            yield run
        finally:
            self._spans.export(self._span(command, context, parent, run, began))

    def on_slot(self, run: TracedRun) -> None:
        """Record that a job has got a slot of its engine."""
        run.slot_at = self._clock.wall()

    def _span(
        self,
        command: RunJob,
        context: TraceContext,
        parent: TraceContext,
        run: TracedRun,
        began: float,
    ) -> Span:
        attributes: SpanAttributes = request_attributes(command.work)
        attributes["shoal.worker.name"] = self._worker
        attributes["shoal.lease"] = command.lease
        span = Span(
            f"{attributes['gen_ai.operation.name']} {command.work.model}",
            SpanKind.SERVER,
            context,
            parent.span_id,
            began,
            self._clock.wall(),
            attributes,
            events=() if run.slot_at is None else (("slot", run.slot_at),),
        )
        match run.end:
            case Completed(finish_reason=reason, usage=usage):
                attributes |= response_attributes([reason], usage)
                return span
            case Failed(fault=fault):
                return replace(span, error=fault.value)
            case Rejected():
                return replace(span, error="rejected")
            case None:
                return replace(span, error=CANCELLED)
