"""A collector of spans: OTLP over HTTP, decoded by OpenTelemetry's own messages."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.proto.trace.v1 import trace_pb2

from live.programs import eventually


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A span as it came; ids are hexadecimal."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    seconds: float
    attributes: dict[str, Any]
    events: Sequence[str]
    failed: bool


class Collector:
    """Collects spans on a port of this machine."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.bodies: list[bytes] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._serving = threading.Thread(
            target=self._server.serve_forever, args=(0.05,)
        )
        self._serving.start()

    def close(self) -> None:
        self._server.shutdown()
        self._serving.join()
        self._server.server_close()

    def wait_for(self, condition: Callable[[Sequence[CollectedSpan]], object]) -> None:
        """Wait until a condition holds of the spans."""
        eventually(lambda: condition(self.spans), "the spans arrive")

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                collector.bodies.append(body)
                collector.spans += _decode(body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def _decode(body: bytes) -> list[CollectedSpan]:
    return [
        CollectedSpan(
            _attributes(resource.resource.attributes)["service.name"],
            span.name,
            trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
            _attributes(span.attributes),
            [event.name for event in span.events],
            span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        )
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _attributes(found: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in found}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
