"""Payloads of the types of frames that real peers never send."""

from hashlib import sha256

import msgspec
import numpy as np
import pytest

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.wire.beyond import (
    PAYLOAD_SMALL,
    Barrier,
    Beat,
    Label,
    read_barrier,
    read_beat,
    read_blob,
    read_tensor,
    write_barrier,
    write_beat,
    write_tensor,
)


def test_heartbeats_and_barriers_are_read_as_they_were_written() -> None:
    assert read_beat(write_beat(Beat(7, 6))) == Beat(7, 6)
    barrier = Barrier("epoch", 3, 1, passed=True)
    assert read_barrier(write_barrier(barrier)) == barrier


def test_an_empty_heartbeat_is_one() -> None:
    assert read_beat(b"") == Beat(0)


def test_arrays_are_read_with_their_label_and_not_copied() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)

    head, numbers = write_tensor(Label("layers.0", 5), array)
    buffer = bytearray(head + numbers)
    label, again = read_tensor(buffer)

    assert label == Label("layers.0", 5)
    assert np.array_equal(again, array)
    again[0, 0] = 7.0
    assert buffer[len(head) :] == again.tobytes()


def test_a_blob_is_what_its_digest_says() -> None:
    digest = sha256(b"blob").digest()

    for said, check in ((digest, True), (bytes(32), False)):
        read, blob = read_blob(said + b"blob", check=check)
        assert (read, bytes(blob)) == (said, b"blob")
    with pytest.raises(PeerError, match="is not what its digest says"):
        read_blob(bytes(32) + b"blob")
    with pytest.raises(PeerError, match="has no digest"):
        read_blob(bytes(31))


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
        bytes(PAYLOAD_SMALL + 1),
    ],
)
def test_what_is_none_of_these_is_refused(data: bytes) -> None:
    for read in (read_beat, read_barrier, read_tensor):
        with pytest.raises(PeerError):
            read(data)
