"""Connections on the local network: bytes in, words out."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.tealenet.peers import (
    OFFER,
    chunk,
    coordinator_side,
    encoded,
    heartbeat,
    hello,
    worker_side,
)
from protocols.tealenet.recordings import Case, recorded
from shoal.domain.errors import PeerError
from shoal.domain.model_messages import ModelQuery
from shoal.domain.vocabulary import Dismiss
from shoal.protocols.seam.framing import LENGTH
from shoal.protocols.seam.peer_session import (
    PeerJoined,
    PeerMessage,
    PeerSession,
    Protection,
    ToPeer,
)
from shoal.protocols.seam.session import Close, Data, Notice, Send
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.connections import PEER_NAME, lan_session
from shoal.protocols.tealenet.handshake import DeviceConnections
from shoal.protocols.tealenet.link_profile import LAN
from shoal.protocols.tealenet.peer import TealeConnection


def framed(*messages: bytes) -> bytes:
    return b"".join(LENGTH.pack(len(each)) + each for each in messages)


GREETING = framed(encode(hello()), encode(heartbeat()))


ACCEPTED = TealeConnection(dialled=False)


def session(caller: TealeConnection = ACCEPTED) -> PeerSession:
    own = coordinator_side("a", offers=(OFFER,))
    made = lan_session(
        own, caller, DeviceConnections(own.device_id, LAN.disconnected_after)
    )
    made.tick(0.0)
    return made


def met() -> PeerSession:
    made = session()
    made.receive([framed(encode(hello()))], 0.0)
    made.tick(0.2)
    made.receive([framed(encode(heartbeat()))], 0.2)
    return made


def words(outputs: Sequence[object]) -> list[Any]:
    return [each.message for each in outputs if isinstance(each, PeerMessage)]


@recorded("lan_stream")
def test_a_stream_is_read_as_it_was_recorded(case: Case) -> None:
    """What real peers drop is dropped, and what would make them wait for ever ends."""
    made = met()
    heard: list[object] = []
    closed = False
    try:
        for data in case["reads_hex"]:
            outputs = made.receive([bytes.fromhex(data)], 0.3)
            closed = closed or any(isinstance(each, Close) for each in outputs)
            heard += words(outputs)
    except PeerError:
        closed = True

    queries = sum("modelQuery" in message for message in case["messages"])
    assert heard == [ModelQuery("m")] * queries
    # The end of a stream is the transport's to see.
    assert closed is (case["after"] == "closed" and not case.get("eof", False))


def test_junk_in_a_frame_is_noticed_and_the_connection_goes_on() -> None:
    made = met()

    outputs = made.receive(
        [framed(b"junk!", b'{"modelQuery":{"_0":{"modelID":"m"}}}')], 0.3
    )

    assert words(outputs) == [ModelQuery("m")]
    assert [type(each) for each in outputs] == [Notice, PeerMessage]


@pytest.mark.parametrize("size", [LAN.message_max + 1, 0xFFFFFFFF])
def test_a_frame_that_is_too_large_is_refused_before_it_is_there(size: int) -> None:
    made = met()

    with pytest.raises(PeerError, match="exceeds the limit of 4194304"):
        made.receive([LENGTH.pack(size) + b"{"], 0.3)


def test_a_worker_takes_what_its_coordinator_may_send() -> None:
    own = worker_side("w")
    made = lan_session(
        own,
        TealeConnection(True),
        DeviceConnections(own.device_id, LAN.disconnected_after),
    )
    made.tick(0.0)

    assert list(made.receive([LENGTH.pack(LAN.worker_request_max) + b"{"], 0.3)) == []
    with pytest.raises(PeerError):
        session().receive([LENGTH.pack(LAN.worker_request_max)], 0.3)


@given(cuts=st.lists(st.integers(0, len(GREETING)), max_size=8))
def test_any_split_of_the_bytes_means_the_same(cuts: list[int]) -> None:
    made = session()
    marks = [0, *sorted(cuts), len(GREETING)]
    heard: list[object] = []

    for start, end in pairwise(marks):
        heard += words(made.receive([GREETING[start:end]], 0.0))
        heard += words(made.tick(0.2))

    # The heartbeat came before our helloAck was said, and is not waited for.
    heard += words(made.receive([framed(encode(heartbeat()))], 0.3))
    assert isinstance(heard[0], PeerJoined)


@given(data=st.lists(st.binary(max_size=40), max_size=4))
def test_garbage_ends_in_nothing_worse_than_a_refusal(data: list[Data]) -> None:
    for made in (session(), session(TealeConnection(True)), met()):
        try:
            outputs = made.receive(data, 0.3)
        except PeerError:
            continue
        assert not [each for each in outputs if isinstance(each, str)]


def test_state_for_all_peers_and_messages_for_one_are_sent() -> None:
    made = met()

    for peer in ("", PEER_NAME):
        (sent,) = made.send(ToPeer(peer, ModelQuery("m")), 0.3)
        assert isinstance(sent, Send)


def test_a_session_reports_its_protection() -> None:
    made = session(TealeConnection(False, protection=Protection.TLS))
    made.receive([framed(encode(hello()))], 0.0)
    made.tick(0.2)

    (told, *_) = words(made.receive([framed(encode(heartbeat()))], 0.2))

    assert told.protection is Protection.TLS


def test_nothing_follows_a_close() -> None:
    made = met()

    outputs = made.send(ToPeer(PEER_NAME, Dismiss("go")), 1.0)

    assert isinstance(outputs[-1], Close)
    assert made.deadline is None
    assert list(made.receive([GREETING], 1.0)) == []
    assert list(made.tick(1e6)) == []
    assert list(made.send(ToPeer(PEER_NAME, ModelQuery("m")), 2.0)) == []


def test_memory_is_not_for_the_peer_to_fill() -> None:
    made = met()
    late = framed(encoded(chunk("AAAAAAAA-0000-4000-8000-00000000FFFF", "x")))

    for _ in range(10_000):
        outputs = made.receive([late], 0.3)
        assert list(outputs) == []
