"""The events of a stream, however it is cut into reads."""

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import LimitExceeded
from shoal.engines import sse
from shoal.engines.sse import EventReader


# From the examples and rules of WHATWG HTML, 9.2.6.
@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: one\n\ndata: two\n\n", [b"one", b"two"]),
        (b"data: YHOO\ndata: +2\ndata: 10\n\n", [b"YHOO\n+2\n10"]),
        (b": comment\n\ndata: a\nid: 1\n\ndata:b\nid\n\n", [b"a", b"b"]),
        (b"data:  second space is kept\n\n", [b" second space is kept"]),
        (b"data\n\ndata\ndata\n\ndata:", [b"", b"\n"]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", [b"a", b"b", b"c"]),
        (b"event: add\ndata: 7\n\n", [b"7"]),
        (b"\xef\xbb\xbfdata: after the mark\n\n", [b"after the mark"]),
        (b"data: the end is missing\n", []),
        (b"<html></html>\n\n", []),
    ],
)
def test_events_are_split(stream: bytes, events: list[bytes]) -> None:
    assert EventReader().feed(stream) == events


LINES = st.sampled_from([b"data: x", b"data:", b": note", b"id: 4", b"", b"data: \xe2"])
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(
    lines=st.lists(st.tuples(LINES, ENDS), max_size=12),
    cuts=st.lists(st.integers(0, 100), max_size=8),
)
def test_events_survive_any_split(
    lines: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(line + end for line, end in lines) + b"data: last\n\n"
    whole = EventReader().feed(stream)
    edges = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})

    reader = EventReader()
    parts = [
        event
        for start, end in pairwise(edges)
        for event in reader.feed(stream[start:end])
    ]

    assert parts == whole


@pytest.mark.parametrize(
    "read", [b"data: " + b"x" * 65536 + b"\n", b"data:\n" * 65536, b"x" * 65536]
)
def test_oversized_event_is_rejected(
    monkeypatch: pytest.MonkeyPatch, read: bytes
) -> None:
    monkeypatch.setattr(sse, "EVENT_MAX", 100_000)
    reader = EventReader()
    reads = sse.EVENT_MAX // 65536 + 2

    with pytest.raises(LimitExceeded):
        deque((reader.feed(read) for _ in range(reads)), maxlen=0)
