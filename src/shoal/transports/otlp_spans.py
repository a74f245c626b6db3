"""Exports spans by OpenTelemetry's SDK, over OTLP/HTTP.

The SDK measures what a program does while it does it.  Shoal's spans are made when what
they describe has ended, so their times and ids are given.
"""

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace import SpanKind as OtelSpanKind

from shoal import __version__
from shoal.domain.trace_context import TraceContext
from shoal.transports.spans import Span

TRACES_PATH = "/v1/traces"  # OTLP/HTTP
EXPORT_TIMEOUT = 10.0  # seconds in which a collector must answer
NANOSECONDS = 1_000_000_000


class OtlpSpans:
    """Sends spans in batches, from a thread; beyond 2,048 that wait, they are dropped.

    ``endpoint``, ``service`` and ``instance`` are as in ``open_spans``.
    """

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        self._ids = _GivenIds()
        self._exporter = OTLPSpanExporter(
            f"{endpoint.rstrip('/')}{TRACES_PATH}" if endpoint else None,
            timeout=EXPORT_TIMEOUT,
        )
        self._provider = TracerProvider(
            resource=_resource(service, instance),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("shoal", __version__)

    def samples(self, trace_id: str, parent: TraceContext | None) -> bool:
        sampler, context = self._provider.sampler, _context(parent)
        result = sampler.should_sample(context, int(trace_id, 16), "request")
        return result.decision is not Decision.DROP

    def export(self, span: Span) -> None:
        own, parent = span.context, None
        if not own.sampled:
            return
        if span.parent_id:
            parent = TraceContext(own.trace_id, span.parent_id, sampled=True)
        self._ids.give(own)
        opened = self._tracer.start_span(
            span.name,
            _context(parent),
            OtelSpanKind[span.kind.value],
            dict(span.attributes),
            start_time=_nanoseconds(span.began),
        )
        for name, at in span.events:
            opened.add_event(name, timestamp=_nanoseconds(at))
        if span.error:
            opened.set_attribute("error.type", span.error)
            opened.set_status(StatusCode.ERROR)
        opened.end(_nanoseconds(span.ended))

    def close(self) -> None:
        """Send what is left; waits for the collector."""
        self._provider.shutdown()

    def abort(self) -> None:
        """Send no more: ``close`` returns."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # the SDK's gap


class _GivenIds(IdGenerator):
    """Gives a span the ids that it has."""

    def __init__(self) -> None:
        self._trace_id = self._span_id = 0

    def give(self, context: TraceContext) -> None:
        """Set the ids of the next span."""
        self._trace_id = int(context.trace_id, 16)
        self._span_id = int(context.span_id, 16)

    def generate_span_id(self) -> int:
        return self._span_id

    def generate_trace_id(self) -> int:
        return self._trace_id


def _resource(service: str, instance: str) -> Resource:
    """Return the names of this program; the standard variables have precedence."""
    own = {
        SERVICE_NAME: service,
        SERVICE_INSTANCE_ID: instance,
        SERVICE_VERSION: __version__,
    }
    return Resource.create(own).merge(OTELResourceDetector().detect())


def _context(parent: TraceContext | None) -> Context:
    """Return a context with a parent; never that of the thread."""
    if parent is None:
        return Context()
    span = SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(parent.sampled)),
    )
    return set_span_in_context(NonRecordingSpan(span), Context())


def _nanoseconds(at: float) -> int:
    return int(at * NANOSECONDS)
