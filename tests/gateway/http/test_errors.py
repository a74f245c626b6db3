"""Each error has a status, and each status an exception of OpenAI's client."""

import asyncio
import gc
import json

import pytest
from aiohttp import web

from gateway.serving import Pool
from harness.slow_imports import openai as sdk
from shoal.client.reconnection import STOPPING
from shoal.domain import errors
from shoal.domain.errors import ShoalError
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.errors import (
    ERROR_STATUSES,
    error_body,
    error_response,
    error_status,
)

pytestmark = pytest.mark.shared_pool

LOADING = {
    "model": "m",
    "machine": "shoal:anna",
    "step": "reading weights",
    "bytes": 5,
    "size": 10,
    "seconds": None,
}
EXAMPLES: list[tuple[ShoalError, int, str]] = [
    (errors.InvalidRequest("x", "top_p"), 400, "invalid_request"),
    (errors.CannotDo("x", "tools"), 400, "unsupported_value"),
    (errors.ContextExceeded("x", "messages"), 400, "context_length_exceeded"),
    (errors.Unauthorized("x"), 401, "invalid_api_key"),
    (errors.KeyExpired("x"), 401, "expired_api_key"),
    (errors.KeyRevoked("x"), 401, "revoked_api_key"),
    (errors.SessionEnded("x"), 401, "session_ended"),
    (errors.Forbidden("x"), 403, "insufficient_permissions"),
    (errors.NotFound("x"), 404, "not_found"),
    (errors.UnknownModel("x"), 404, "model_not_found"),
    (errors.TooSlow("x"), 408, "request_timeout"),
    (errors.PaymentDue("x", {}), 402, "payment_required"),
    (errors.AlreadyEnded("x"), 409, "already_ended"),
    (errors.TooLarge("x"), 413, "request_too_large"),
    (errors.QueueFull("x", 7), 429, "queue_full"),
    (errors.UnknownTask("x"), 404, "task_not_found"),
    (errors.RateLimited("x", 7), 429, "rate_limit_exceeded"),
    (errors.DaySpent("x", 7), 429, "insufficient_quota"),
    (errors.BudgetSpent("x"), 429, "insufficient_quota"),
    (errors.TooManyFailures("x", 7), 429, "too_many_failures"),
    (errors.Cancelled("x"), 499, "cancelled"),
    (errors.JobError("x"), 502, "job_failed"),
    (errors.WorkerLost("x"), 502, "worker_lost"),
    (errors.NoWorker("x"), 503, "no_worker"),
    (errors.PaymentsDown("x"), 503, "payments_unavailable"),
    (errors.ShuttingDown("x"), 503, "shutting_down"),
    (errors.StoreError("x"), 503, "store_failed"),
    (errors.Unprocessable("x"), 422, "unprocessable"),
    (errors.KeyReused("x"), 422, "idempotency_key_reused"),
    (errors.StillRunning("x"), 503, "still_running"),
    (errors.TimedOut("x"), 504, "timed_out"),
    (errors.NoFirstOutput("x"), 504, "first_output_timed_out"),
    (errors.OutputStalled("x"), 504, "output_stalled"),
    (errors.NotReady("x"), 503, "not_ready"),
    (errors.TookTooLong("x"), 504, "total_timed_out"),
    (errors.ModelLoading("x", 7, LOADING), 503, "model_loading"),
    (errors.ConfigError("x"), 500, "internal_error"),
    (errors.LimitExceeded("x", 2, 1), 500, "internal_error"),
]


@pytest.mark.parametrize(("error", "status", "code"), EXAMPLES)
async def test_errors_have_a_status_and_a_code(
    error: ShoalError, status: int, code: str
) -> None:
    answer = error_response(error)

    assert answer.status == status
    assert answer.content_type == "application/json"
    told = json.loads(error_body(error))["error"]
    loading = {"loading"} if isinstance(error, errors.ModelLoading) else set()
    assert told.keys() == {"message", "type", "param", "code"} | loading
    assert told["message"].endswith(str(error))
    assert told["code"] == code


def test_every_row_has_an_example() -> None:
    assert {code for _, _, code in EXAMPLES} == {
        row.code for row in ERROR_STATUSES.values()
    }


async def test_temporary_error_has_retry_after() -> None:
    assert error_response(errors.QueueFull("x", 7)).headers["Retry-After"] == "7"
    for error in (errors.NoWorker("x"), errors.StoreError("x"), errors.TimedOut("x")):
        assert int(error_response(error).headers["Retry-After"]) > 0


async def test_coordinator_that_stops_says_that_it_did_nothing() -> None:
    assert STOPPING in error_response(errors.ShuttingDown("x")).headers
    assert STOPPING not in error_response(errors.NotReady("x")).headers


async def test_permanent_error_is_not_retryable() -> None:
    assert error_response(errors.JobError("x")).headers["x-should-retry"] == "false"


def test_invalid_field_is_named() -> None:
    told = json.loads(error_body(errors.InvalidRequest("x", "messages[0].role")))

    assert told["error"]["param"] == "messages[0].role"


def test_messages_may_contain_any_text() -> None:
    error = errors.UnknownModel("no \ud800, \x00")

    assert json.loads(error_body(error))["error"]["message"] == "no \ufffd, \x00"


def test_new_error_class_inherits_its_row() -> None:
    class Strange(errors.NoWorker):
        pass

    assert error_status(Strange("x")) == ERROR_STATUSES[errors.NoWorker]


EXCEPTIONS: dict[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    402: "APIStatusError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "APIStatusError",
    409: "ConflictError",
    413: "APIStatusError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    499: "APIStatusError",
    500: "InternalServerError",
    502: "InternalServerError",
    503: "InternalServerError",
    504: "InternalServerError",
}


@pytest.mark.parametrize(("error", "status", "code"), EXAMPLES)
async def test_official_client_raises_its_exception_for_each(
    pool: Pool,
    openai: "sdk.AsyncOpenAI",
    monkeypatch: pytest.MonkeyPatch,
    error: ShoalError,
    status: int,
    code: str,
) -> None:
    async def refuse(*_: object, **__: object) -> ApiCaller:
        raise error

    monkeypatch.setattr(pool.access, "authorize", refuse)

    with pytest.raises(sdk.APIStatusError) as caught:
        await openai.chat.completions.create(
            model="m1", messages=[{"role": "user", "content": "hi"}]
        )

    assert type(caught.value) is getattr(sdk, EXCEPTIONS[status])
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert caught.value.type == error_status(error).type
    assert caught.value.param == getattr(error, "field", None)
    assert caught.value.request_id == caught.value.response.headers["x-request-id"]
    if status in (429, 503, 504) and not isinstance(error, errors.BudgetSpent):
        assert int(caught.value.response.headers["Retry-After"]) > 0


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/jobs/commit/cheap", "/api/chat"]
)
async def test_a_rejected_request_is_freed_at_once(pool: Pool, path: str) -> None:
    # Otherwise a flood keeps its bodies until the garbage collector runs.
    def kept() -> int:
        return sum(type(each) is web.Request for each in gc.get_objects())

    body = {"model": "none", "messages": [{"role": "user", "content": "hi"}]}
    gc.collect()
    before = kept()
    gc.disable()
    try:
        for _ in range(3):
            async with pool.session.post(
                pool.url + path, json=body, headers=pool.headers()
            ) as answer:
                await answer.read()
        await asyncio.sleep(0)

        assert kept() <= before + 1  # that of the connection, which stays open
    finally:
        gc.enable()
