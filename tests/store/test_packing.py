"""Compressed texts: what is compressed, and what is refused."""

import hashlib
import random
import zlib

import pytest

from shoal.domain.errors import StoreError
from shoal.store import packing
from shoal.store.packing import DICTIONARY, PACKED_FROM, PACKED_MAX, pack, unpack

LINE = b'{"work":{"model":"m","messages":[{"role":"user","content":"%s"}]}}'
NOISE = random.Random(0).randbytes(PACKED_MAX)


def test_texts_of_every_size_are_unpacked_as_they_were() -> None:
    for size in (
        *range(0, 600, 20),
        PACKED_FROM - 2,
        PACKED_FROM - 1,
        PACKED_FROM,
        4096,
        40_000,
        PACKED_MAX - 100,
        PACKED_MAX,
        PACKED_MAX + 1,
    ):
        for text in (b"[" + b"x" * size, b"{" + NOISE.hex().encode()[:size]):
            assert unpack(pack(text)) == text


def test_only_what_becomes_smaller_is_packed() -> None:
    noise = b"[" + NOISE[:PACKED_FROM]
    short, long = b"x" * (PACKED_FROM - 1), b"x" * (PACKED_MAX + 1)

    assert [pack(each) for each in (b"", short, long, noise)] == [
        b"",
        short,
        long,
        noise,
    ]
    assert len(pack(LINE % (b"to be or not " * 20))) < 80


def test_every_deflate_compressor_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = LINE % (b"to be or not to be " * 50)
    packed = {pack(text)}

    monkeypatch.setattr(packing, "compressobj", zlib.compressobj)
    packed.add(pack(text))

    assert {unpack(each) for each in packed} == {text}


def test_dictionary_is_unchanged() -> None:
    # What is stored can be read with this dictionary only.
    digest = hashlib.sha256(DICTIONARY).hexdigest()

    assert digest == "2983b032ed0abb89967fa87139434aa130831d22b94cde4d20a8ca6f5462410b"


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1], lambda data: b"\x01" + b"\xff" * 9, lambda _: b"\x01"],
    ids=["cut off", "nonsense", "empty"],
)
def test_damaged_text_is_an_error(damage: object) -> None:
    assert callable(damage)
    packed = pack(LINE % (b"to be or not to be " * 50))

    with pytest.raises(StoreError, match="compressed text"):
        unpack(damage(packed))
