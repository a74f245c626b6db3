"""What is said between two peers, whatever carries it."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.tealenet.peers import (
    CHAT,
    MAC,
    OFFER,
    REQUEST,
    RUN,
    ForeignPeer,
    PeerPair,
    chunk,
    coordinator_side,
    encoded,
    inference_request,
    met_mac,
    submitted_request,
    worker_side,
)
from shoal.domain.errors import Unsupported
from shoal.domain.ids import JobId
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelMessage,
    ModelQuery,
    ModelRequest,
)
from shoal.domain.outcome import AnswerPiece, Delta
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Event,
    Failed,
    ReceiptSent,
    RunJob,
)
from shoal.domain.work import Embedding, Task, Work
from shoal.protocols.seam.admission import require_token
from shoal.protocols.seam.peer_session import PeerJoined, Protection
from shoal.protocols.tealenet.codec.messages import HeartbeatAck
from shoal.protocols.tealenet.link_profile import LAN, WAN
from shoal.protocols.tealenet.peer import PeerDescription, PeerSoftware, TealeConnection


def test_many_jobs_go_on_at_once_in_both_directions() -> None:
    two = PeerPair(
        coordinator_side("a", offers=(OFFER,)), coordinator_side("b", offers=(OFFER,))
    ).settle()
    ends = (two.dialler, two.acceptor)
    for number in range(20):
        for end in ends:
            run = replace(RUN, job_id=JobId(f"job{number}"))
            end.take(end.conversation.send(run, 1.0))
    two.settle()

    for turn in range(3):
        for end in ends:
            for run in end.of(RunJob):
                pieces: list[AnswerPiece] = [f"{turn}"]
                progress = AnswerChunk(run.job_id, run.lease, pieces)
                end.take(end.conversation.send(progress, 2.0))
    for end in ends:
        for run in end.of(RunJob):
            done = Completed(run.job_id, run.lease)
            end.take(end.conversation.send(done, 2.0))
    two.settle()

    for end in ends:
        assert len(end.of(Completed)) == 20
        for number in range(20):
            said = [
                piece
                for each in end.of(AnswerChunk)
                if each.job_id == f"job{number}"
                for piece in each.pieces
            ]
            assert "".join(said) == "012"


@pytest.mark.parametrize(
    "work",
    [
        Task("classify", {"input": "x", "labels": ["a"]}),
        Embedding("m", ("a", "b")),
        replace(CHAT, options={"stop": ["x"], "odd": {"a": [1, None]}}),
    ],
)
def test_all_kinds_of_work_run_between_shoal_peers(work: Work) -> None:
    two = PeerPair(worker_side("w"), coordinator_side("a")).settle()

    two.acceptor.take(two.acceptor.conversation.send(replace(RUN, work=work), 1.0))
    two.settle()

    (run,) = two.dialler.of(RunJob)
    assert run.work == work
    assert run.lease == RUN.lease


def test_a_piece_that_is_too_large_ends_the_job_at_both_ends() -> None:
    two = PeerPair(worker_side("w"), coordinator_side("a")).settle()
    two.acceptor.take(two.acceptor.conversation.send(RUN, 1.0))
    two.settle()
    (run,) = two.dialler.of(RunJob)
    huge: list[AnswerPiece] = [Delta(0, {"content": "x" * (5 << 20)})]

    progress = AnswerChunk(run.job_id, run.lease, huge)
    two.dialler.take(two.dialler.conversation.send(progress, 2.0))
    two.until(2.5)

    (failed,) = two.acceptor.of(Failed)
    assert "exceeds the limit" in failed.error
    assert two.dialler.of(CancelJob) == [CancelJob(run.job_id, run.lease)]


SHARED: list[ModelMessage] = [
    ModelQuery("org/name"),
    ModelAnswer("org/name", True, 5),
    ModelAnswer("org/name", False),
    ModelRequest(REQUEST, "org/name"),
    ModelChunk(REQUEST, "a.gguf", 1 << 40, b"\x00\xff", True),
    ModelDone(REQUEST, "org/name"),
]


@pytest.mark.parametrize("word", SHARED, ids=lambda word: type(word).__name__)
def test_model_messages_arrive_in_both_directions(word: ModelMessage) -> None:
    two = PeerPair(worker_side("w"), coordinator_side("a")).settle()

    for end in (two.dialler, two.acceptor):
        end.take(end.conversation.send(word, 1.0))
    two.settle()

    for end in (two.dialler, two.acceptor):
        assert end.heard[-1] == word


def test_unsupported_events_are_refused() -> None:
    two = PeerPair(worker_side("w"), coordinator_side("a")).settle()
    (receipt,) = [ReceiptSent(RUN.job_id, None)]  # type: ignore[arg-type]

    with pytest.raises(Unsupported):
        two.dialler.conversation.send(receipt, 1.0)


def node(breed: PeerSoftware, *models: str, **given: Any) -> TealeConnection:
    return TealeConnection(
        True,
        name="ab" * 32,
        software=breed,
        description=PeerDescription(models=models, **given),
        protection=Protection.TEALE,
    )


def test_a_plain_node_joins_with_the_relays_description() -> None:
    caller = node(PeerSoftware.RUST, "m", slots=2, context=4096)

    rust = ForeignPeer(coordinator_side("a"), manners=WAN, caller=caller)

    met, offered = rust.end.heard
    assert isinstance(met, PeerJoined)
    assert (met.name, met.protection, met.cancels) == (
        "ab" * 32,
        Protection.TEALE,
        False,
    )
    (offer,) = offered.offers  # type: ignore[union-attr]
    assert (offer.slots, offer.context, offer.models) == (2, 4096, {"m"})
    assert [kind for kind, _ in rust.said] == ["heartbeat"]


def test_the_request_of_an_unadmitted_node_is_refused() -> None:
    own = coordinator_side("a", admission=require_token("t"))
    gateway = ForeignPeer(own, manners=WAN, caller=node(PeerSoftware.MAC))

    gateway.say(inference_request())

    assert gateway.end.heard == []
    ((kind, payload),) = gateway.said
    assert kind == "inferenceError"
    assert payload["code"] == "unavailable"
    assert "--tealenet-open" in payload["errorMessage"]


def test_models_are_not_shared_through_a_relay() -> None:
    rust = ForeignPeer(
        coordinator_side("a"), manners=WAN, caller=node(PeerSoftware.MAC, "m")
    )
    rust.end.heard.clear()

    rust.say(b'{"modelQuery":{"_0":{"modelID":"m"}}}')

    assert rust.end.heard == []
    assert ModelQuery not in rust.end.conversation.accepts
    with pytest.raises(Unsupported):
        rust.send(ModelQuery("m"))


def test_a_filled_answer_of_a_rust_node_counts() -> None:
    rust = ForeignPeer(
        coordinator_side("a"), manners=WAN, caller=node(PeerSoftware.RUST, "m")
    )
    rust.end.heard.clear()

    rust.say(HeartbeatAck(MAC, 0.0, "nominal", 100, ("m", "n"), False, 0))

    (offered,) = rust.end.heard
    assert [o.models for o in offered.offers] == [{"m"}, {"n"}]  # type: ignore[union-attr]


def heard_of(batches: list[list[bytes]]) -> tuple[list[object], str | None]:
    mac = met_mac()
    submitted_request(mac)
    for batch in batches:
        mac.end.take(mac.end.conversation.receive(batch, 1.0))
    events: list[Event] = []
    for each in mac.end.heard:
        if (
            isinstance(each, AnswerChunk)
            and events
            and isinstance(events[-1], AnswerChunk)
        ):
            events[-1].pieces.extend(each.pieces)
        else:
            events.append(each)  # type: ignore[arg-type]
    return list(events), mac.end.closed


@given(data=st.lists(st.binary(max_size=60), max_size=5))
def test_nothing_that_a_peer_sends_breaks_us(data: list[bytes]) -> None:
    for dialled in (True, False):
        fresh = ForeignPeer(coordinator_side("a"), dialled=dialled)
        fresh.end.take(fresh.end.conversation.receive(data, 0.0))
    mac = met_mac()
    mac.end.take(mac.end.conversation.receive(data, 1.0))


@given(cuts=st.lists(st.integers(0, 6), max_size=4))
def test_messages_mean_the_same_however_they_arrive_together(cuts: list[int]) -> None:
    mac = met_mac()
    request_id = submitted_request(mac)  # the same each time, for nothing is drawn
    messages = [
        encoded(chunk(request_id, "a")),
        b"junk",
        encoded(chunk(request_id, "b")),
        encoded(chunk(request_id, "", finish_reason="length")),
        b'{"inferenceComplete":{"_0":{"requestID":"%b"}}}' % request_id.encode(),
    ]
    marks = sorted({0, *(min(cut, 5) for cut in cuts), 5})
    batches = [messages[a:b] for a, b in pairwise(marks)]

    assert heard_of(batches) == heard_of([messages])


def test_lan_limits_are_those_of_the_document() -> None:
    assert LAN.message_max == 4 << 20
    assert (LAN.heartbeat_interval, LAN.degraded_after, LAN.disconnected_after) == (
        5.0,
        15.0,
        30.0,
    )
    assert (WAN.heartbeat_interval, WAN.disconnected_after) == (15.0, 90.0)
