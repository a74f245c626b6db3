"""What a peer asks us for, and how it is answered."""

from dataclasses import replace

import msgspec
import pytest

from protocols.tealenet.peers import (
    CHAT,
    REQUEST,
    PeerPair,
    coordinator_side,
    heartbeat,
    inference_request,
    met_mac,
    worker_side,
)
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault, Usage
from shoal.domain.vocabulary import AnswerChunk, Completed, Failed, Rejected, RunJob
from shoal.domain.work import ANY_MODEL, Chat
from shoal.protocols.tealenet.codec.messages import InferenceRequest, LoadModel
from shoal.protocols.tealenet.inbound_jobs import OPEN_MAX
from shoal.protocols.tealenet.peer_session import INVALID_MAX


def test_a_mac_is_answered_as_it_understands() -> None:
    mac = met_mac()
    mac.say(inference_request(stream_options={"include_usage": True}))
    (run,) = mac.end.heard

    assert isinstance(run, RunJob)
    assert run.work == CHAT
    mac.send(AnswerChunk(run.job_id, run.lease, ["Hel"]))
    mac.send(Completed(run.job_id, run.lease, "length", Usage(5, 7), ("lo",)))

    *chunks, (kind, complete) = mac.said
    assert kind == "inferenceComplete"
    assert complete == {"requestID": REQUEST, "tokensIn": 5, "tokensOut": 7}
    said = [payload["chunk"] for _, payload in chunks]
    texts = [c["delta"].get("content", "") for s in said for c in s["choices"]]
    assert "".join(texts) == "Hello"
    reasons = [c.get("finish_reason") for s in said for c in s["choices"]]
    assert reasons[-1] == "length"
    assert said[-1]["usage"]["total_tokens"] == 12
    assert said[-1]["choices"] == []
    for each in said:
        assert isinstance(each["created"], int)
        assert each["model"] == "m"


def test_a_request_without_a_model_is_for_any() -> None:
    mac = met_mac()
    mac.say(InferenceRequest(REQUEST, {"messages": []}, True))

    (run,) = mac.end.heard

    assert isinstance(run, RunJob)
    assert isinstance(run.work, Chat)
    assert run.work.model == ANY_MODEL


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (Rejected(JobId(""), LeaseNumber(1), "busy"), "unavailable", "busy"),
        (
            Failed(JobId(""), LeaseNumber(1), "CUDA error at /secret/place"),
            "internal_error",
            "the worker failed",
        ),
        (
            Failed(JobId(""), LeaseNumber(1), "the prompt is too long", Fault.CONTEXT),
            "internal_error",
            "the prompt is too long",
        ),
    ],
)
def test_a_mac_gets_the_reason_for_a_failure_without_internals(
    end: Rejected | Failed, code: str, said: str
) -> None:
    mac = met_mac()
    mac.say(inference_request())
    (run,) = mac.end.of(RunJob)

    mac.send(replace(end, job_id=run.job_id))

    ((kind, payload),) = mac.said
    assert kind == "inferenceError"
    assert payload["code"] == code
    assert said in payload["errorMessage"]
    assert "/secret" not in payload["errorMessage"]


def test_a_job_for_a_model_that_is_not_there_is_refused_as_that() -> None:
    mac = met_mac()
    mac.say(InferenceRequest(REQUEST, {"model": "other", "messages": []}, True))
    (run,) = mac.end.of(RunJob)

    mac.send(Rejected(run.job_id, run.lease, "nobody has it"))

    ((_, payload),) = mac.said
    assert payload["code"] == "model_not_loaded"


def test_a_request_that_comes_twice_is_done_once() -> None:
    mac = met_mac()

    mac.say(inference_request())
    mac.say(InferenceRequest(REQUEST.lower(), inference_request().request, True))

    assert len(mac.end.of(RunJob)) == 1
    assert mac.said == []
    assert "duplicate request" in mac.end.notices[-1]


def test_a_peer_has_only_so_many_requests_open() -> None:
    mac = met_mac()

    for number in range(OPEN_MAX + 1):
        request_id = f"{number:08x}-0000-4000-8000-000000000000"
        mac.say(InferenceRequest(request_id, inference_request().request, True))

    assert len(mac.end.of(RunJob)) == OPEN_MAX
    ((kind, payload),) = [each for each in mac.said if each[0] != "heartbeat"]
    assert kind == "inferenceError"
    assert payload["code"] == "queue_full"


def test_a_peer_that_may_not_submit_gets_an_error_with_the_remedy() -> None:
    two = PeerPair(worker_side("w"), coordinator_side("a")).settle()
    request = InferenceRequest(REQUEST, inference_request().request, True)
    data = b'{"inferenceRequest":{"_0":%b}}' % msgspec.json.encode(request)

    two.acceptor.take(two.acceptor.conversation.receive([data], 1.0))

    kind, payload = two.acceptor.said[-1]
    assert kind == "inferenceError"
    assert payload["code"] == "unavailable"
    assert "API" in payload["errorMessage"]
    assert not two.acceptor.of(RunJob)


def test_a_request_that_makes_no_sense_is_refused_by_name() -> None:
    mac = met_mac()

    mac.say(
        b'{"inferenceRequest":{"_0":{"requestID":"%b","request":5,"streaming":true}}}'
        % REQUEST.encode()
    )

    ((kind, payload),) = mac.said
    assert kind == "inferenceError"
    assert payload["requestID"] == REQUEST
    assert "request" in payload["errorMessage"]
    assert mac.end.notices


def test_too_many_invalid_messages_end_the_connection() -> None:
    mac = met_mac()

    for _ in range(INVALID_MAX - 1):
        mac.say(b"junk!")
    mac.say(heartbeat())
    for _ in range(INVALID_MAX - 1):
        mac.say(b'{"heartbeat":5}')
    assert mac.end.closed is None
    mac.say(b"null")

    assert mac.end.closed == f"{INVALID_MAX} invalid messages in a row"


def test_unknown_kinds_are_ignored() -> None:
    mac = met_mac()

    for _ in range(2 * INVALID_MAX):
        mac.say(b'{"groupMessage":{"_0":{"data":"AA=="}}}')

    assert (mac.end.heard, mac.said, mac.end.closed) == ([], [], None)


def test_load_model_reports_whether_the_model_is_on_offer() -> None:
    mac = met_mac()

    mac.say(LoadModel(REQUEST, "m"))
    mac.say(LoadModel(REQUEST, "other"))

    loaded, error = mac.said
    assert loaded == (
        "modelLoaded",
        {"requestID": REQUEST, "modelID": "m", "loadTimeMs": 0},
    )
    assert error[0] == "modelLoadError"
