"""The layers between a session and a byte stream."""

import struct
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.seam.framing import LengthPrefixed
from shoal.protocols.seam.session import (
    Batch,
    Close,
    Notice,
    Output,
    Send,
    protocol_error,
)

LIMIT = 100

plain = st.binary(max_size=LIMIT).map(lambda m: b"" if m in (b"bad", b"bye") else m)


class Said(str):
    """What the session below understands."""


class Echo:
    """A session whose every message is a word; some words make it do things."""

    accepts: frozenset[type] = frozenset({Said})
    deadline: float | None = 5.0

    def receive(self, batch: Batch, now: float) -> Sequence[Said | Output]:
        outputs: list[Said | Output] = []
        for data in batch:
            assert isinstance(data, bytes)
            if data == b"bad":
                error = PeerError("a bad word")
                if not outputs:
                    raise error
                return [*outputs, protocol_error(error)]
            if data == b"bye":
                return [*outputs, Close("told to go"), Said("never seen")]
            outputs += [Said(data.decode("latin-1")), Send(data)]
        return outputs

    def send(self, message: Said, now: float) -> Sequence[Output]:
        return [Send(message.encode("latin-1")), Notice("sent")]

    def tick(self, now: float) -> Sequence[Said | Output]:
        return [Send(b"tick")]


def framed(*messages: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(m)) + m for m in messages)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Cut ``data`` at the places given, in whatever order they come."""
    ends = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in pairwise(ends)]


@given(
    messages=st.lists(plain),
    places=st.lists(st.integers(0, 10_000)),
)
def test_any_split_gives_the_same_messages(
    messages: list[bytes], places: list[int]
) -> None:
    layer = LengthPrefixed(Echo(), LIMIT)

    outputs = [
        out
        for piece in cut(framed(*messages), places)
        for out in layer.receive([piece], 0)
    ]

    assert outputs == [
        out for m in messages for out in (Said(m.decode("latin-1")), Send(framed(m)))
    ]


@given(data=st.binary(), places=st.lists(st.integers(0, 10_000)))
def test_any_bytes_are_messages_or_refused(data: bytes, places: list[int]) -> None:
    layer = LengthPrefixed(Echo(), LIMIT)

    try:
        for piece in cut(data, places):
            layer.receive([piece], 0)
    except PeerError:
        pass


def test_both_ends_agree() -> None:
    one, other = LengthPrefixed(Echo(), LIMIT), LengthPrefixed(Echo(), LIMIT)

    outputs = [*one.send(Said("hello"), 0), *one.tick(0)]
    sent = [out.data for out in outputs if isinstance(out, Send)]

    heard = [out for data in sent for out in other.receive([data], 0)]
    assert [out for out in heard if isinstance(out, Said)] == ["hello", "tick"]


def test_a_size_over_the_limit_is_refused_before_buffering() -> None:
    layer = LengthPrefixed(Echo(), LIMIT)

    with pytest.raises(LimitExceeded, match="message of 101 bytes exceeds the limit"):
        layer.receive([struct.pack(">I", LIMIT + 1)], 0)


def test_text_is_refused() -> None:
    with pytest.raises(PeerError, match="text message on a byte stream"):
        LengthPrefixed(Echo(), LIMIT).receive(["text"], 0)


def test_messages_before_an_invalid_one_are_processed() -> None:
    layer = LengthPrefixed(Echo(), LIMIT)

    outputs = layer.receive([framed(b"good", b"bad", b"good")], 0)

    assert outputs == [
        Said("good"),
        Send(framed(b"good")),
        Close("protocol error: a bad word", 1002, "a bad word"),
    ]
    assert layer.receive([framed(b"more")], 0) == ()
    assert layer.deadline is None
    with pytest.raises(PeerError, match="a bad word"):
        LengthPrefixed(Echo(), LIMIT).receive([framed(b"bad")], 0)


def test_nothing_follows_a_close() -> None:
    layer = LengthPrefixed(Echo(), LIMIT)

    layer.receive([framed(b"bye", b"more")], 0)

    assert layer.receive([framed(b"more")], 0) == ()
    assert layer.send(Said("more"), 0) == ()
    assert layer.tick(0) == ()


def test_small_reads_of_a_large_message_take_linear_time() -> None:
    size = 4 << 20
    layer = LengthPrefixed(Echo(), size)
    data = framed(b"x" * size)

    outputs = [
        out
        for at in range(0, len(data), 1024)
        for out in layer.receive([data[at : at + 1024]], 0)
    ]

    # Copying what is held at each of the 4,096 reads would move 8 GiB.
    assert len([out for out in outputs if isinstance(out, Said)]) == 1
    said = [out.data for out in outputs if isinstance(out, Send)]
    assert b"".join(each for each in said if isinstance(each, bytes)) == data


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (b"HTTP/1.1 400 Bad Request", "an HTTP response"),
        (b"GET / HTTP/1.1", "an HTTP request"),
        (b"\x16\x03\x01\x02\x00\x01", "TLS"),
    ],
)
def test_another_protocol_is_named_in_the_error(begin: bytes, said: str) -> None:
    with pytest.raises(PeerError, match=f"received {said} .*another port"):
        LengthPrefixed(Echo(), LIMIT).receive([begin], 0.0)
