"""Errors as HTTP answers: the only place that gives a fault its status."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeAlias

import msgspec
from aiohttp import web

from shoal.domain.errors import (
    AlreadyEnded,
    BudgetSpent,
    Cancelled,
    CannotDo,
    ContextExceeded,
    DaySpent,
    Forbidden,
    InsufficientFunds,
    InvalidRequest,
    JobError,
    KeyExpired,
    KeyReused,
    KeyRevoked,
    NoFirstOutput,
    NotFound,
    NoWorker,
    OutputStalled,
    PaymentDue,
    PaymentsDown,
    QueueFull,
    RateLimited,
    ShoalError,
    ShuttingDown,
    StillRunning,
    StoreError,
    TimedOut,
    TookTooLong,
    TooLarge,
    TooManyFailures,
    TooSlow,
    Unauthorized,
    Unavailable,
    UnknownModel,
    UnknownTask,
    WorkerLost,
)
from shoal.gateway.text import well_formed

CLIENT = "invalid_request_error"
SERVER = "server_error"
LIMIT = "rate_limit_error"
QUOTA = "insufficient_quota"
BEARER = {"WWW-Authenticate": "Bearer"}
NOT_AGAIN = {"x-should-retry": "false"}  # OpenAI's clients else try again by themselves

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
    AlreadyEnded: Problem(409, CLIENT, "already_ended"),
    Unauthorized: Problem(401, CLIENT, "invalid_api_key", BEARER),
    KeyExpired: Problem(401, CLIENT, "expired_api_key", BEARER),
    KeyRevoked: Problem(401, CLIENT, "revoked_api_key", BEARER),
    PaymentDue: Problem(402, CLIENT, "payment_required"),
    Forbidden: Problem(403, CLIENT, "insufficient_permissions"),
    NotFound: Problem(404, CLIENT, "not_found"),
    UnknownModel: Problem(404, CLIENT, "model_not_found"),
    UnknownTask: Problem(404, CLIENT, "task_not_found"),
    CannotDo: Problem(400, CLIENT, "unsupported_value"),
    ContextExceeded: Problem(400, CLIENT, "context_length_exceeded"),
    KeyReused: Problem(422, CLIENT, "idempotency_key_reused"),
    TooSlow: Problem(408, CLIENT, "request_timeout"),
    TooLarge: Problem(413, CLIENT, "request_too_large"),
    QueueFull: Problem(429, LIMIT, "queue_full"),
    RateLimited: Problem(429, LIMIT, "rate_limit_exceeded"),
    TooManyFailures: Problem(429, LIMIT, "too_many_failures"),
    DaySpent: Problem(429, QUOTA, QUOTA, NOT_AGAIN),
    BudgetSpent: Problem(429, QUOTA, QUOTA, NOT_AGAIN),
    InsufficientFunds: Problem(429, QUOTA, QUOTA, NOT_AGAIN),
    # nginx's number: nobody else's fault than whoever cancelled, and not retried.
    Cancelled: Problem(499, CLIENT, "cancelled", {}, "Cancelled"),
    # Running it again would fail again, so clients are told not to.
    JobError: Problem(502, SERVER, "job_failed", NOT_AGAIN),
    WorkerLost: Problem(502, SERVER, "worker_lost"),
    NoWorker: Problem(503, SERVER, "no_worker"),
    PaymentsDown: Problem(503, SERVER, "payments_unavailable"),
    ShuttingDown: Problem(503, SERVER, "shutting_down"),
    StoreError: Problem(503, SERVER, "store_failed", {"Retry-After": str(STORE_RETRY)}),
    StillRunning: Problem(503, SERVER, "still_running"),
    TimedOut: Problem(504, SERVER, "timed_out"),
    NoFirstOutput: Problem(504, SERVER, "first_output_timed_out"),
    OutputStalled: Problem(504, SERVER, "output_stalled"),
    TookTooLong: Problem(504, SERVER, "total_timed_out"),
    ShoalError: Problem(500, SERVER, "internal_error"),
}


class Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    error: Error


class PlainError(msgspec.Struct, frozen=True):
    """An error as clients of the job interface know it."""

    error: str


Form: TypeAlias = Callable[[Error], bytes]
"""How an error is written."""

_encode = msgspec.json.encode

PLAIN_PATHS = ("/v1/health", "/v1/quote", "/v1/jobs", "/v1/trust")
"""Where errors are plain, with all that is below; elsewhere they are OpenAI's."""


def as_openai(error: Error) -> bytes:
    """Write an error as OpenAI does."""
    return _encode(ErrorBody(error))


def as_plain(error: Error) -> bytes:
    """Write an error as no more than its message."""
    return _encode(PlainError(error.message))


def form_at(path: str) -> Form:
    """Return how errors are written at a path."""
    plain = any(path == each or path.startswith(f"{each}/") for each in PLAIN_PATHS)
    return as_plain if plain else as_openai


def problem(error: ShoalError) -> Problem:
    """Return the row of the nearest class."""
    return next(PROBLEMS[each] for each in type(error).__mro__ if each in PROBLEMS)


def body(error: ShoalError, form: Form = as_openai) -> bytes:
    """Write an error as one JSON object, also used inside a stream."""
    row = problem(error)
    param = error.field if isinstance(error, InvalidRequest) else None
    return form(_error(str(error), row.type, row.code, param))


def response(error: ShoalError, form: Form = as_openai) -> web.Response:
    """Return the answer to a request that failed before anything was sent."""
    row = problem(error)
    headers = dict(row.headers)
    if isinstance(error, Unavailable):
        headers["Retry-After"] = str(error.retry_after)
    return web.Response(
        status=row.status,
        reason=row.reason,
        body=body(error, form),
        content_type="application/json",
        headers=headers,
    )


def http_response(request: web.Request, error: web.HTTPException) -> web.Response:
    """Return the answer to a request that aiohttp itself turned down."""
    standard = HTTPStatus(error.status)
    message = f"{request.method} {request.path}: {standard.phrase.lower()}"
    if isinstance(error, web.HTTPMethodNotAllowed):
        message += f", use {' or '.join(sorted(error.allowed_methods))}"
    elif error.text and not error.text.startswith(str(error.status)):
        message = error.text.strip()
    code = http_code(error)
    kind = CLIENT if error.status < 500 else SERVER
    headers = {
        name: error.headers[name] for name in ("Allow",) if name in error.headers
    }
    return web.Response(
        status=error.status,
        body=form_at(request.path)(_error(message, kind, code, None)),
        content_type="application/json",
        headers=headers,
    )


def http_code(error: web.HTTPException) -> str:
    """Return the code of an error that aiohttp itself raised."""
    return HTTPStatus(error.status).name.lower()


def _error(message: str, type_: str, code: str, param: str | None) -> Error:
    # Messages quote what clients sent, which need not be good text.
    message = well_formed(message)
    param = None if param is None else well_formed(param)
    return Error(message, type_, param, code)
