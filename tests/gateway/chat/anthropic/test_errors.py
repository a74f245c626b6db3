import json

import pytest

from shoal.domain.errors import (
    Cancelled,
    Forbidden,
    InvalidRequest,
    JobError,
    NoFirstOutput,
    NotFound,
    NoWorker,
    QueueFull,
    ShoalError,
    TooLarge,
    Unauthorized,
    UnknownModel,
)
from shoal.gateway.chat.anthropic.message_answer import ANTHROPIC_ERRORS
from shoal.gateway.http.errors import error_body


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("wrong", "messages"), "invalid_request_error"),
        (Unauthorized("wrong"), "authentication_error"),
        (Forbidden("wrong"), "permission_error"),
        (UnknownModel("wrong"), "not_found_error"),
        (NotFound("wrong"), "not_found_error"),
        (TooLarge("wrong"), "request_too_large"),
        (QueueFull("wrong", 5), "rate_limit_error"),
        (Cancelled("wrong"), "api_error"),
        (JobError("wrong"), "api_error"),
        (NoWorker("wrong", 5), "overloaded_error"),
        (NoFirstOutput("wrong"), "timeout_error"),
        (ShoalError("wrong"), "api_error"),
    ],
)
def test_errors_have_anthropics_form(error: ShoalError, kind: str) -> None:
    assert json.loads(error_body(error, ANTHROPIC_ERRORS)) == {
        "type": "error",
        "error": {"type": kind, "message": "wrong"},
        "request_id": None,
    }


def test_refused_thread_has_what_tool_runners_go_on_by() -> None:
    error = InvalidRequest("thread is not supported", "thread")

    body = json.loads(error_body(error, ANTHROPIC_ERRORS))

    assert body["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
