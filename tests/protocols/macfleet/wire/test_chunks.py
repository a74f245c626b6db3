"""Large payloads in pieces, with other frames between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.wire import chunks
from shoal.protocols.macfleet.wire.chunks import CHUNK, Joiner, split
from shoal.protocols.macfleet.wire.frames import Flag, Frame, FrameType

TASK, STATE = FrameType.TASK, FrameType.STATE


def joined(joiner: Joiner, frames: list[Frame]) -> list[Frame]:
    return [whole for each in frames if (whole := joiner.take(each)) is not None]


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 17])
def test_a_payload_survives_its_pieces(size: int) -> None:
    payload = bytes(number % 251 for number in range(size))

    pieces = [*split(TASK, 7, payload)]
    (whole,) = joined(Joiner(), pieces)

    assert whole == Frame(TASK, 7, 0, 0, payload)
    assert [each.sequence for each in pieces] == [*range(len(pieces))]
    assert all(each.flags & Flag.CHUNKED for each in pieces)
    assert [bool(each.flags & Flag.LAST) for each in pieces].index(True) == (
        len(pieces) - 1
    )


def test_parts_follow_each_other_without_being_put_together() -> None:
    blob = bytearray(CHUNK + 1)

    head, first, second = split(STATE, 9, b"d" * 32, blob)

    assert bytes(head.payload) == b"d" * 32
    assert isinstance(first.payload, memoryview)
    assert first.payload.obj is blob
    (whole,) = joined(Joiner(), [head, first, second])
    assert whole.payload == b"d" * 32 + blob


@given(st.data())
def test_payloads_may_come_among_each_other(data: st.DataObject) -> None:
    said = {stream: bytes([stream]) * (stream * CHUNK // 2) for stream in range(1, 6)}
    left = {stream: [*split(TASK, stream, said[stream])] for stream in said}
    joiner, heard = Joiner(), {}

    while left:
        stream = data.draw(st.sampled_from(sorted(left)))
        whole = joiner.take(left[stream].pop(0))
        if whole is not None:
            heard[stream] = bytes(whole.payload)
            assert not left.pop(stream)

    assert heard == said


def test_a_stream_can_be_used_again() -> None:
    joiner = Joiner()

    assert len(joined(joiner, [*split(TASK, 7, b"a"), *split(STATE, 7, b"b")])) == 2


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([Frame(TASK, 7, 2, 1, b"a")], "piece 1 .* expected piece 0"),
        ([Frame(TASK, 7, 2, 0, b"a"), Frame(TASK, 7, 2, 2, b"a")], "expected piece 1"),
        ([Frame(TASK, 7, 2, 0, b"a"), Frame(TASK, 7, 2, 0, b"a")], "expected piece 1"),
        ([Frame(TASK, 7, 2, 0, b"a"), Frame(STATE, 7, 6, 1, b"a")], r"1 \(TASK\)"),
    ],
)
def test_pieces_out_of_order_are_refused(pieces: list[Frame], reason: str) -> None:
    joiner = Joiner()

    with pytest.raises(PeerError, match=reason):
        joined(joiner, pieces)


def test_memory_is_bounded() -> None:
    with pytest.raises(LimitExceeded, match="payload in pieces of 6 bytes"):
        joined(Joiner(payload_max=5), [Frame(TASK, 7, 2, n, b"abc") for n in (0, 1)])
    with pytest.raises(LimitExceeded, match="payloads in pieces of 6 bytes"):
        joined(Joiner(held_max=5), [Frame(TASK, n, 2, 0, b"abc") for n in (1, 2)])
    with pytest.raises(PeerError, match="more than 2 payloads"):
        joined(Joiner(streams_max=2), [Frame(TASK, n, 2, 0, b"") for n in (1, 2, 3)])


def test_what_was_put_together_is_held_no_longer() -> None:
    joiner = Joiner(held_max=3)

    for _ in range(3):
        assert joined(joiner, [*split(TASK, 7, b"abc")])


def test_flags_of_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 2)

    (whole,) = joined(Joiner(), [*split(TASK, 7, b"abcde", flags=1)])

    assert whole == Frame(TASK, 7, 1, 0, b"abcde")
