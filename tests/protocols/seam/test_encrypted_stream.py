from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import PeerError
from shoal.protocols.seam.encrypted_stream import (
    PLAIN_MAX,
    PREFACE,
    RecordOpener,
    RecordSealer,
    may_be_preface,
)
from shoal.protocols.seam.framing import LENGTH
from shoal.protocols.seam.noise import Opener, Sealer

KEY = bytes(range(32))


def sealed(*pieces: bytes) -> bytes:
    sealer = RecordSealer(Sealer(KEY))
    return b"".join(map(sealer.seal, pieces))


def opened(stream: bytes, sizes: list[int]) -> bytes:
    """Read a stream in pieces of these sizes, and then the rest."""
    opener, at, plain = RecordOpener(Opener(KEY)), 0, b""
    for size in sizes:
        plain += opener.open(stream[at : at + size])
        at += size
    return plain + opener.open(stream[at:])


@given(
    st.lists(st.binary(min_size=1, max_size=300), max_size=8),
    st.lists(st.integers(0, 200), max_size=30),
)
def test_any_split_of_the_stream_gives_the_same_bytes(
    pieces: list[bytes], sizes: list[int]
) -> None:
    assert opened(sealed(*pieces), sizes) == b"".join(pieces)


@pytest.mark.parametrize("size", [PLAIN_MAX - 1, PLAIN_MAX, PLAIN_MAX + 1, 300_000])
def test_a_large_body_is_cut_into_records(size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]

    stream = sealed(body)

    assert opened(stream, [1, 70_000]) == body
    records = -(-size // PLAIN_MAX)
    assert len(stream) == size + records * 18


def test_a_changed_byte_ends_the_stream() -> None:
    stream = sealed(b"hello", b"world")

    for at in range(2, len(stream)):
        changed = bytearray(stream)
        changed[at] ^= 1
        with_more = bytes(changed) + bytes(1 << 16)  # a larger size waits for more
        with pytest.raises(PeerError, match="not genuine"):
            RecordOpener(Opener(KEY)).open(with_more)


def test_repeated_reordered_and_missing_records_end_the_stream() -> None:
    sealer = RecordSealer(Sealer(KEY))
    one, two, three = (sealer.seal(each) for each in (b"one", b"two", b"three"))

    for stream in (one + one, two + one, one + three):
        with pytest.raises(PeerError, match="not genuine"):
            RecordOpener(Opener(KEY)).open(stream)


def test_the_other_direction_has_another_key() -> None:
    with pytest.raises(PeerError, match="not genuine"):
        RecordOpener(Opener(bytes(32))).open(sealed(b"reflected"))


@given(st.binary(max_size=200))
def test_garbage_gives_nothing_or_an_error(data: bytes) -> None:
    with suppress(PeerError):
        assert RecordOpener(Opener(KEY)).open(data) == b""


def test_the_preface_is_recognised_by_its_first_bytes_and_no_length() -> None:
    for size in range(len(PREFACE) + 1):
        assert may_be_preface(PREFACE[:size])
    assert may_be_preface(PREFACE + b"more")
    for other in (b"GET /", b"\x16\x03\x01", b"\0\0\1\0{", b"shoal noise 2\n"):
        assert not may_be_preface(other)
    (length,) = LENGTH.unpack_from(PREFACE)
    assert length > 1 << 30
