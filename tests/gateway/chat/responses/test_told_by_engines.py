"""What engines tell beside the text: details of usage, and probabilities."""

import json
import math
from typing import Any

import pytest

from shoal.domain.answer_assembly import assemble
from shoal.domain.errors import (
    ContextExceeded,
    InsufficientFunds,
    InvalidRequest,
    RateLimited,
    ShoalError,
    WorkerLost,
)
from shoal.domain.ids import JobId
from shoal.domain.outcome import Delta, Outcome, Usage
from shoal.domain.work import JSON, Chat
from shoal.gateway.chat.responses.body import ResponseFields
from shoal.gateway.chat.responses.response_object import ResponseDraft, ResponseObject
from shoal.gateway.http.responses import encode_json

CHAT = Chat("m1", ({"role": "user", "content": "hi"},))
DRAFT = ResponseDraft(JobId("job1"), CHAT, ResponseFields(1_700_000_000))


def shown(response: ResponseObject) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode_json(response))
    return found


def test_details_of_the_usage_are_counts_also_where_they_are_unknown() -> None:
    known = shown(DRAFT.answered(Outcome("hi", usage=Usage(10, 5, 8, 3))))["usage"]
    unknown = shown(DRAFT.answered(Outcome("hi", usage=Usage(10, 5))))["usage"]

    assert known["input_tokens_details"]["cached_tokens"] == 8
    assert known["output_tokens_details"] == {"reasoning_tokens": 3}
    assert unknown["input_tokens_details"]["cached_tokens"] == 0
    assert unknown["output_tokens_details"] == {"reasoning_tokens": 0}


def test_token_without_a_number_keeps_the_places_of_the_others() -> None:
    entries: list[JSON] = [
        {"token": "a", "logprob": math.nan},
        {"token": "b", "logprob": -1.0, "top_logprobs": None},
    ]
    outcome = assemble([Delta(0, {"content": "ab"}, {"content": entries})])

    (item,) = shown(DRAFT.answered(outcome))["output"]

    assert item["content"][0]["logprobs"] == [
        {"token": "b", "logprob": -1.0, "bytes": [98], "top_logprobs": []}
    ]


@pytest.mark.parametrize(
    ("error", "code", "type_"),
    [
        (WorkerLost("gone"), "server_error", "worker_lost"),
        (InvalidRequest("no", "a"), "invalid_prompt", "invalid_request"),
        (RateLimited("slow"), "rate_limit_exceeded", "rate_limit_exceeded"),
        (InsufficientFunds("poor"), "insufficient_quota", "insufficient_quota"),
        (ContextExceeded("long"), "context_length_exceeded", "context_length_exceeded"),
    ],
)
def test_failure_has_a_code_that_clients_know(
    error: ShoalError, code: str, type_: str
) -> None:
    failure = shown(DRAFT.failed(error))["error"]

    assert failure == {"code": code, "message": str(error), "type": type_}
