"""The events of a stream, however it is cut into reads."""

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import LimitExceeded
from shoal.engines.streams.sse import ErrorEvent, EventReader


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
        # Beyond the standard: objects without a name, as of servers that report errors.
        (b'data: a\n\n{"error": 1}\n{"b": 2}\n', [b"a", b'{"error": 1}', b'{"b": 2}']),
        (b"error: no\n\ndata: a\n\n", [b"no", b"a"]),
    ],
)
def test_events_are_split(stream: bytes, events: list[bytes]) -> None:
    assert EventReader().feed(stream) == events


@pytest.mark.parametrize(
    ("stream", "errors"),
    [
        (b"error: no\n\ndata: a\n\n", [True, False]),
        (b"event: error\ndata: no\n\ndata: a\n\n", [True, False]),
        (b"data: no\nevent: error\n\ndata: a\n\n", [True, False]),
        (b"event: error\n\ndata: a\n\n", [True, False]),
        (b"event: message\ndata: a\n\n: error\n\ndata: error\n\n", [False, False]),
    ],
)
def test_errors_are_marked_however_they_come(stream: bytes, errors: list[bool]) -> None:
    for size in (1, len(stream), 13):  # the first line of one is a read of its own
        reader = EventReader()
        reader.feed(b"\n")
        reads = [stream[at : at + size] for at in range(0, len(stream), size)]
        events = [event for read in reads for event in reader.feed(read)]

        assert [isinstance(event, ErrorEvent) for event in events] == errors


def test_the_end_of_the_last_event_may_be_missing() -> None:
    for stream in (b"data: a\ndata: b", b"data: a\ndata: b\r", b"data: a\ndata: b\n"):
        reader = EventReader()
        reader.feed(stream)

        assert reader.flush() == [b"a\nb"]
        assert reader.flush() == []


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
def test_oversized_event_is_rejected(read: bytes) -> None:
    event_max = 100_000
    reader = EventReader(event_max)
    reads = event_max // 65536 + 2

    with pytest.raises(LimitExceeded):
        deque((reader.feed(read) for _ in range(reads)), maxlen=0)
