"""Tasks and results in chunks, with other frames between them."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.codec import chunks
from shoal.protocols.macfleet.codec.chunks import CHUNK_TIMEOUT, ChunkJoiner
from shoal.protocols.macfleet.codec.frames import Frame, FrameType

TASK, RESULT = FrameType.TASK, FrameType.RESULT


def split(stream: int, payload: bytes, *, first: int = 0) -> Iterator[Frame]:
    """Cut a payload into chunks of three bytes, as the document has them."""
    pieces = [payload[at : at + 3] for at in range(0, len(payload), 3)] or [b""]
    for number, piece in enumerate(pieces, 1):
        flags = 6 if number == len(pieces) else 2
        sequence = (first + number - 1) % (1 << 32)
        yield Frame(TASK, stream, flags, sequence, piece)


def joined(joiner: ChunkJoiner, frames: list[Frame]) -> list[Frame]:
    return [whole for each in frames if (whole := joiner.join(each, 0.0)) is not None]


def test_a_frame_without_flags_is_whole() -> None:
    frame = Frame(TASK, 7, 0, 3, b"abc")

    assert ChunkJoiner().join(frame, 0.0) is frame


@pytest.mark.parametrize("size", [0, 1, 3, 4, 17])
@pytest.mark.parametrize("first", [0, 1, 0xFFFFFFFF])
def test_split_and_joined_payloads_are_equal(size: int, first: int) -> None:
    payload = bytes(range(size))

    (whole,) = joined(ChunkJoiner(), [*split(7, payload, first=first)])

    assert whole == Frame(TASK, 7, 0, 0, payload)


@settings(max_examples=examples(0.4))
@given(st.data())
def test_chunks_of_payloads_may_be_interleaved(data: st.DataObject) -> None:
    said = {stream: bytes([stream]) * (5 * stream) for stream in range(1, 6)}
    left = {stream: [*split(stream, said[stream])] for stream in said}
    joiner, heard = ChunkJoiner(), {}

    while left:
        stream = data.draw(st.sampled_from(sorted(left)))
        whole = joiner.join(left[stream].pop(0), 0.0)
        if whole is not None:
            heard[stream] = bytes(whole.payload)
            assert not left.pop(stream)

    assert heard == said


def test_a_stream_can_be_reused() -> None:
    assert len(joined(ChunkJoiner(), [*split(7, b"a"), *split(7, b"b", first=1)])) == 2


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([Frame(TASK, 7, 2, 0, b"a"), Frame(TASK, 7, 2, 2, b"a")], "expected chunk 1"),
        ([Frame(TASK, 7, 2, 0, b"a"), Frame(TASK, 7, 2, 0, b"a")], "expected chunk 1"),
        ([Frame(TASK, 7, 2, 0, b"a"), Frame(RESULT, 7, 6, 1, b"a")], r"1 \(TASK\)"),
        ([Frame(TASK, 7, 1, 0, b"a")], "a compressed TASK frame"),
        ([Frame(TASK, 7, 2, 0, b"a", 300 << 20)], "chunk of 314572801 bytes"),
    ],
)
def test_malformed_chunks_are_rejected(pieces: list[Frame], reason: str) -> None:
    joiner = ChunkJoiner()

    with pytest.raises(PeerError, match=reason):
        joined(joiner, pieces)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "BUFFERED_MAX", 5)
    monkeypatch.setattr(chunks, "STREAMS_MAX", 2)

    for streams in ((7, 7), (7, 8)):
        frames = [
            Frame(TASK, stream, 2, streams[:number].count(stream), b"abc")
            for number, stream in enumerate(streams)
        ]
        with pytest.raises(LimitExceeded, match="chunked payloads of 6 bytes"):
            joined(ChunkJoiner(), frames)
    with pytest.raises(PeerError, match="more than 2 chunked payloads"):
        joined(ChunkJoiner(), [Frame(TASK, n, 2, 0, b"") for n in (1, 2, 3)])


def test_joined_payloads_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "BUFFERED_MAX", 4)
    joiner = ChunkJoiner()

    for _ in range(3):
        assert joined(joiner, [*split(7, b"abcd")])


def test_the_first_missing_chunk_is_late() -> None:
    joiner = ChunkJoiner()
    assert joiner.deadline is None
    for stream, now in ((7, 0.0), (8, 10.0), (7, 20.0)):
        sequence = 1 if now == 20.0 else 0
        joiner.join(Frame(TASK, stream, 2, sequence, b"a"), now)

    assert joiner.deadline == 10.0 + CHUNK_TIMEOUT
    assert joiner.late_reason(9.9 + CHUNK_TIMEOUT) == ""
    assert "chunk on stream 8" in joiner.late_reason(10.0 + CHUNK_TIMEOUT)
