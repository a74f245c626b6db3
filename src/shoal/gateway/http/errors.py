"""Error responses: the only place that maps errors to HTTP statuses."""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus

import msgspec
from aiohttp import web

from shoal.client.reconnection import STOPPING
from shoal.domain import errors
from shoal.domain.facts import LoadState
from shoal.gateway.http.request_record import record_of
from shoal.gateway.http.responses import (
    ClientGone,
    encode_event,
    stream_headers,
    well_formed,
    write,
)

CLIENT = "invalid_request_error"
SERVER = "server_error"
LIMIT = "rate_limit_error"
QUOTA = "insufficient_quota"
BEARER = {"WWW-Authenticate": "Bearer"}
NO_RETRY = {"x-should-retry": "false"}  # stops the retries of OpenAI's clients


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """The status, type and code of a kind of error, as OpenAI has them.

    OpenAI's clients choose their exception by ``status``, and retry some by themselves.
    """

    status: int
    type: str
    code: str
    headers: Mapping[str, str] = field(default_factory=dict)
    reason: str | None = None  # for non-standard statuses


ERROR_STATUSES: Mapping[type[errors.ShoalError], ErrorStatus] = {
    errors.InvalidRequest: ErrorStatus(400, CLIENT, "invalid_request"),
    errors.AlreadyEnded: ErrorStatus(409, CLIENT, "already_ended"),
    errors.Unauthorized: ErrorStatus(401, CLIENT, "invalid_api_key", BEARER),
    errors.KeyExpired: ErrorStatus(401, CLIENT, "expired_api_key", BEARER),
    errors.KeyRevoked: ErrorStatus(401, CLIENT, "revoked_api_key", BEARER),
    errors.SessionEnded: ErrorStatus(401, CLIENT, "session_ended", BEARER),
    errors.PaymentDue: ErrorStatus(402, CLIENT, "payment_required"),
    errors.Forbidden: ErrorStatus(403, CLIENT, "insufficient_permissions"),
    errors.NotFound: ErrorStatus(404, CLIENT, "not_found"),
    errors.UnknownModel: ErrorStatus(404, CLIENT, "model_not_found"),
    errors.UnknownTask: ErrorStatus(404, CLIENT, "task_not_found"),
    errors.CannotDo: ErrorStatus(400, CLIENT, "unsupported_value"),
    errors.ContextExceeded: ErrorStatus(400, CLIENT, "context_length_exceeded"),
    errors.Unprocessable: ErrorStatus(422, CLIENT, "unprocessable"),
    errors.KeyReused: ErrorStatus(422, CLIENT, "idempotency_key_reused"),
    errors.TooSlow: ErrorStatus(408, CLIENT, "request_timeout"),
    errors.TooLarge: ErrorStatus(413, CLIENT, "request_too_large"),
    errors.QueueFull: ErrorStatus(429, LIMIT, "queue_full"),
    errors.RateLimited: ErrorStatus(429, LIMIT, "rate_limit_exceeded"),
    errors.TooManyFailures: ErrorStatus(429, LIMIT, "too_many_failures"),
    errors.DaySpent: ErrorStatus(429, QUOTA, QUOTA, NO_RETRY),
    errors.BudgetSpent: ErrorStatus(429, QUOTA, QUOTA, NO_RETRY),
    errors.InsufficientFunds: ErrorStatus(429, QUOTA, QUOTA, NO_RETRY),
    # nginx's status for the client's own doing; not retried.
    errors.Cancelled: ErrorStatus(499, CLIENT, "cancelled", {}, "Cancelled"),
    # A retry would fail again.
    errors.JobError: ErrorStatus(502, SERVER, "job_failed", NO_RETRY),
    errors.WorkerLost: ErrorStatus(502, SERVER, "worker_lost"),
    errors.NoWorker: ErrorStatus(503, SERVER, "no_worker"),
    errors.ModelLoading: ErrorStatus(503, SERVER, "model_loading"),
    errors.NotReady: ErrorStatus(503, SERVER, "not_ready"),
    errors.PaymentsDown: ErrorStatus(503, SERVER, "payments_unavailable"),
    errors.ShuttingDown: ErrorStatus(503, SERVER, "shutting_down", {STOPPING: "1"}),
    errors.StoreError: ErrorStatus(503, SERVER, "store_failed"),
    errors.StillRunning: ErrorStatus(503, SERVER, "still_running"),
    errors.TimedOut: ErrorStatus(504, SERVER, "timed_out"),
    errors.NoFirstOutput: ErrorStatus(504, SERVER, "first_output_timed_out"),
    errors.OutputStalled: ErrorStatus(504, SERVER, "output_stalled"),
    errors.TookTooLong: ErrorStatus(504, SERVER, "total_timed_out"),
    errors.ShoalError: ErrorStatus(500, SERVER, "internal_error"),
}


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """What a response says about an error; ``type`` and ``code`` are OpenAI's.

    ``param`` names the field of the request that is at fault, if one is; empty
    ``request_id``: it is in the headers alone.  ``loading`` is as in ``ModelLoading``.
    """

    message: str
    type: str
    param: str | None
    code: str
    status: int
    request_id: str = ""
    loading: LoadState | None = None


class ErrorDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error; ``loading`` says how far the load of the model is that it lacks."""

    message: str
    type: str
    param: str | None
    code: str
    loading: LoadState | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class PlainError(msgspec.Struct, frozen=True):
    """An error as clients of the job API expect it."""

    error: str


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How the clients of some paths expect errors: in a JSON object.

    ``body`` is its type, and ``make`` makes it.
    """

    body: type[msgspec.Struct]
    make: Callable[[ErrorReport], msgspec.Struct]


def _openai_body(report: ErrorReport) -> ErrorBody:
    return ErrorBody(
        ErrorDetail(
            report.message, report.type, report.param, report.code, report.loading
        )
    )


OPENAI_ERRORS = ErrorForm(ErrorBody, _openai_body)
PLAIN_ERRORS = ErrorForm(PlainError, lambda report: PlainError(report.message))


def error_status(error: errors.ShoalError) -> ErrorStatus:
    """Return the row of the nearest base class."""
    return next(
        ERROR_STATUSES[each] for each in type(error).__mro__ if each in ERROR_STATUSES
    )


def error_report(error: errors.ShoalError, request_id: str = "") -> ErrorReport:
    """Return what to say about an error."""
    row = error_status(error)
    param = error.field if isinstance(error, errors.InvalidRequest) else None
    # Clients would look for a full disk on their own machine.
    where = (
        "the coordinator's database: " if isinstance(error, errors.StoreError) else ""
    )
    report = _report(
        f"{where}{error}", row.type, param, row.code, row.status, request_id
    )
    if isinstance(error, errors.ModelLoading):
        return replace(report, loading=msgspec.convert(error.loading, LoadState))
    return report


def error_body(error: errors.ShoalError, form: ErrorForm = OPENAI_ERRORS) -> bytes:
    """Encode an error as one JSON object, also inside a stream."""
    return msgspec.json.encode(form.make(error_report(error)))


def error_response(
    error: errors.ShoalError, form: ErrorForm = OPENAI_ERRORS, request_id: str = ""
) -> web.Response:
    """Return the response to a request that failed before anything was sent."""
    row = error_status(error)
    headers = dict(row.headers)
    if isinstance(error, errors.Unavailable | errors.StoreError):
        headers["Retry-After"] = str(error.retry_after)
    return web.Response(
        status=row.status,
        reason=row.reason,
        body=msgspec.json.encode(form.make(error_report(error, request_id))),
        content_type="application/json",
        headers=headers,
    )


def http_error_response(
    request: web.Request, error: web.HTTPException, form: ErrorForm = OPENAI_ERRORS
) -> web.Response:
    """Return the response to a request that aiohttp itself rejected."""
    standard = HTTPStatus(error.status)
    message = f"{request.method} {request.path}: {standard.phrase.lower()}"
    if isinstance(error, web.HTTPMethodNotAllowed):
        message += f", use {' or '.join(sorted(error.allowed_methods))}"
    elif error.text and not error.text.startswith(str(error.status)):
        message = error.text.strip()
    elif isinstance(error, web.HTTPNotFound):
        known = (each.canonical for each in request.app.router.resources())
        if (meant := misdirected(request.path, known)) is not None:
            message += f": did you mean {meant}? Check the base URL of the client"
    code = http_error_code(error)
    kind = CLIENT if error.status < 500 else SERVER
    headers = {
        name: error.headers[name]
        for name in ("Allow", "Upgrade")
        if name in error.headers
    }
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(
            form.make(
                _report(message, kind, None, code, error.status, record_of(request).id)
            )
        ),
        content_type="application/json",
        headers=headers,
    )


def misdirected(path: str, known: Iterable[str]) -> str | None:
    """Return the path that a client means whose base URL lacks or repeats a part."""
    return next(
        (
            each
            for each in known
            if each != "/"
            and path != "/"
            and (each.endswith(path) or path.endswith(each))
        ),
        None,
    )


def http_error_code(error: web.HTTPException) -> str:
    """Return the code of an error that aiohttp itself raised."""
    return HTTPStatus(error.status).name.lower()


def _report(
    message: str, type_: str, param: str | None, code: str, status: int, request_id: str
) -> ErrorReport:
    # Messages quote what clients sent, which may have lone surrogates.
    message = well_formed(message)
    param = None if param is None else well_formed(param)
    return ErrorReport(message, type_, param, code, status, request_id)


async def write_events(
    request: web.Request, events: AsyncGenerator[bytes, None], form: ErrorForm
) -> web.StreamResponse:
    """Answer with server-sent events as they come; an error becomes the last of them.

    It has no status then: that is sent already.
    """
    response = web.StreamResponse(headers=stream_headers())
    await response.prepare(request)
    record = record_of(request)
    try:
        async with aclosing(events):
            async for text in events:
                await write(request, response, text)
        await write(request, response, b"", last=True)
    except ClientGone:
        record.error = "client_gone"
    except errors.ShoalError as error:
        record.error = error_status(error).code
        last = encode_event("error", msgspec.Raw(error_body(error, form)))
        with suppress(ClientGone):
            await write(request, response, last, last=True)
    return response
