"""Payloads of frame types that upstream does not send."""

from hashlib import sha256

import msgspec
import numpy as np
import pytest

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.codec.reserved_frames import (
    SMALL_PAYLOAD_MAX,
    Barrier,
    HeartbeatPayload,
    TensorLabel,
    decode_barrier,
    decode_blob,
    decode_heartbeat,
    decode_tensor,
    encode_barrier,
    encode_heartbeat,
    encode_tensor,
)


def test_heartbeats_and_barriers_round_trip() -> None:
    assert decode_heartbeat(
        encode_heartbeat(HeartbeatPayload(7, 6))
    ) == HeartbeatPayload(7, 6)
    barrier = Barrier("epoch", 3, 1, passed=True)
    assert decode_barrier(encode_barrier(barrier)) == barrier


def test_an_empty_heartbeat_is_valid() -> None:
    assert decode_heartbeat(b"") == HeartbeatPayload(0)


def test_labelled_arrays_are_not_copied() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)

    head, numbers = encode_tensor(TensorLabel("layers.0", 5), array)
    buffer = bytearray(head + numbers)
    label, again = decode_tensor(buffer)

    assert label == TensorLabel("layers.0", 5)
    assert np.array_equal(again, array)
    again[0, 0] = 7.0
    assert buffer[len(head) :] == again.tobytes()


def test_a_blob_must_match_its_digest() -> None:
    digest = sha256(b"blob").digest()

    for said, check in ((digest, True), (bytes(32), False)):
        read, blob = decode_blob(said + b"blob", check=check)
        assert (read, bytes(blob)) == (said, b"blob")
    with pytest.raises(PeerError, match="does not match its digest"):
        decode_blob(bytes(32) + b"blob")
    with pytest.raises(PeerError, match="has no digest"):
        decode_blob(bytes(31))


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"\x90",
        msgspec.msgpack.encode([-1]),
        msgspec.msgpack.encode(["x" * 300, 1, 1]),
        msgspec.msgpack.encode(["x", 1, 2**60]),
        b"\0",
        b"\0\x01",
        b"\xff\xff\x92",
        b"\0\x03\x92\xa1x\x01\0",
        bytes(SMALL_PAYLOAD_MAX + 1),
    ],
)
def test_malformed_reserved_frames_are_rejected(data: bytes) -> None:
    for read in (decode_heartbeat, decode_barrier, decode_tensor):
        with pytest.raises(PeerError):
            read(data)
