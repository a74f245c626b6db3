"""What we ask a peer for, and what it says of that."""

from dataclasses import replace
from typing import Any

import pytest

from protocols.tealenet.peers import (
    RUN,
    PeerPair,
    chunk,
    coordinator_side,
    encoded,
    met_mac,
    submitted_request,
    worker_side,
)
from shoal.domain.ids import LeaseNumber
from shoal.domain.outcome import AnswerPiece, Delta, Usage
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Failed,
    Rejected,
    RunJob,
)
from shoal.domain.work import Chat
from shoal.protocols.tealenet.codec.messages import (
    ChatCompletionChunk,
    ChunkUsage,
    InferenceChunk,
    InferenceComplete,
    InferenceError,
)


def test_a_mac_runs_a_job_and_its_answer_is_read() -> None:
    mac = met_mac()

    mac.send(RUN)
    ((_, payload),) = mac.said
    request_id = payload["requestID"]
    for text in ("Hel", "lo"):
        mac.say(encoded(chunk(request_id.lower(), text)))
    mac.say(encoded(chunk(request_id, "", finish_reason="length")))
    mac.say(InferenceComplete(request_id))

    assert payload["streaming"] is True
    assert "shoal" not in payload
    assert mac.end.heard == [
        AnswerChunk(RUN.job_id, RUN.lease, ["Hel"]),
        AnswerChunk(RUN.job_id, RUN.lease, ["lo"]),
        Completed(RUN.job_id, RUN.lease, "length"),
    ]


def test_what_came_of_one_job_in_one_read_is_one_event() -> None:
    mac = met_mac()
    first = submitted_request(mac)
    second = submitted_request(mac, replace(RUN, lease=LeaseNumber(4)))
    batch = [
        encoded(chunk(first, "a")),
        encoded(chunk(second, "x")),
        encoded(chunk(first, "b")),
    ]

    mac.end.take(mac.end.conversation.receive(batch, mac.now))

    assert mac.end.heard == [
        AnswerChunk(RUN.job_id, LeaseNumber(3), ["a", "b"]),
        AnswerChunk(RUN.job_id, LeaseNumber(4), ["x"]),
    ]


def test_the_usage_of_a_chunk_counts_and_not_the_count_of_chunks() -> None:
    mac = met_mac()
    request_id = submitted_request(mac)

    mac.say(
        encoded(
            InferenceChunk(request_id, ChatCompletionChunk([], ChunkUsage(5, 7, 12)))
        )
    )
    mac.say(InferenceComplete(request_id, tokens_in=1, tokens_out=2))

    assert mac.end.heard == [
        Completed(RUN.job_id, RUN.lease, "stop", Usage(5, 7)),
    ]


@pytest.mark.parametrize(
    ("code", "begun", "again"),
    [
        ("queue_full", False, True),
        ("unavailable", True, True),
        ("model_not_loaded", False, True),
        (None, False, True),
        (None, True, False),
        ("internal_error", False, False),
        ("timeout", False, False),
        ("something new", False, False),
    ],
)
def test_another_peer_is_tried_where_this_one_did_not_begin(
    code: str | None, begun: bool, again: bool
) -> None:
    mac = met_mac()
    request_id = submitted_request(mac)
    if begun:
        mac.say(encoded(chunk(request_id, "a")))

    mac.say(InferenceError(request_id, "it says why", code))

    kind: Any = Rejected if again else Failed
    assert mac.end.heard[-1] == kind(RUN.job_id, RUN.lease, "it says why")


def test_a_macs_messages_about_a_cancelled_job_are_ignored() -> None:
    mac = met_mac()
    request_id = submitted_request(mac)

    mac.send(CancelJob(RUN.job_id, RUN.lease))
    assert mac.said == []  # it knows no such message
    mac.say(encoded(chunk(request_id, "late")))
    mac.say(InferenceComplete(request_id))
    mac.say(InferenceError(request_id, "late"))

    assert mac.end.heard == []


def test_an_answer_that_cannot_be_read_ends_its_job() -> None:
    mac = met_mac()
    first = submitted_request(mac)
    second = submitted_request(mac, replace(RUN, lease=LeaseNumber(4)))
    mac.say(encoded(chunk(second, "a")))
    bad = b'{"inferenceChunk":{"_0":{"requestID":"%b","chunk":5}}}'

    for request_id in (first, second):
        mac.say(bad % request_id.encode())

    _, rejected, failed = mac.end.heard
    assert isinstance(rejected, Rejected)
    assert rejected.lease == 3
    assert isinstance(failed, Failed)
    assert failed.lease == 4


def test_a_request_that_is_too_large_goes_to_another_peer() -> None:
    mac = met_mac()
    large = Chat("m", ({"role": "user", "content": "x" * (5 << 20)},))

    mac.send(replace(RUN, work=large))
    assert mac.said == []
    mac.wait(0.0)

    ((rejected),) = mac.end.heard
    assert isinstance(rejected, Rejected)
    assert "exceeds the limit of 4194304" in rejected.reason


def test_a_shoal_worker_accepts_larger_requests() -> None:
    two = PeerPair(worker_side("w"), coordinator_side("a")).settle()
    large = Chat("m", ({"role": "user", "content": "x" * (5 << 20)},))

    two.acceptor.take(two.acceptor.conversation.send(replace(RUN, work=large), 1.0))
    two.settle()

    assert [run.work for run in two.dialler.of(RunJob)] == [large]


def test_pieces_that_are_more_than_text_stay_that_however_alike_they_are() -> None:
    two = PeerPair(worker_side("w"), coordinator_side("a")).settle()
    two.acceptor.take(two.acceptor.conversation.send(RUN, 1.0))
    two.settle()
    (run,) = two.dialler.of(RunJob)
    said: list[AnswerPiece] = [Delta(1, {"reasoning_content": "", "content": "0"})] * 3

    for piece in said:
        progress = AnswerChunk(run.job_id, run.lease, [piece])
        two.dialler.take(two.dialler.conversation.send(progress, 2.0))
        two.settle()

    assert [x for each in two.acceptor.of(AnswerChunk) for x in each.pieces] == said
