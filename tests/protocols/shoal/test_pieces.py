"""Large messages in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.session_pair import binary, sent
from shoal.domain.errors import PeerError
from shoal.protocols.seam.session import Bulk, Send
from shoal.protocols.shoal.pieces import (
    FRAME_MAX,
    HEAD,
    LAST,
    MESSAGE_MAX,
    MORE,
    PIECE_MAX,
    WHOLE,
    PieceJoiner,
    write,
)


@given(
    st.sampled_from([0, 1, PIECE_MAX, PIECE_MAX + 1, 3 * PIECE_MAX, 3 * PIECE_MAX + 7]),
    st.booleans(),
)
def test_a_message_arrives_whole_and_small_ones_pass_it(
    size: int, in_order: bool
) -> None:
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    output = write((message[: size // 3], message[size // 3 :]), in_order=in_order)
    joiner = PieceJoiner(MESSAGE_MAX)

    frames = binary(sent([output], joined=False))
    *before, last = [joiner.receive(each) for each in frames]

    assert isinstance(output, Bulk if in_order or size > PIECE_MAX else Send)
    assert all(len(each) <= FRAME_MAX for each in frames)
    assert not any(before)
    assert last == [message]
    assert joiner.receive(b"".join((*frames, *frames))) == [message, message]


def piece(kind: int, data: bytes) -> bytes:
    return HEAD.pack(kind, len(data)) + data


def test_small_messages_may_come_between_pieces() -> None:
    joiner = PieceJoiner(MESSAGE_MAX)
    pieces = [piece(MORE, b"a"), piece(WHOLE, b"small"), piece(MORE, b"b")]

    heard = [joiner.receive(each) for each in (*pieces, piece(LAST, b"c"))]

    assert heard == [[], [b"small"], [], [b"abc"]]
    assert joiner.receive(piece(LAST, b"next")) == [b"next"]


@pytest.mark.parametrize(
    "data", ["text", b"\0", piece(WHOLE, b"cut")[:-1], piece(3, b"what")]
)
def test_what_is_no_piece_is_refused(data: bytes | str) -> None:
    with pytest.raises(PeerError):
        PieceJoiner(MESSAGE_MAX).receive(data)


def test_a_message_is_limited_however_it_is_cut() -> None:
    joiner = PieceJoiner(8)

    assert joiner.receive(piece(MORE, b"12345678")) == []
    with pytest.raises(PeerError, match="8"):
        joiner.receive(piece(MORE, b"9"))
    with pytest.raises(PeerError, match="8"):
        PieceJoiner(8).receive(piece(WHOLE, b"123456789"))
