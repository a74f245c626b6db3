"""Frames as upstream encodes, accepts and rejects them."""

import runpy
import struct
import sys
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from protocols.macfleet.recorded import Case, recorded
from shoal.domain.errors import LimitExceeded, PeerError, TooLarge
from shoal.protocols.macfleet.codec import frames
from shoal.protocols.macfleet.codec.frames import (
    PAYLOAD_MAX,
    START_SIZE,
    Frame,
    FrameReader,
    FrameType,
    crc32,
    encode_frame,
    frame_header,
)
from shoal.protocols.seam.framing import FramedMessage

frame_values = st.builds(
    Frame,
    st.sampled_from(FrameType),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=100),
    st.just(0),
)


def read(reader: FrameReader, stream: bytes) -> list[Frame]:
    return [reader.read(whole) for whole in reader.split(stream)]


@recorded("frame")
def test_frames_are_encoded_as_upstream_does(case: Case) -> None:
    given_, payload = case["input"], bytes.fromhex(case["input"]["payload_hex"])
    frame = Frame(
        FrameType(given_["msg_type"]),
        given_["stream_id"],
        given_["flags"],
        given_["sequence"],
        payload,
    )

    assert encode_frame(frame).hex() == case["expect"]["wire_hex"]
    assert crc32(payload) == case["expect"]["crc32"]
    assert read(FrameReader(), encode_frame(frame)) == [frame]


@recorded("crc32")
def test_checksums_equal_those_of_upstream(case: Case) -> None:
    data = case["input"]["payload_hex"]
    payload = b"\x5a" * case["expect"]["size"] if data is None else bytes.fromhex(data)

    assert len(payload) == case["expect"]["size"]
    assert f"{crc32(payload):08x}" == case["expect"]["crc32_hex"]


@recorded("frame_decode")
def test_frames_that_upstream_accepts_are_accepted(case: Case) -> None:
    stream, expected = bytes.fromhex(case["input"]["wire_hex"]), case["expect"]
    reader = FrameReader()

    if expected.get("error") in ("error", "IncompleteReadError") or (
        "truncated" in case["name"]
    ):
        assert not [*reader.split(stream)]  # the link handles an incomplete end
    elif "error" in expected:
        with pytest.raises(PeerError):
            read(reader, stream)
    else:
        (frame,) = read(reader, stream)
        accepted = expected["accepted"]
        assert frame == (
            accepted["msg_type"],
            accepted["stream_id"],
            accepted["flags"],
            accepted["sequence"],
            bytes.fromhex(accepted["payload_hex"]),
            0,
        )


@settings(max_examples=examples(0.4))
@given(st.lists(frame_values, max_size=6), st.data())
def test_frames_are_parsed_from_any_split(
    said: list[Frame], data: st.DataObject
) -> None:
    stream = b"".join(map(encode_frame, said))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = FrameReader()

    heard = [
        frame
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for frame in read(reader, stream[begin:end])
    ]

    assert heard == said


def test_a_payload_is_rejected_by_its_header() -> None:
    reader = FrameReader(limit=100)
    head = frame_header(FrameType.TASK, bytes(101))

    with pytest.raises(LimitExceeded):
        reader.body_size(head)
    reader.limit = 101
    assert reader.body_size(head) == 101


def test_only_the_start_of_a_large_frame_is_kept_where_that_is_allowed() -> None:
    payload = bytes(range(256)) * (START_SIZE // 256 + 2)
    large = encode_frame(Frame(FrameType.RESULT, 1, 0, 0, payload))
    small = encode_frame(Frame(FrameType.RESULT, 1, 0, 0, b"small"))
    stream = large + small + large + small

    for step in (1, 7, START_SIZE, 24 + START_SIZE, len(large) + 1, len(stream)):
        reader = FrameReader(limit=START_SIZE + 1)
        reader.truncated = frozenset({FrameType.RESULT})
        found = [
            frame
            for at in range(0, len(stream), step)
            for frame in read(reader, stream[at : at + step])
        ]

        assert [bytes(each.payload) for each in found] == [
            *(payload[:START_SIZE], b"small") * 2
        ]
        dropped = len(payload) - START_SIZE
        assert [each.dropped for each in found] == [dropped, 0, dropped, 0]


def test_the_checksum_of_a_truncated_frame_covers_all_of_it() -> None:
    frame = bytearray(encode_frame(Frame(FrameType.RESULT, 1, 0, 0, bytes(10_000))))
    frame[-1] ^= 1
    reader = FrameReader(limit=100)
    reader.truncated = frozenset({FrameType.RESULT})

    with pytest.raises(PeerError, match="fails its CRC32"):
        read(reader, bytes(frame))


@pytest.mark.parametrize(
    ("begin", "said"),
    [(b"HTTP/1.1 400 Bad Request", "HTTP"), (b"\x16\x03\x01" + bytes(21), "TLS")],
)
def test_other_protocols_are_named(begin: bytes, said: str) -> None:
    with pytest.raises(PeerError, match=said):
        FrameReader().body_size(begin[:24])


def test_the_checksum_computed_by_a_link_is_used() -> None:
    frame = encode_frame(Frame(FrameType.TASK, 1, 0, 0, b"hello"))
    head, body = frame[:24], memoryview(frame)[24:]
    reader = FrameReader()

    computed = reader.checksum(body[3:], reader.checksum(body[:3], 0))

    assert reader.read(FramedMessage(head, body, computed)).payload == b"hello"
    with pytest.raises(PeerError, match="fails its CRC32"):
        reader.read(FramedMessage(head, body, computed ^ 1))


def test_frames_are_the_same_without_isal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal", None)
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)

    without = runpy.run_path(frames.__file__)

    assert without["crc32"] is zlib.crc32
    assert crc32 is not zlib.crc32
    frame = Frame(FrameType.TASK, 1, 2, 3, b"123456789")
    assert without["encode_frame"](frame) == encode_frame(frame)


def test_payloads_read_by_a_link_are_not_copied() -> None:
    buffer = bytearray(b"hello")
    head = frame_header(FrameType.TASK, buffer)

    frame = FrameReader().read(FramedMessage(head, memoryview(buffer)))

    assert isinstance(frame.payload, memoryview)
    assert frame.payload.obj is buffer


def test_frames_too_large_for_upstream_are_not_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "PAYLOAD_MAX", 4)

    with pytest.raises(TooLarge, match="split it"):
        frame_header(FrameType.TASK, b"12345")


def test_the_limit_is_that_of_upstream() -> None:
    head = struct.pack("!IHHIIII", 1, 8, 0, PAYLOAD_MAX, 0, 0, 0)

    assert FrameReader().body_size(head) == 268_435_456
