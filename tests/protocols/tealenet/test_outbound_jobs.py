"""Jobs that are submitted to a peer, and its answers."""

from typing import Any

import pytest
from msgspec.structs import replace

from protocols.tealenet.peers import (
    MAC,
    RUN,
    ForeignPeer,
    chunk,
    encoded,
    heartbeat,
    hello,
    joined_mac,
    local_coordinator,
    submitted_request,
)
from shoal.domain.ids import LeaseNumber
from shoal.domain.outcome import Fault, Usage
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Failed,
    Rejected,
)
from shoal.domain.work import Chat
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.codec.messages import (
    ChatCompletionChunk,
    ChunkUsage,
    HeartbeatAck,
    InferenceChunk,
    InferenceComplete,
    InferenceError,
)
from shoal.protocols.tealenet.peer import (
    WAN,
    PeerDescription,
    PeerSoftware,
    TealeConnection,
)


def test_a_mac_runs_a_job_and_its_answer_is_read() -> None:
    mac = joined_mac()

    mac.send(RUN)
    ((_, payload),) = mac.drain()
    request_id = payload["requestID"]
    for text in ("Hel", "lo"):
        mac.deliver(encoded(chunk(request_id.lower(), text)))
    mac.deliver(encoded(chunk(request_id, "", finish_reason="length")))
    mac.deliver(InferenceComplete(request_id))

    assert payload["streaming"] is True
    assert mac.end.received == [
        AnswerChunk(RUN.job_id, RUN.lease, ["Hel"]),
        AnswerChunk(RUN.job_id, RUN.lease, ["lo"]),
        Completed(RUN.job_id, RUN.lease, "length"),
    ]


def test_chunks_of_one_job_in_one_batch_are_one_event() -> None:
    mac = joined_mac()
    first = submitted_request(mac)
    second = submitted_request(mac, replace(RUN, lease=LeaseNumber(4)))
    batch = [
        encoded(chunk(first, "a")),
        encoded(chunk(second, "x")),
        encoded(chunk(first, "b")),
    ]

    mac.end.receive(batch, mac.now)

    assert mac.end.received == [
        AnswerChunk(RUN.job_id, LeaseNumber(3), ["a", "b"]),
        AnswerChunk(RUN.job_id, LeaseNumber(4), ["x"]),
    ]


def test_usage_comes_from_the_chunks() -> None:
    mac = joined_mac()
    request_id = submitted_request(mac)

    mac.deliver(
        encoded(
            InferenceChunk(request_id, ChatCompletionChunk([], ChunkUsage(5, 7, 12)))
        )
    )
    mac.deliver(InferenceComplete(request_id, tokens_in=1, tokens_out=2))

    assert mac.end.received == [
        Completed(RUN.job_id, RUN.lease, "stop", Usage(5, 7)),
    ]


@pytest.mark.parametrize("texts", [(), ("Hel", "lo")])
def test_an_end_without_finish_reason_and_usage_is_a_truncated_answer(
    texts: tuple[str, ...],
) -> None:
    mac = joined_mac()
    request_id = submitted_request(mac)
    for text in texts:
        mac.deliver(encoded(chunk(request_id, text)))

    # A real node counts chunks here: these are not the usage.
    mac.deliver(InferenceComplete(request_id, tokens_out=len(texts)))

    end = mac.end.received[-1]
    assert isinstance(end, Rejected)
    assert (end.job_id, end.lease) == (RUN.job_id, RUN.lease)
    assert "without a finish reason and usage" in end.reason


def test_the_document_ends_a_whole_answer_without_finish_reason_and_usage() -> None:
    peer = joined_mac()
    request_id = submitted_request(peer)
    peer.deliver(encoded(chunk(request_id, "Hello", finish_reason=None)))

    peer.deliver(InferenceComplete(request_id))

    assert peer.end.received[-1] == Completed(RUN.job_id, RUN.lease, "stop")


@pytest.mark.parametrize("texts", [(), ("Hello",)])
def test_so_does_a_peer_that_writes_the_form_of_the_document(
    texts: tuple[str, ...],
) -> None:
    peer = ForeignPeer(local_coordinator("a"))
    peer.deliver(encode(hello(), flat=True))
    peer.deliver(encode(heartbeat(), flat=True))
    peer.drain()
    request_id = submitted_request(peer)
    for text in texts:
        peer.deliver(encoded(chunk(request_id, text)))

    peer.deliver(encode(InferenceComplete(request_id), flat=True))

    assert peer.end.received[-1] == Completed(RUN.job_id, RUN.lease, "stop")


@pytest.mark.parametrize("more", [{}, {"finish_reason": None}])
def test_an_end_with_counts_is_that_of_a_rust_node(more: dict[str, None]) -> None:
    peer = joined_mac()
    request_id = submitted_request(peer)
    peer.deliver(encoded(chunk(request_id, "Hello", **more)))

    peer.deliver(InferenceComplete(request_id, tokens_out=1))

    assert isinstance(peer.end.received[-1], Rejected)


def test_an_unstreamed_answer_has_usage_without_a_finish_reason() -> None:
    mac = joined_mac()
    request_id = submitted_request(mac)
    mac.deliver(encoded(chunk(request_id, "Hello")))
    usage = ChatCompletionChunk([], ChunkUsage(5, 7, 12))
    mac.deliver(encoded(InferenceChunk(request_id, usage)))

    mac.deliver(InferenceComplete(request_id))

    completed = Completed(RUN.job_id, RUN.lease, "stop", Usage(5, 7))
    assert mac.end.received[-1] == completed


