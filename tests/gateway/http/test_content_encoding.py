"""Compressed request bodies."""

import gzip
import zlib

import pytest

from shoal.domain.errors import InvalidRequest
from shoal.gateway.http.body import PIECE, Inflater

TEXT = b'{"model":"m1"}' * 1000
RAW = zlib.compressobj(wbits=-15)

BODIES = {
    "gzip": ("gzip", gzip.compress(TEXT)),
    "another case": (" GZip ", gzip.compress(TEXT)),
    "two members": ("gzip", gzip.compress(TEXT[:99]) + gzip.compress(TEXT[99:])),
    "an empty member first": ("gzip", gzip.compress(b"") + gzip.compress(TEXT)),
    "zlib": ("deflate", zlib.compress(TEXT)),
    "raw deflate": ("deflate", RAW.compress(TEXT) + RAW.flush()),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_body_means_the_same_however_it_is_split(body: tuple[str, bytes]) -> None:
    encoding, data = body
    for size in (1, 7, len(data)):
        inflater = Inflater.of(encoding)
        assert inflater is not None
        parts = (data[at : at + size] for at in range(0, len(data), size))

        assert b"".join(b"".join(inflater.pieces(part)) for part in parts) == TEXT
        inflater.check_end()


@pytest.mark.parametrize("encoding", ["", "identity"])
def test_plain_body_needs_no_inflater(encoding: str) -> None:
    assert Inflater.of(encoding) is None


def test_bomb_comes_in_small_pieces() -> None:
    inflater = Inflater("gzip")
    pieces = inflater.pieces(gzip.compress(bytes(64 << 20)))

    assert {len(next(pieces)) for _ in range(100)} == {PIECE}


@pytest.mark.parametrize(
    "data",
    [b"nothing", gzip.compress(TEXT)[:-4] + b"1234"],
    ids=["no header", "another size"],
)
def test_damaged_body_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the body is damaged: "):
        list(Inflater("gzip").pieces(data))


def test_body_without_its_end_is_refused() -> None:
    inflater = Inflater("gzip")
    list(inflater.pieces(gzip.compress(TEXT)[:-9]))

    with pytest.raises(InvalidRequest, match="cut off"):
        inflater.check_end()


def test_unknown_encoding_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'br' is not supported: send gzip"):
        Inflater.of("br")
