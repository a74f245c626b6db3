"""Connections on the local network: bytes in, messages out."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.tealenet.peers import (
    OFFER,
    chunk,
    encoded,
    heartbeat,
    hello,
    local_coordinator,
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
    ToPeer,
)
from shoal.protocols.seam.session import Close, Data, Notice, Send
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.connections import PEER_NAME, lan_session
from shoal.protocols.tealenet.handshake import DeviceConnections
from shoal.protocols.tealenet.peer import LAN, TealeConnection


def framed(*messages: bytes) -> bytes:
    return b"".join(LENGTH.pack(len(each)) + each for each in messages)


GREETING = framed(encode(hello()), encode(heartbeat()))


ACCEPTED = TealeConnection(dialled=False)


def new_session(connection: TealeConnection = ACCEPTED) -> PeerSession:
    local = local_coordinator("a", offers=(OFFER,))
    session = lan_session(
        local, connection, DeviceConnections(local.device_id, LAN.disconnected_after)
    )
    session.tick(0.0)
    return session


def joined_session() -> PeerSession:
    session = new_session()
    session.receive([framed(encode(hello()))], 0.0)
    session.tick(0.2)
    session.receive([framed(encode(heartbeat()))], 0.2)
    return session


def messages(outputs: Sequence[object]) -> list[Any]:
    return [each.message for each in outputs if isinstance(each, PeerMessage)]


@recorded("lan_stream")
def test_recorded_streams_are_read(case: Case) -> None:
    """Messages that real peers drop are dropped; a stalled stream is closed."""
    session = joined_session()
    received: list[object] = []
    closed = False
    try:
        for data in case["reads_hex"]:
            outputs = session.receive([bytes.fromhex(data)], 0.3)
            closed = closed or any(isinstance(each, Close) for each in outputs)
            received += messages(outputs)
    except PeerError:
        closed = True

    queries = sum("modelQuery" in message for message in case["messages"])
    assert received == [ModelQuery("m")] * queries
    # The transport detects the end of a stream.
    assert closed is (case["after"] == "closed" and not case.get("eof", False))


def test_an_invalid_frame_gives_a_notice_only() -> None:
    session = joined_session()

    outputs = session.receive(
        [framed(b"junk!", b'{"modelQuery":{"_0":{"modelID":"m"}}}')], 0.3
    )

    assert messages(outputs) == [ModelQuery("m")]
    assert [type(each) for each in outputs] == [Notice, PeerMessage]


@pytest.mark.parametrize("size", [LAN.message_max + 1, 0xFFFFFFFF])
def test_an_oversized_frame_is_refused_by_its_length(size: int) -> None:
    session = joined_session()

    with pytest.raises(PeerError, match="exceeds the limit of 4194304"):
        session.receive([LENGTH.pack(size) + b"{"], 0.3)


@given(cuts=st.lists(st.integers(0, len(GREETING)), max_size=8))
def test_any_split_of_the_bytes_gives_the_same_messages(cuts: list[int]) -> None:
    session = new_session()
    marks = [0, *sorted(cuts), len(GREETING)]
    received: list[object] = []

    for start, end in pairwise(marks):
        received += messages(session.receive([GREETING[start:end]], 0.0))
        received += messages(session.tick(0.2))

    # The first heartbeat came before the helloAck, and does not count.
    received += messages(session.receive([framed(encode(heartbeat()))], 0.3))
    assert isinstance(received[0], PeerJoined)


@given(data=st.lists(st.binary(max_size=40), max_size=4))
def test_garbage_raises_only_peer_error(data: list[Data]) -> None:
    for session in (
        new_session(),
        new_session(TealeConnection(True)),
        joined_session(),
    ):
        try:
            outputs = session.receive(data, 0.3)
        except PeerError:
            continue
        assert not [each for each in outputs if isinstance(each, str)]


def test_state_for_all_peers_and_messages_for_one_are_sent() -> None:
    session = joined_session()

    for peer in ("", PEER_NAME):
        (sent,) = session.send(ToPeer(peer, ModelQuery("m")), 0.3)
        assert isinstance(sent, Send)


def test_nothing_follows_a_close() -> None:
    session = joined_session()

    outputs = session.send(ToPeer(PEER_NAME, Dismiss("go")), 1.0)

    assert isinstance(outputs[-1], Close)
    assert session.deadline is None
    assert list(session.receive([GREETING], 1.0)) == []
    assert list(session.tick(1e6)) == []
    assert list(session.send(ToPeer(PEER_NAME, ModelQuery("m")), 2.0)) == []


def test_chunks_of_unknown_requests_are_dropped() -> None:
    session = joined_session()
    late = framed(encoded(chunk("AAAAAAAA-0000-4000-8000-00000000FFFF", "x")))

    for _ in range(10_000):
        outputs = session.receive([late], 0.3)
        assert list(outputs) == []
