"""Large payloads in chunks, with other frames between them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.codec import chunks
from shoal.protocols.macfleet.codec.chunks import CHUNK_SIZE, ChunkJoiner, split_payload
from shoal.protocols.macfleet.codec.frames import Flag, Frame, FrameType, encode_header

TASK, STATE = FrameType.TASK, FrameType.STATE


def patterned(size: int) -> bytes:
    """Return bytes in which no chunk is like another."""
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def joined(joiner: ChunkJoiner, frames: list[Frame]) -> list[Frame]:
    return [whole for each in frames if (whole := joiner.add(each)) is not None]


@pytest.mark.parametrize(
    "size", [0, 1, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 5 * CHUNK_SIZE + 17]
)
def test_split_and_joined_payloads_are_equal(size: int) -> None:
    payload = patterned(size)

    pieces = [*split_payload(TASK, 7, payload)]
    (whole,) = joined(ChunkJoiner(), pieces)

    assert whole == Frame(TASK, 7, 0, 0, payload)
    assert [each.sequence for each in pieces] == [*range(len(pieces))]
    assert all(each.flags & Flag.CHUNKED for each in pieces)
    assert [bool(each.flags & Flag.LAST) for each in pieces].index(True) == (
        len(pieces) - 1
    )


def test_parts_are_split_without_joining_them() -> None:
    blob = bytearray(range(256)) * (2 * CHUNK_SIZE // 256)

    first, second, last = split_payload(STATE, 9, b"d" * 32, blob)

    assert bytes(first.payload) == b"d" * 32 + blob[: CHUNK_SIZE - 32]
    assert isinstance(second.payload, memoryview)
    assert second.payload.obj is blob
    assert [len(each.payload) for each in (first, second, last)] == [
        CHUNK_SIZE,
        CHUNK_SIZE,
        32,
    ]
    (whole,) = joined(ChunkJoiner(), [first, second, last])
    assert whole.payload == b"d" * 32 + blob


@given(st.lists(st.integers(0, 7), max_size=6))
def test_chunks_have_one_size_whatever_the_parts(sizes: list[int]) -> None:
    parts = [bytes([number]) * size for number, size in enumerate(sizes)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_SIZE", 3)
        pieces = [*split_payload(TASK, 7, *parts)]

    assert b"".join(each.payload for each in pieces) == b"".join(parts)
    assert all(len(each.payload) == 3 for each in pieces[:-1])
    assert len(pieces[-1].payload) > 0 or len(pieces) == 1


@settings(max_examples=examples(0.4))
@given(st.data())
def test_chunks_of_payloads_may_be_interleaved(data: st.DataObject) -> None:
    said = {stream: bytes([stream]) * (5 * stream) for stream in range(1, 6)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_SIZE", 10)
        left = {stream: [*split_payload(TASK, stream, said[stream])] for stream in said}
    joiner, heard = ChunkJoiner(), {}

    while left:
        stream = data.draw(st.sampled_from(sorted(left)))
        whole = joiner.add(left[stream].pop(0))
        if whole is not None:
            heard[stream] = bytes(whole.payload)
            assert not left.pop(stream)

    assert heard == said


def test_a_stream_can_be_reused() -> None:
    joiner = ChunkJoiner()

    assert (
        len(
            joined(
                joiner, [*split_payload(TASK, 7, b"a"), *split_payload(STATE, 7, b"b")]
            )
        )
        == 2
    )


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([Frame(TASK, 7, 2, 1, b"a")], "chunk 1 .* expected chunk 0"),
        ([Frame(TASK, 7, 2, 0, b"a"), Frame(TASK, 7, 2, 2, b"a")], "expected chunk 1"),
        ([Frame(TASK, 7, 2, 0, b"a"), Frame(TASK, 7, 2, 0, b"a")], "expected chunk 1"),
        ([Frame(TASK, 7, 2, 0, b"a"), Frame(STATE, 7, 6, 1, b"a")], r"1 \(TASK\)"),
    ],
)
def test_chunks_out_of_order_are_rejected(pieces: list[Frame], reason: str) -> None:
    joiner = ChunkJoiner()

    with pytest.raises(PeerError, match=reason):
        joined(joiner, pieces)


def test_memory_is_bounded() -> None:
    with pytest.raises(LimitExceeded, match="chunked payload of 6 bytes"):
        joined(
            ChunkJoiner(payload_max=5), [Frame(TASK, 7, 2, n, b"abc") for n in (0, 1)]
        )
    with pytest.raises(LimitExceeded, match="chunked payloads of 6 bytes"):
        joined(
            ChunkJoiner(buffered_max=5), [Frame(TASK, n, 2, 0, b"abc") for n in (1, 2)]
        )
    with pytest.raises(PeerError, match="more than 2 chunked payloads"):
        joined(
            ChunkJoiner(streams_max=2), [Frame(TASK, n, 2, 0, b"") for n in (1, 2, 3)]
        )


def test_joined_payloads_are_released() -> None:
    joiner = ChunkJoiner(buffered_max=3)

    for _ in range(3):
        assert joined(joiner, [*split_payload(TASK, 7, b"abc")])


def test_other_flags_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_SIZE", 2)

    (whole,) = joined(ChunkJoiner(), [*split_payload(TASK, 7, b"abcde", flags=1)])

    assert whole == Frame(TASK, 7, 1, 0, b"abcde")


class Placing:
    """A joiner that receives headers before the frames, as from a link."""

    def __init__(self, joiner: ChunkJoiner | None = None) -> None:
        self.joiner = joiner or ChunkJoiner()
        self.taken: list[memoryview] = []  # memory that was allocated

    def read(self, frame: Frame, left: int) -> tuple[Frame, bool]:
        """Read a frame into its buffer; say whether the joiner provided it."""
        payload = frame.payload
        size, kind, stream = len(payload), frame.type, frame.stream
        head = encode_header(kind, size, 0, stream, frame.flags, frame.sequence, left)
        place = self.joiner.buffer_for(head, self._take)
        if place is None:
            return frame, False
        place[:] = payload
        return frame._replace(payload=place), True

    def read_all(self, frames: list[Frame]) -> list[tuple[Frame, bool]]:
        left = sum(len(each.payload) for each in frames)
        read = []
        for each in frames:
            read.append(self.read(each, left))
            left -= len(each.payload)
        return read

    def _take(self, size: int) -> memoryview:
        self.taken.append(memoryview(bytearray(size)))
        return self.taken[-1]


def test_chunks_are_received_into_the_final_buffer() -> None:
    payload = patterned(2 * CHUNK_SIZE + 5)
    placing = Placing()

    read = placing.read_all([*split_payload(TASK, 7, payload)])

    assert [placed for _, placed in read] == [True] * 3
    (whole,) = joined(placing.joiner, [frame for frame, _ in read])
    (memory,) = placing.taken
    assert whole.payload is memory
    assert memory == payload


def test_chunks_received_elsewhere_are_copied() -> None:
    payload = patterned(CHUNK_SIZE + 5)
    placing = Placing()
    first, last = split_payload(TASK, 7, payload)

    read = placing.read(first, len(payload))[0]

    (whole,) = joined(placing.joiner, [read, last])
    assert whole.payload is placing.taken[0]
    assert whole.payload == payload


def test_headers_may_be_far_ahead_of_joined_chunks() -> None:
    placing = Placing()
    payloads = [bytes([number]) * (CHUNK_SIZE + 1) for number in range(3)]

    read = [
        each
        for said in payloads
        for each in placing.read_all([*split_payload(TASK, 1, said)])
    ]

    wholes = joined(placing.joiner, [frame for frame, _ in read])
    assert [bytes(whole.payload) for whole in wholes] == payloads
    assert not placing.joiner._unclaimed
    assert placing.joiner._reserved == 0


@pytest.mark.parametrize("left", [1, 3, 7, 1 << 20])
def test_memory_is_handed_out_once(left: int) -> None:
    placing = Placing()
    first, _ = placing.read(Frame(TASK, 7, 2, 0, b"abc"), 6)

    _, placed = placing.read(Frame(TASK, 7, 2, 1, b"xyz"), 6)
    _, also_placed = placing.read(Frame(TASK, 7, 2, 1, b"xyz"), left)

    assert not placed
    assert also_placed is (left == 3)
    assert bytes(placing.taken[0][:3]) == b"abc"
    assert joined(placing.joiner, [first]) == []


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (Frame(TASK, 7, 6, 1, b"xy"), "5 bytes in chunks, expected 6"),
        (Frame(TASK, 7, 2, 1, b"wxyz"), "7 bytes in chunks, expected 6"),
    ],
)
def test_a_size_other_than_announced_is_rejected(second: Frame, reason: str) -> None:
    placing = Placing()
    first, _ = placing.read(Frame(TASK, 7, 2, 0, b"abc"), 6)

    with pytest.raises(PeerError, match=reason):
        joined(placing.joiner, [first, second])


def test_a_chunk_at_another_offset_is_rejected() -> None:
    placing = Placing()
    first, _ = placing.read(Frame(TASK, 7, 2, 0, b"abc"), 9)
    elsewhere = Frame(TASK, 7, 2, 1, b"de")
    third, placed = placing.read(Frame(TASK, 7, 2, 2, b"fgh"), 6)
    assert placed

    with pytest.raises(PeerError, match="for byte 3, expected one for 5"):
        joined(placing.joiner, [first, elsewhere, third])


def test_reserved_memory_is_bounded() -> None:
    placing = Placing(ChunkJoiner(payload_max=5, buffered_max=8))

    assert not placing.read(Frame(TASK, 7, 2, 0, b"abc"), 6)[1]
    assert not placing.read(Frame(TASK, 7, 2, 0, b"abc"), 2)[1]
    assert placing.read(Frame(TASK, 8, 2, 0, b"abc"), 5)[1]
    assert not placing.read(Frame(TASK, 9, 2, 0, b"abc"), 4)[1]
    assert placing.read(Frame(TASK, 9, 2, 0, b"abc"), 3)[1]
