"""Errors as HTTP answers: the only place that gives a fault its status."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec
from aiohttp import web

from shoal.domain.errors import (
    Cancelled,
    InvalidRequest,
    JobError,
    NotFound,
    NoWorker,
    QueueFull,
    ShoalError,
    ShuttingDown,
    StoreError,
    TimedOut,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnknownModel,
    WorkerLost,
)
from shoal.gateway.text import well_formed

CLIENT = "invalid_request_error"
SERVER = "server_error"

PATH_LOGGED = 200  # characters

log = logging.getLogger("shoal.http")

STORE_RETRY = 30  # seconds: a broken database wants a person first


@dataclass(frozen=True, slots=True)
class Problem:
    """What a client is told about a kind of error, in OpenAI's words.

    OpenAI's clients choose their exception by ``status`` and retry some by themselves.
    """

    status: int
    type: str
    code: str
    headers: Mapping[str, str] = field(default_factory=dict)
    reason: str | None = None  # for statuses that the standard does not name


PROBLEMS: Mapping[type[ShoalError], Problem] = {
    InvalidRequest: Problem(400, CLIENT, "invalid_request"),
    Unauthorized: Problem(
        401, CLIENT, "invalid_api_key", {"WWW-Authenticate": "Bearer"}
    ),
    NotFound: Problem(404, CLIENT, "not_found"),
    UnknownModel: Problem(404, CLIENT, "model_not_found"),
    TooLarge: Problem(413, CLIENT, "request_too_large"),
    QueueFull: Problem(429, "rate_limit_error", "queue_full"),
    # nginx's number: nobody else's fault than whoever cancelled, and not retried.
    Cancelled: Problem(499, CLIENT, "cancelled", {}, "Cancelled"),
    # Running it again would fail again, so clients are told not to.
    JobError: Problem(502, SERVER, "job_failed", {"x-should-retry": "false"}),
    WorkerLost: Problem(502, SERVER, "worker_lost"),
    NoWorker: Problem(503, SERVER, "no_worker"),
    ShuttingDown: Problem(503, SERVER, "shutting_down"),
    StoreError: Problem(503, SERVER, "store_failed", {"Retry-After": str(STORE_RETRY)}),
    TimedOut: Problem(504, SERVER, "timed_out"),
    ShoalError: Problem(500, SERVER, "internal_error"),
}


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class _Body(msgspec.Struct, frozen=True):
    error: _Error


def problem(error: ShoalError) -> Problem:
    """Return the row of the nearest class."""
    return next(PROBLEMS[each] for each in type(error).__mro__ if each in PROBLEMS)


def body(error: ShoalError) -> bytes:
    """Write an error as OpenAI does: one JSON object, also used inside a stream."""
    row = problem(error)
    param = error.field if isinstance(error, InvalidRequest) else None
    return _encoded(str(error), row.type, row.code, param)


def response(error: ShoalError) -> web.Response:
    """Return the answer to a request that failed before anything was sent."""
    row = problem(error)
    headers = dict(row.headers)
    if isinstance(error, Unavailable):
        headers["Retry-After"] = str(error.retry_after)
    return web.Response(
        status=row.status,
        reason=row.reason,
        body=body(error),
        content_type="application/json",
        headers=headers,
    )


def log_refusal(request: web.Request, error: Exception) -> None:
    """Log that a request got an error, without its message: that quotes the client."""
    log.info(
        "refused error=%s method=%s path=%r peer=%s",
        type(error).__name__,
        request.method,
        request.path[:PATH_LOGGED],
        request.remote,
    )


def http_response(request: web.Request, error: web.HTTPException) -> web.Response:
    """Return the answer to a request that aiohttp itself turned down."""
    standard = HTTPStatus(error.status)
    message = f"{request.method} {request.path}: {standard.phrase.lower()}"
    if isinstance(error, web.HTTPMethodNotAllowed):
        message += f", use {' or '.join(sorted(error.allowed_methods))}"
    elif error.text and not error.text.startswith(str(error.status)):
        message = error.text.strip()
    code = standard.name.lower()
    headers = {
        name: error.headers[name] for name in ("Allow",) if name in error.headers
    }
    return web.Response(
        status=error.status,
        body=_encoded(message, CLIENT if error.status < 500 else SERVER, code, None),
        content_type="application/json",
        headers=headers,
    )


def _encoded(message: str, type_: str, code: str, param: str | None) -> bytes:
    # Messages quote what clients sent, which need not be good text.
    message = well_formed(message)
    param = None if param is None else well_formed(param)
    return msgspec.json.encode(_Body(_Error(message, type_, param, code)))
