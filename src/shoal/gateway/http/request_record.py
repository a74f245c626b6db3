"""The record of a request, and its log line.

A log line has no prompts, answers or keys: only the names of keys.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from shoal.coordinator.answer_reader import AnswerCursor
from shoal.domain.credentials import Key
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.outcome import Usage
from shoal.domain.trace_context import TraceContext, read_traceparent
from shoal.domain.work import JobKind
from shoal.gateway.http.ids import new_id
from shoal.transports.strangers import BY_STRANGER

if TYPE_CHECKING:
    from shoal.gateway.http.access import ApiCaller

REQUEST_ID = "x-request-id"
TRACEPARENT = "traceparent"
LEFT_OUT = "x-shoal-left-out"
MODEL = "x-shoal-model"

_SANE = re.compile(r"[!-~]{1,128}", re.ASCII)


class RequestRecord(msgspec.Struct):
    """One request.  Times are monotonic seconds."""

    id: str
    started_at: float
    owner: str = ""
    model: str = ""
    kind: JobKind | None = None
    job_id: JobId | None = None
    reader: AnswerCursor | None = None
    first_output: float | None = None
    usage: Usage | None = None
    left_out: tuple[str, ...] = ()  # as in ``JobTerms``
    alias: str = ""  # the same
    held_bytes: int = 0  # bytes of its body
    held_for: str = ""  # the key that they count for
    error: str = ""  # the code of its error, or empty
    upgraded: bool = False  # whether it became a WebSocket
    relayed: bool = False  # whether another process answers it, which records it
    traceparent: str = ""  # what its job continues; empty: it is not traced
    span: TraceContext | None = None  # its own, if this coordinator makes spans
    client_span: str = ""  # the parent of that
    key: Key | None = None  # a valid one that it carries
    caller: "ApiCaller | None" = None  # None: it has shown no key

    def set_job(self, job: Job) -> None:
        """Record the job of the request."""
        self.owner, self.model, self.kind = job.owner, job.model, job.kind
        self.left_out, self.alias = job.terms.left_out, job.terms.alias

    def set_reader(self, reader: AnswerCursor) -> None:
        """Record the answer; with an idempotency key its job may be an earlier one."""
        self.reader = reader
        self.job_id = reader.job_id

    @property
    def headers(self) -> dict[str, str]:
        """The headers that describe the request in its response."""
        headers = {REQUEST_ID: self.id}
        reader = self.reader
        if self.job_id is not None and not (reader and reader.answer.refused):
            headers["x-shoal-job"] = self.job_id
        if self.alias:
            headers[MODEL] = ascii(self.model)[1:-1]  # workers choose it
        if self.left_out:  # which may name a model, as workers do
            headers[LEFT_OUT] = left_out_header(self.left_out)
        if reader is not None:
            headers.update(worker_headers(reader))
        return headers


def left_out_header(left_out: Sequence[str]) -> str:
    """Return what ``LEFT_OUT`` says."""
    return ascii("; ".join(left_out))[1:-1]


def worker_headers(reader: AnswerCursor) -> list[tuple[str, str]]:
    """Return the headers that name the worker of an answer; none if it has none."""
    if reader.answer.worker_id is None:
        return []
    return [
        # Workers choose their names; a header allows only some characters.
        ("x-shoal-worker", ascii(reader.answer.worker_id)[1:-1]),
        ("x-shoal-attempts", str(reader.answer.lease)),
    ]


RECORD = web.RequestKey("record", RequestRecord)


record_of: Callable[[web.Request], RequestRecord] = itemgetter(RECORD)
"""Returns the record of a request."""


def begin_record(
    request: web.Request, now: float, key: Key | None = None
) -> RequestRecord:
    """Begin a request's record, with the client's request id and trace if valid."""
    given = request.headers.get(REQUEST_ID, "")
    sane = _SANE.fullmatch(given) is not None
    record = RequestRecord(given if sane else new_id(), now, key=key)
    traceparent = request.headers.get(TRACEPARENT)
    if traceparent is not None and read_traceparent(traceparent) is not None:
        record.traceparent = traceparent
    request[RECORD] = record
    return record


PATH_MAX = 200  # characters
QUIET = frozenset({"/health", "/healthz", "/readyz", "/metrics"})  # polled

log = logging.getLogger("shoal.gateway")


def log_request(
    request: web.Request,
    record: RequestRecord,
    status: int,
    seconds: float,
    *,
    by_stranger: bool = False,
) -> None:
    """Log a request that has ended; ``by_stranger``: the client was not authorized."""
    level = logging.DEBUG if request.path in QUIET else logging.INFO
    if log.isEnabledFor(level):
        fields = _fields(request, record, status, seconds)
        # Names come from clients and workers: quoted, they cannot forge a log line.
        pairs = " ".join([f"{name}={value!a}" for name, value in fields.items()])
        # Not ``log.log``, which looks for the line of code that has called it.
        line = logging.LogRecord(log.name, level, __file__, 0, pairs, None, None)
        vars(line)["fields"] = fields
        if by_stranger:
            vars(line).update(BY_STRANGER)
        log.handle(line)


def _fields(
    request: web.Request, record: RequestRecord, status: int, seconds: float
) -> Mapping[str, object]:
    fields: dict[str, object] = {
        "request": record.id,
        "method": request.method,
        "path": request.path[:PATH_MAX],
        "status": status,
        "ms": round(1000 * seconds, 1),
        "peer": request.remote,
    }
    if record.first_output is not None:
        fields["first_output_ms"] = round(
            1000 * (record.first_output - record.started_at), 1
        )
    if record.usage is not None:
        fields["tokens_in"] = record.usage.prompt_tokens
        fields["tokens_out"] = record.usage.completion_tokens
    worker = record.reader.answer.worker_id if record.reader is not None else None
    more = {
        "key": record.owner,
        "job": record.job_id,
        "model": record.model,
        "worker": worker,
        "error": record.error,
        "trace": record.span.trace_id if record.span is not None else "",
    }
    return fields | {name: value for name, value in more.items() if value}