@pytest.mark.parametrize(
    ("code", "started", "rejected"),
    [
        ("queue_full", False, True),
        ("unavailable", True, True),
        ("model_not_loaded", False, True),
        (None, False, True),
        (None, True, False),
        ("timeout", False, False),
        ("something new", False, False),
    ],
)
def test_an_error_before_the_start_is_a_rejection(
    code: str | None, started: bool, rejected: bool
) -> None:
    mac = joined_mac()
    request_id = submitted_request(mac)
    if started:
        mac.deliver(encoded(chunk(request_id, "a")))

    mac.deliver(InferenceError(request_id, "the reason", code))

    kind: Any = Rejected if rejected else Failed
    assert mac.end.received[-1] == kind(RUN.job_id, RUN.lease, "the reason")


@pytest.mark.parametrize("started", [False, True])
def test_a_job_whose_model_server_failed_may_be_done_by_another_worker(
    started: bool,
) -> None:
    mac = joined_mac()
    request_id = submitted_request(mac)
    if started:
        mac.deliver(encoded(chunk(request_id, "a")))

    mac.deliver(InferenceError(request_id, "backend request failed", "internal_error"))

    rejected = Rejected(RUN.job_id, RUN.lease, "the node's model server failed")
    assert mac.end.received[-1] == rejected


def test_a_job_that_the_model_server_refuses_is_the_clients_error() -> None:
    mac = joined_mac()
    request_id = submitted_request(mac)
    body = '{"error":{"code":400,"message":"temperature: not a number"}}'

    refused = f"backend returned 400 Bad Request: {body}"
    mac.deliver(InferenceError(request_id, refused, "internal_error"))

    assert mac.end.received == [
        Failed(RUN.job_id, RUN.lease, "temperature: not a number", Fault.REQUEST)
    ]


def test_addresses_in_the_error_of_a_peer_are_not_passed_on() -> None:
    mac = joined_mac()
    request_id = submitted_request(mac)

    text = "no answer of http://127.0.0.1:8080/v1 about /Users/ann/models/m.gguf"
    mac.deliver(InferenceError(request_id, text, "timeout"))

    failed = Failed(RUN.job_id, RUN.lease, "no answer of … about …")
    assert mac.end.received == [failed]


def test_the_end_of_a_job_that_a_mac_cannot_cancel_is_reported() -> None:
    mac = joined_mac()
    request_id = submitted_request(mac)

    mac.send(CancelJob(RUN.job_id, RUN.lease))
    assert mac.drain() == []  # a Mac has no such message
    mac.deliver(encoded(chunk(request_id, "late", finish_reason="stop")))
    mac.deliver(InferenceComplete(request_id))
    mac.deliver(InferenceError(request_id, "late"))

    # Until then the job keeps its slot.
    assert mac.end.received[-1] == Completed(RUN.job_id, RUN.lease)


def rust_node() -> ForeignPeer:
    """Return a node of a relay that has introduced itself there, with one model."""
    connection = TealeConnection(
        True,
        name="ab" * 32,
        software=PeerSoftware.RUST,
        description=PeerDescription(models=("m",)),
    )
    rust = ForeignPeer(local_coordinator("a"), profile=WAN, connection=connection)
    rust.drain()  # the first heartbeat
    rust.end.received.clear()
    return rust


def heartbeat_ack(*, busy: bool = False) -> HeartbeatAck:
    return HeartbeatAck(MAC, 0.0, "nominal", 100, ("m",), busy, 0)


def test_a_request_that_an_idle_node_dropped_is_rejected() -> None:
    rust = rust_node()
    submitted_request(rust)

    rust.deliver(heartbeat_ack())  # to the heartbeat before the request
    rust.wait(WAN.heartbeat_interval)
    assert rust.end.received == []
    rust.deliver(heartbeat_ack())

    (rejected,) = rust.end.received
    assert isinstance(rejected, Rejected)
    assert "is idle" in rejected.reason


def test_a_request_that_a_node_is_working_on_is_not_taken_for_dropped() -> None:
    rust, mac = rust_node(), joined_mac()
    for peer in (rust, mac):
        submitted_request(peer)
        peer.deliver(heartbeat_ack(busy=peer is rust))
        peer.wait(WAN.heartbeat_interval)
        peer.deliver(heartbeat_ack(busy=peer is rust))

    assert rust.end.received == mac.end.received == []


def test_an_invalid_answer_ends_its_job() -> None:
    mac = joined_mac()
    first = submitted_request(mac)
    second = submitted_request(mac, replace(RUN, lease=LeaseNumber(4)))
    mac.deliver(encoded(chunk(second, "a")))
    bad = b'{"inferenceChunk":{"_0":{"requestID":"%b","chunk":5}}}'

    for request_id in (first, second):
        mac.deliver(bad % request_id.encode())

    _, rejected, failed = mac.end.received
    assert isinstance(rejected, Rejected)
    assert rejected.lease == 3
    assert isinstance(failed, Failed)
    assert failed.lease == 4


def test_an_oversized_request_is_rejected() -> None:
    mac = joined_mac()
    large = Chat("m", ({"role": "user", "content": "x" * (5 << 20)},))

    mac.send(replace(RUN, work=large))
    assert mac.drain() == []
    mac.wait(0.0)

    ((rejected),) = mac.end.received
    assert isinstance(rejected, Rejected)
    assert "exceeds the limit of 4194304" in rejected.reason
