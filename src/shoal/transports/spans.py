"""Spans, and their export to a collector over OTLP/HTTP.

The packages of OpenTelemetry are an extra: nothing imports them until traces are on.
They send from a thread of their own, and drop spans that a collector does not take.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeAlias

from shoal.config.installation import install_extra
from shoal.domain.errors import ConfigError
from shoal.domain.trace_context import TraceContext

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP = "http/protobuf"
FLUSH_TIMEOUT = 5.0  # seconds at the end for the spans that are left

AttributeValue: TypeAlias = str | int | float | bool | Sequence[str]

log = logging.getLogger("shoal.transports")


class SpanKind(Enum):
    """A span's part in a remote call."""

    SERVER = "SERVER"
    CLIENT = "CLIENT"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that has ended, with its place in a trace.

    ``parent_id`` is a span id; empty: the span begins its trace.  Times are in Unix
    seconds.  ``error`` is why it failed, in one word; ``events`` are names with times.
    """

    name: str
    kind: SpanKind
    context: TraceContext
    parent_id: str
    began: float
    ended: float
    attributes: Mapping[str, AttributeValue]
    error: str = ""
    events: Sequence[tuple[str, float]] = field(default=())


class SpanSink(Protocol):
    """Where spans go."""

    def samples(self, trace_id: str, parent: TraceContext | None) -> bool:
        """Say whether a trace is recorded that begins here, or continues ``parent``."""

    def export(self, span: Span) -> None:
        """Send a span some time later; one that is not sampled is dropped."""


def wants_spans(endpoint: str, environment: Mapping[str, str]) -> bool:
    """Say whether a setting, or a standard variable, names a collector."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if endpoint:
        return True
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return any(environment.get(each) for each in ENDPOINTS)


@asynccontextmanager
async def open_spans(
    endpoint: str, environment: Mapping[str, str], service: str, instance: str
) -> AsyncIterator[SpanSink | None]:
    """Export spans for the length of the block; gives None if no collector is named.

    ``endpoint`` is the base URL of a collector; empty: the standard variables of
    OpenTelemetry in ``environment`` name it.  They also set the rest, such as headers,
    and the names of the ``service`` and its ``instance`` in place of these.

    Raises ConfigError if the packages are not installed.
    """
    if not wants_spans(endpoint, environment):
        yield None
        return
    protocol = next((p for p in map(environment.get, PROTOCOLS) if p), HTTP)
    if protocol != HTTP:
        log.warning("no traces: OTLP over %s is not supported, only %s", protocol, HTTP)
        yield None
        return
    try:
        from shoal.transports.otlp_spans import OtlpSpans
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"traces need the package {error.name}, which is not installed: "
            f"{install_extra('otel')}"
        ) from error
    spans = await asyncio.to_thread(OtlpSpans, endpoint, service, instance)
    log.info("traces are exported over OTLP/HTTP")
    try:
        yield spans
    finally:
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT):
                await asyncio.to_thread(spans.close)
        except TimeoutError:
            spans.abort()
            log.warning("the last spans were not exported: the collector is too slow")
