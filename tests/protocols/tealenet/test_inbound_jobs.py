"""Jobs that a peer submits, and the reports about them."""

from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from protocols.contexts import require_token
from protocols.tealenet.peers import (
    CHAT,
    REQUEST,
    RUN,
    PeerPair,
    heartbeat,
    inference_request,
    joined_mac,
    local_coordinator,
    local_worker,
)
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault, Usage
from shoal.domain.vocabulary import (
    AnswerChunk,
    Completed,
    Failed,
    Rejected,
    RunJob,
)
from shoal.domain.work import ANY_MODEL, Chat
from shoal.protocols.seam.worker_session import JOBS_MAX
from shoal.protocols.tealenet.codec.messages import InferenceRequest, LoadModel
from shoal.protocols.tealenet.inbound_jobs import OPEN_MAX
from shoal.protocols.tealenet.peer_session import INVALID_MAX

SLOTS = 1024


def test_a_mac_gets_chunks_and_a_completion() -> None:
    mac = joined_mac()
    mac.deliver(inference_request(stream_options={"include_usage": True}))
    (run,) = mac.end.received

    assert isinstance(run, RunJob)
    assert run.work == CHAT
    mac.send(AnswerChunk(run.job_id, run.lease, ["Hel"]))
    mac.send(Completed(run.job_id, run.lease, "length", Usage(5, 7), ("lo",)))

    *chunks, (kind, complete) = mac.drain()
    assert kind == "inferenceComplete"
    assert complete == {"requestID": REQUEST, "tokensIn": 5, "tokensOut": 7}
    chunks_sent = [payload["chunk"] for _, payload in chunks]
    texts = [c["delta"].get("content", "") for s in chunks_sent for c in s["choices"]]
    assert "".join(texts) == "Hello"
    reasons = [c.get("finish_reason") for s in chunks_sent for c in s["choices"]]
    assert reasons[-1] == "length"
    assert chunks_sent[-1]["usage"]["total_tokens"] == 12
    assert chunks_sent[-1]["choices"] == []
    for each in chunks_sent:
        assert isinstance(each["created"], int)
        assert each["model"] == "m"


def test_a_request_without_a_model_allows_any_model() -> None:
    mac = joined_mac()
    mac.deliver(InferenceRequest(REQUEST, {"messages": []}, True))

    (run,) = mac.end.received

    assert isinstance(run, RunJob)
    assert isinstance(run.work, Chat)
    assert run.work.model == ANY_MODEL


@pytest.mark.parametrize(
    ("end", "code", "text"),
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
    end: Rejected | Failed, code: str, text: str
) -> None:
    mac = joined_mac()
    mac.deliver(inference_request())
    (run,) = mac.end.messages(RunJob)

    mac.send(structs.replace(end, job_id=run.job_id))

    ((kind, payload),) = mac.drain()
    assert kind == "inferenceError"
    assert payload["code"] == code
    assert text in payload["errorMessage"]
    assert "/secret" not in payload["errorMessage"]


def test_a_rejection_for_an_unknown_model_has_its_code() -> None:
    mac = joined_mac()
    mac.deliver(InferenceRequest(REQUEST, {"model": "other", "messages": []}, True))
    (run,) = mac.end.messages(RunJob)

    mac.send(Rejected(run.job_id, run.lease, "no worker has it"))

    ((_, payload),) = mac.drain()
    assert payload["code"] == "model_not_loaded"


def test_a_duplicate_request_is_ignored() -> None:
    mac = joined_mac()

    mac.deliver(inference_request())
    mac.deliver(InferenceRequest(REQUEST.lower(), inference_request().request, True))

    assert len(mac.end.messages(RunJob)) == 1
    assert mac.drain() == []
    assert "duplicate request" in mac.end.notices[-1]


def test_open_requests_of_a_peer_are_limited() -> None:
    mac = joined_mac()

    for number in range(OPEN_MAX + 1):
        request_id = f"{number:08x}-0000-4000-8000-000000000000"
        mac.deliver(InferenceRequest(request_id, inference_request().request, True))

    assert len(mac.end.messages(RunJob)) == OPEN_MAX
    ((kind, payload),) = [each for each in mac.drain() if each[0] != "heartbeat"]
    assert kind == "inferenceError"
    assert payload["code"] == "queue_full"


def test_a_worker_serves_as_many_streams_as_it_offers_slots() -> None:
    worker = local_worker("w")
    offers = tuple(structs.replace(offer, slots=SLOTS) for offer in worker.offers)
    pair = PeerPair(replace(worker, offers=offers), local_coordinator("a")).joined()
    leases = [LeaseNumber(number) for number in range(1, SLOTS + 2)]

    for lease in leases:
        pair.acceptor.send(structs.replace(RUN, lease=lease), 1.0)
    pair.settle()
    runs = pair.dialler.messages(RunJob)
    for run in runs:
        pair.dialler.send(AnswerChunk(run.job_id, run.lease, ["hi"]), 2.0)
    pair.settle()

    assert OPEN_MAX < SLOTS < JOBS_MAX
    assert len(runs) == SLOTS
    answered = {each.lease for each in pair.acceptor.messages(AnswerChunk)}
    assert answered == {*leases[:-1]}
    (rejected,) = pair.acceptor.messages(Rejected)
    assert rejected.lease == leases[-1]


def test_a_peer_that_may_not_submit_gets_an_error_with_the_remedy() -> None:
    local = local_coordinator("a", admission=require_token("t"))
    pair = PeerPair(local, local_worker("w"), configured=True).joined()
    request = InferenceRequest(REQUEST, inference_request().request, True)
    data = b'{"inferenceRequest":{"_0":%b}}' % msgspec.json.encode(request)

    pair.dialler.receive([data], 1.0)

    kind, payload = pair.dialler.sent_messages[-1]
    assert kind == "inferenceError"
    assert payload["code"] == "unavailable"
    assert "API" in payload["errorMessage"]
    assert not pair.dialler.messages(RunJob)


def test_an_invalid_request_is_refused() -> None:
    mac = joined_mac()

    mac.deliver(
        b'{"inferenceRequest":{"_0":{"requestID":"%b","request":5,"streaming":true}}}'
        % REQUEST.encode()
    )

    ((kind, payload),) = mac.drain()
    assert kind == "inferenceError"
    assert payload["requestID"] == REQUEST
    assert "request" in payload["errorMessage"]
    assert mac.end.notices


def test_too_many_invalid_messages_close_the_connection() -> None:
    mac = joined_mac()

    for _ in range(INVALID_MAX - 1):
        mac.deliver(b"junk!")
    mac.deliver(heartbeat())
    for _ in range(INVALID_MAX - 1):
        mac.deliver(b'{"heartbeat":5}')
    assert mac.end.closed is None
    mac.deliver(b"null")

    assert mac.end.closed == f"{INVALID_MAX} invalid messages in a row"


def test_unknown_kinds_are_ignored() -> None:
    mac = joined_mac()

    for _ in range(2 * INVALID_MAX):
        mac.deliver(b'{"groupMessage":{"_0":{"data":"AA=="}}}')

    assert (mac.end.received, mac.drain(), mac.end.closed) == ([], [], None)


def test_load_model_reports_whether_the_model_is_on_offer() -> None:
    mac = joined_mac()

    mac.deliver(LoadModel(REQUEST, "m"))
    mac.deliver(LoadModel(REQUEST, "other"))

    loaded, error = mac.drain()
    assert loaded == (
        "modelLoaded",
        {"requestID": REQUEST, "modelID": "m", "loadTimeMs": 0},
    )
    assert error[0] == "modelLoadError"
