"""The session between two peers, over any transport."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.profiles import examples
from protocols.contexts import require_token
from protocols.tealenet.peers import (
    MAC,
    OFFER,
    REQUEST,
    RUN,
    ForeignPeer,
    PeerPair,
    chunk,
    encoded,
    inference_request,
    joined_mac,
    local_coordinator,
    local_worker,
    submitted_request,
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
    ReceiptSent,
    Rejected,
    RunJob,
)
from shoal.domain.work import Embedding, Task, Work
from shoal.protocols.seam.peer_session import PeerJoined, PeerRefused, Protection
from shoal.protocols.tealenet.codec.messages import HeartbeatAck
from shoal.protocols.tealenet.peer import (
    LAN,
    WAN,
    PeerDescription,
    PeerSoftware,
    TealeConnection,
)


def test_many_jobs_run_concurrently_in_both_directions() -> None:
    pair = PeerPair(
        local_coordinator("a", offers=(OFFER,)), local_coordinator("b", offers=(OFFER,))
    ).joined()
    ends = (pair.dialler, pair.acceptor)
    for number in range(20):
        for end in ends:
            run = replace(RUN, job_id=JobId(f"job{number}"))
            end.send(run, 1.0)
    pair.settle()

    for turn in range(3):
        for end in ends:
            for run in end.messages(RunJob):
                pieces: list[AnswerPiece] = [f"{turn}"]
                progress = AnswerChunk(run.job_id, run.lease, pieces)
                end.send(progress, 2.0)
    for end in ends:
        for run in end.messages(RunJob):
            done = Completed(run.job_id, run.lease)
            end.send(done, 2.0)
    pair.settle()

    for end in ends:
        assert len(end.messages(Completed)) == 20
        for number in range(20):
            answer = [
                piece
                for each in end.messages(AnswerChunk)
                if each.job_id == f"job{number}"
                for piece in each.pieces
            ]
            assert "".join(answer) == "012"


@pytest.mark.parametrize(
    "work",
    [Task("classify", {"input": "x", "labels": ["a"]}), Embedding("m", ("a", "b"))],
)
def test_other_work_than_chats_is_unsupported(work: Work) -> None:
    pair = PeerPair(local_worker("w"), local_coordinator("a")).joined()

    with pytest.raises(Unsupported, match=work.kind.value):
        pair.acceptor.send(replace(RUN, work=work), 1.0)


def test_an_oversized_piece_ends_the_job_at_both_ends() -> None:
    pair = PeerPair(local_worker("w"), local_coordinator("a")).joined()
    pair.acceptor.send(RUN, 1.0)
    pair.settle()
    (run,) = pair.dialler.messages(RunJob)
    oversized: list[AnswerPiece] = [Delta(0, {"content": "x" * (5 << 20)})]

    progress = AnswerChunk(run.job_id, run.lease, oversized)
    pair.dialler.send(progress, 2.0)
    pair.until(2.5)

    assert pair.acceptor.messages(Rejected)
    assert pair.dialler.messages(CancelJob) == [CancelJob(run.job_id, run.lease)]


SHARED: list[ModelMessage] = [
    ModelQuery("org/name"),
    ModelAnswer("org/name", True, 5),
    ModelAnswer("org/name", False, 0),
    ModelRequest(REQUEST, "org/name"),
    ModelChunk(REQUEST, "a.gguf", 1 << 40, b"\x00\xff", True),
    ModelDone(REQUEST, "org/name"),
]


@pytest.mark.parametrize("message", SHARED, ids=lambda message: type(message).__name__)
def test_model_messages_arrive_in_both_directions(message: ModelMessage) -> None:
    pair = PeerPair(local_worker("w"), local_coordinator("a")).joined()

    for end in (pair.dialler, pair.acceptor):
        end.send(message, 1.0)
    pair.settle()

    for end in (pair.dialler, pair.acceptor):
        assert end.received[-1] == message


def test_unsupported_events_are_refused() -> None:
    pair = PeerPair(local_worker("w"), local_coordinator("a")).joined()
    (receipt,) = [ReceiptSent(RUN.job_id, None)]  # type: ignore[arg-type]

    with pytest.raises(Unsupported):
        pair.dialler.session.send(receipt, 1.0)


def node(software: PeerSoftware, *models: str, **given: Any) -> TealeConnection:
    return TealeConnection(
        True,
        name="ab" * 32,
        software=software,
        description=PeerDescription(models=models, **given),
        protection=Protection.TEALE,
    )


def test_a_plain_node_joins_with_the_relays_description() -> None:
    connection = node(PeerSoftware.RUST, "m", "n", context=4096)

    rust = ForeignPeer(local_coordinator("a"), profile=WAN, connection=connection)

    joined, offered = rust.end.received
    assert isinstance(joined, PeerJoined)
    assert (joined.name, joined.protection, joined.cancels) == (
        "ab" * 32,
        Protection.TEALE,
        False,
    )
    (offer,) = offered.offers  # type: ignore[union-attr]
    assert (offer.slots, offer.context, offer.models) == (1, 4096, {"m", "n"})
    assert [kind for kind, _ in rust.drain()] == ["heartbeat"]


def test_the_request_of_an_unadmitted_node_is_refused() -> None:
    local = local_coordinator("a", admission=require_token("t"))
    gateway = ForeignPeer(local, profile=WAN, connection=node(PeerSoftware.MAC))

    gateway.deliver(inference_request())

    (refused,) = gateway.end.received
    assert isinstance(refused, PeerRefused)
    assert refused.name == "ab" * 32
    ((kind, payload),) = gateway.drain()
    assert kind == "inferenceError"
    assert payload["code"] == "unavailable"
    assert "--tealenet-open" in payload["errorMessage"]


def test_models_are_not_shared_through_a_relay() -> None:
    rust = ForeignPeer(
        local_coordinator("a"), profile=WAN, connection=node(PeerSoftware.MAC, "m")
    )
    rust.end.received.clear()

    rust.deliver(b'{"modelQuery":{"_0":{"modelID":"m"}}}')

    assert rust.end.received == []
    assert ModelQuery not in rust.end.session.accepts
    with pytest.raises(Unsupported):
        rust.send(ModelQuery("m"))


def test_the_heartbeat_ack_of_a_rust_node_updates_its_offers() -> None:
    rust = ForeignPeer(
        local_coordinator("a"), profile=WAN, connection=node(PeerSoftware.RUST, "m")
    )
    rust.end.received.clear()

    rust.deliver(HeartbeatAck(MAC, 0.0, "nominal", 100, ("m", "n"), False, 0))

    (offered,) = rust.end.received
    assert [o.models for o in offered.offers] == [{"m", "n"}]  # type: ignore[union-attr]


def events_of(batches: list[list[bytes]]) -> tuple[list[object], str | None]:
    mac = joined_mac()
    submitted_request(mac)
    for batch in batches:
        mac.end.receive(batch, 1.0)
    events: list[Event] = []
    for each in mac.end.received:
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
def test_arbitrary_data_raises_nothing(data: list[bytes]) -> None:
    for dialled in (True, False):
        fresh = ForeignPeer(local_coordinator("a"), dialled=dialled)
        fresh.end.receive(data, 0.0)
    mac = joined_mac()
    mac.end.receive(data, 1.0)


@settings(max_examples=examples(0.4))
@given(cuts=st.lists(st.integers(0, 6), max_size=4))
def test_any_batching_gives_the_same_events(cuts: list[int]) -> None:
    mac = joined_mac()
    # The id is the same each time, because the random bytes are constant.
    request_id = submitted_request(mac)
    messages = [
        encoded(chunk(request_id, "a")),
        b"junk",
        encoded(chunk(request_id, "b")),
        encoded(chunk(request_id, "", finish_reason="length")),
        b'{"inferenceComplete":{"_0":{"requestID":"%b"}}}' % request_id.encode(),
    ]
    marks = sorted({0, *(min(cut, 5) for cut in cuts), 5})
    batches = [messages[a:b] for a, b in pairwise(marks)]

    assert events_of(batches) == events_of([messages])


def test_lan_limits_are_those_of_the_document() -> None:
    assert LAN.message_max == 4 << 20
    assert (LAN.heartbeat_interval, LAN.degraded_after, LAN.disconnected_after) == (
        5.0,
        15.0,
        30.0,
    )
    assert (WAN.heartbeat_interval, WAN.disconnected_after) == (15.0, 90.0)
