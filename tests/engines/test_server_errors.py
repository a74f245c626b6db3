"""Servers' error responses, classified by fault.

The wordings are those of real servers: llama-server's and the embedded engine's were
recorded, the others are quoted in the servers' issue trackers.
"""

import json

import pytest

from shoal.domain.errors import (
    ContextExceeded,
    EngineFailed,
    InvalidRequest,
    JobError,
    ShoalError,
    TooLarge,
    Unavailable,
    Unprocessable,
)
from shoal.engines.server_errors import (
    NotServed,
    parse_problem,
    refusal_error,
    stream_error,
)

LLAMA_CONTEXT = {
    "error": {
        "code": 400,
        "message": "request (15020 tokens) exceeds the available context size "
        "(2048 tokens), try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 15020,
        "n_ctx": 2048,
    }
}
VLLM_CONTEXT = {
    "error": {
        "message": "'max_tokens' or 'max_completion_tokens' is too large: 8000. This "
        "model's maximum context length is 4096 tokens and your request has 2778 input "
        "tokens (8000 > 4096 - 2778). None",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }
}
OLD_VLLM = {"object": "error", "message": "bad top_p", "type": "BadRequestError"}
LM_STUDIO_CONTEXT = {
    "error": "Trying to keep the first 4500 tokens when context the overflows. However,"
    " the model is loaded with context length of only 4096 tokens, which is not enough."
}
FASTAPI = {"detail": [{"loc": ["body", "n"], "msg": "Input should be a number"}]}


def classify(
    body: object, status: int = 400, type_: str = "application/json"
) -> ShoalError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return refusal_error(status, type_, data, secret="")


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (400, LLAMA_CONTEXT, ContextExceeded),
        (400, VLLM_CONTEXT, ContextExceeded),
        (400, LM_STUDIO_CONTEXT, ContextExceeded),
        (
            400,
            {"error": "the input length exceeds the context length"},
            ContextExceeded,
        ),
        (500, {"error": "Context size has been exceeded."}, ContextExceeded),
        (
            400,
            {"error": {"message": "?", "code": "context_length_exceeded"}},
            ContextExceeded,
        ),
        (
            400,
            {
                "error": {
                    "message": "The input (99 tokens) is longer than the model's "
                    "context length (50 tokens)."
                }
            },
            ContextExceeded,
        ),
        (
            500,
            {
                "error": {
                    "message": "input (10001 tokens) is too large to process. increase "
                    "the physical batch size (current batch size: 512)"
                }
            },
            ContextExceeded,
        ),
        (400, OLD_VLLM, InvalidRequest),
        (422, FASTAPI, Unprocessable),
        (413, b"", TooLarge),
        (402, {"error": "no credit"}, Unavailable),
        (401, {"error": "no"}, JobError),
        (403, b"<html>", JobError),
        (404, {"error": {"message": "model 'x' not found, try pulling it"}}, NotServed),
        (
            404,
            {"error": {"message": "The model `x` does not exist."}},
            NotServed,
        ),
        (400, {"error": {"message": "", "code": "model_not_found"}}, NotServed),
        (404, {"error": {"message": "File Not Found"}}, NotServed),
        (501, {"error": {"message": "This server does not support it"}}, NotServed),
        (408, b"", Unavailable),
        (429, {"error": "slow down"}, Unavailable),
        (502, b"<html>", Unavailable),
        (503, {"error": {"message": "Loading model", "code": 503}}, Unavailable),
        (504, b"", Unavailable),
        (500, {"error": "unexpected server status: llm loading model"}, Unavailable),
        (
            500,
            {"error": "model requires more system memory (5 GiB) than is available"},
            EngineFailed,
        ),
        (
            500,
            {"error": "llama runner process has terminated: signal: killed"},
            EngineFailed,
        ),
        (500, {"error": {"message": "EngineCore encountered an issue."}}, EngineFailed),
        (
            500,
            {"error": {"message": "Failed to parse messages: Missing 'role' in …"}},
            InvalidRequest,
        ),
        (
            500,
            {"error": {"message": "image input is not supported - hint: if …"}},
            InvalidRequest,
        ),
        (500, {"error": {"message": "division by zero"}}, JobError),
        (302, b"", JobError),
        (418, {"error": "I am a teapot"}, JobError),
    ],
)
def test_error_type_follows_the_fault(
    status: int, body: object, error: type[ShoalError]
) -> None:
    assert type(classify(body, status)) is error


def test_rejected_key_error_names_the_flag() -> None:
    assert "--engine-key" in str(classify({"error": "sk-1 is wrong"}, 401))
    assert "sk-1" not in str(classify({"error": "sk-1 is wrong"}, 401))


def test_html_response_is_reported() -> None:
    error = classify(b"<html>" * 1000, 500, "text/html")

    assert str(error) == (
        "the engine answers with status 500: it sent text/html, expected JSON"
    )


def test_location_in_a_request_is_kept() -> None:
    error = classify({"error": {"message": "too hot", "param": "temperature"}})

    assert isinstance(error, InvalidRequest)
    assert (str(error), error.field) == ("too hot", "temperature")
    assert "body.n: Input should be a number" in str(classify(FASTAPI, 422))


@pytest.mark.parametrize(
    ("header", "seconds"), [("7", 7), ("", 5), ("Wed, 21 Oct", 5), ("99999", 600)]
)
def test_busy_server_may_set_retry_after(header: str, seconds: int) -> None:
    error = refusal_error(429, "text/plain", b"", retry_after=header, secret="")

    assert isinstance(error, Unavailable)
    assert error.retry_after == seconds


def test_missing_model_and_missing_work_differ() -> None:
    model = classify({"error": "model 'x' not found"}, 404)
    work = classify({"error": "404 page not found"}, 404)

    assert isinstance(model, NotServed)
    assert isinstance(work, NotServed)
    assert (model.model, work.model) == (True, False)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"\xff", b"[" * 99_999, b"5"])
def test_other_json_is_no_problem(body: bytes) -> None:
    assert parse_problem(body) is None


def test_stream_error_is_classified_by_code() -> None:
    def event(code: object) -> bytes:
        return json.dumps({"error": {"message": "m", "code": code}}).encode()

    assert type(stream_error(event(503), "")) is Unavailable
    assert type(stream_error(event(400), "")) is InvalidRequest
    assert type(stream_error(event("oops"), "")) is JobError
    assert type(stream_error(event(7), "")) is JobError
    assert str(stream_error(event(500), "")) == "m"
    assert type(stream_error(b"[%b]" % event(503), "")) is Unavailable
