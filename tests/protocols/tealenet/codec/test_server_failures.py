"""The texts in which real nodes report failures of their model servers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.outcome import Fault
from shoal.protocols.tealenet.outbound_jobs import (
    MESSAGE_MAX,
    ServerFailure,
    read_server_failure,
    without_internals,
)

CONTEXT = "request (9000 tokens) exceeds the available context size (4096 tokens)"


def body(message: str, **fields: object) -> str:
    return json.dumps({"error": {"message": message, **fields}})


@pytest.mark.parametrize(
    "text",
    [
        "backend request failed",
        "backend request failed: error sending request for url "
        "(http://127.0.0.1:8400/v1/chat/completions): connection refused",
        "backend request failed: 10.0.0.7:500 does not answer",
        "the model llama-405b cannot be run",
        "the model llama-405 cannot be run",
        "500s",
        "",
        "{",
        "[" * 100_000,
        '{"error":' + '{"error":' * 100_000,
    ],
)
def test_a_failure_without_a_response_is_nobodys_but_the_servers(text: str) -> None:
    failure = read_server_failure(text)

    assert failure == ServerFailure(None, "the node's model server failed")


@pytest.mark.parametrize("status", [401, 402, 403, 404, 408, 429, 502, 503])
@pytest.mark.parametrize(
    "form",
    [
        "backend returned {} Oh: {}",
        "backend error ({}): {}",
        "HTTP status {}, {}",
        "{} {}",
    ],
)
def test_what_another_server_may_do_is_nobodys_fault(status: int, form: str) -> None:
    text = form.format(status, body("at /srv/vllm/engine.py: see http://10.0.0.7:8000"))

    failure = read_server_failure(text)

    reason = f"the node's model server failed with status {status}"
    assert failure == ServerFailure(None, reason)


@pytest.mark.parametrize(
    ("text", "fault", "reason"),
    [
        (
            f"backend returned 400 Bad Request: {body(CONTEXT, n_ctx=4096)}",
            Fault.CONTEXT,
            CONTEXT,
        ),
        (f"backend returned 500: {body(CONTEXT)}", Fault.CONTEXT, CONTEXT),
        (f"backend failed: {body('bad top_p', code=400)}", Fault.REQUEST, "bad top_p"),
        ('400 {"error":"bad top_p"}', Fault.REQUEST, "bad top_p"),
        ('400 {"message":"bad top_p","object":"error"}', Fault.REQUEST, "bad top_p"),
        ('422 {"detail":"bad top_p"}', Fault.VALUES, "bad top_p"),
        (
            '422 {"detail":[{"loc":["body","n"],"msg":"?"}]}',
            Fault.VALUES,
            "the node's model server failed with status 422",
        ),
        (
            "backend returned 413 Payload Too Large: <html>nginx/1.2</html>",
            Fault.SIZE,
            "the node's model server failed with status 413",
        ),
        (
            f"400: {body('no such file: /models/a.gguf at http://10.0.0.7:80/v1')}",
            Fault.REQUEST,
            "no such file: … at …",
        ),
        (
            f"backend returned 500: {body('at /srv/vllm/engine.py: no blocks')}",
            Fault.ENGINE,
            "the node's model server failed with status 500: at … no blocks",
        ),
        (
            "599 oh",
            Fault.ENGINE,
            "the node's model server failed with status 599",
        ),
        (f"400: {body('bad top_p')} (attempt 1)", Fault.REQUEST, "bad top_p"),
        (f"400: {body('é' * 1000)}", Fault.REQUEST, "é" * MESSAGE_MAX),
    ],
)
def test_the_fault_is_that_of_the_request_or_the_engine(
    text: str, fault: Fault, reason: str
) -> None:
    assert read_server_failure(text) == ServerFailure(fault, reason)


@given(st.text())
def test_any_text_is_some_failure(text: str) -> None:
    assert read_server_failure(text).reason


@pytest.mark.parametrize(
    "text", ["1/2 of mlx-community/Qwen3-8B-4bit", "and/or", "version 1.2.3", "a / b"]
)
def test_what_is_no_address_or_path_stays(text: str) -> None:
    assert without_internals(text) == text
