"""Payloads of frame types that upstream does not send."""

from hashlib import sha256

import msgspec
import pytest

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.codec.reserved_frames import (
    SMALL_PAYLOAD_MAX,
    HeartbeatPayload,
    decode_blob,
    decode_heartbeat,
    encode_heartbeat,
)


def test_heartbeats_round_trip() -> None:
    assert decode_heartbeat(
        encode_heartbeat(HeartbeatPayload(7, 6))
    ) == HeartbeatPayload(7, 6)


def test_an_empty_heartbeat_is_valid() -> None:
    assert decode_heartbeat(b"") == HeartbeatPayload(0)


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
        msgspec.msgpack.encode([1, 2**60]),
        bytes(SMALL_PAYLOAD_MAX + 1),
    ],
)
def test_malformed_reserved_frames_are_rejected(data: bytes) -> None:
    with pytest.raises(PeerError):
        decode_heartbeat(data)
