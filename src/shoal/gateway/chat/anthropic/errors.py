"""Errors in Anthropic's form.

Source: Anthropic's API reference, "Errors"; for threads, what Anthropic's SDK for
JavaScript 1.12 reads of an error (``lib/internal/threads``).
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from shoal.gateway.http.errors import ErrorForm, ErrorReport

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",  # an operator cancelled the job
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types by status, beside those for all other statuses below and from 500."""

REQUEST_ERROR = "invalid_request_error"
SERVER_ERROR = "api_error"


THREAD = "thread"


class UnsupportedThread(msgspec.Struct, frozen=True):
    """Makes the tool runners of Anthropic's SDKs go on without a thread.

    A thread is a conversation that Anthropic's servers store.
    """

    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"
    unsupported: list[str] = msgspec.field(default_factory=lambda: [THREAD])


class AnthropicErrorDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    message: str
    details: UnsupportedThread | None = None


class AnthropicError(msgspec.Struct, frozen=True):
    error: AnthropicErrorDetail
    request_id: str | None = None
    type: Literal["error"] = "error"


def _body(report: ErrorReport) -> AnthropicError:
    other = REQUEST_ERROR if report.status < 500 else SERVER_ERROR
    kind = TYPES.get(report.status, other)
    details = UnsupportedThread() if report.param == THREAD else None
    detail = AnthropicErrorDetail(kind, report.message, details)
    return AnthropicError(detail, report.request_id or None)


ANTHROPIC_ERRORS = ErrorForm(AnthropicError, _body)
