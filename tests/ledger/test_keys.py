import base64
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.builders import VECTORS
from shoal.ledger.keys import Signer, is_valid_key, public_key_of, verify

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P

Point: TypeAlias = tuple[int, int]


# RFC 8032, section 7.1, tests 1 to 3.
@pytest.mark.parametrize(
    ("seed", "public_key", "message", "signature"),
    [
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
            "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
        ),
        (
            "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
            "72",
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
            "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
        ),
        (
            "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
            "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
            "af82",
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
            "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
        ),
    ],
)
def test_signatures_match_rfc_8032(
    seed: str, public_key: str, message: str, signature: str
) -> None:
    signer = Signer.from_seed(bytes.fromhex(seed))

    signed = signer.sign(bytes.fromhex(message))

    assert signer.public_key.hex() == public_key
    assert signed.hex() == signature
    assert verify(signer.public_key, signed, bytes.fromhex(message))


@pytest.mark.parametrize("case", VECTORS["verified"], ids=lambda case: case["id"])
def test_recorded_receipts_verify_as_expected(case: dict[str, Any]) -> None:
    try:
        signature = base64.b64decode(case["signature"], validate=True)
    except ValueError:
        signature = b""
    public_key = public_key_of(case["public_key"]) or b""

    valid = verify(public_key, signature, case["body"].encode())

    assert valid is case["valid"]


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_a_seed_has_32_bytes(size: int) -> None:
    with pytest.raises(ValueError, match=f"a seed of {size} bytes, expected 32"):
        Signer.from_seed(bytes(size))


@given(
    st.binary(min_size=32, max_size=32) | st.binary(max_size=40),
    st.binary(min_size=64, max_size=64) | st.binary(max_size=70),
    st.binary(),
)
def test_malformed_signature_is_invalid(
    public_key: bytes, signature: bytes, message: bytes
) -> None:
    assert not verify(public_key, signature, message)


@given(st.binary(min_size=32, max_size=32), st.binary(), st.integers(0, 64 * 8 - 1))
def test_bit_flip_in_a_signature_is_detected(
    seed: bytes, message: bytes, bit: int
) -> None:
    signer = Signer.from_seed(seed)
    signature = bytearray(signer.sign(message))
    signature[bit // 8] ^= 1 << bit % 8

    assert not verify(signer.public_key, bytes(signature), message)


def test_signature_is_not_malleable() -> None:
    signer = Signer.from_seed(b"s" * 32)
    signature = signer.sign(b"m")
    beyond = int.from_bytes(signature[32:], "little") + ORDER
    again = signature[:32] + beyond.to_bytes(32, "little")

    assert verify(signer.public_key, signature, b"m")
    assert not verify(signer.public_key, again, b"m")


def test_signature_has_64_bytes() -> None:
    signer = Signer.from_seed(b"s" * 32)
    signature = signer.sign(b"m")

    for other in (signature[:-1], signature[1:], signature + b"\0", b"", signature * 2):
        assert not verify(signer.public_key, other, b"m")


def test_keys_of_small_order_are_rejected_in_every_form() -> None:
    ys = {y for _, y in small_points()}
    forms = [form for y in ys for form in (y, y + P) if form < 2**255]
    keys = [
        (form | sign << 255).to_bytes(32, "little") for form in forms for sign in (0, 1)
    ]

    assert len(small_points()) == 8
    assert len(keys) == 14  # the eight, and their non-canonical encodings
    assert not any(is_valid_key(key) for key in keys)


def test_non_canonical_key_is_rejected(subtests: pytest.Subtests) -> None:
    for above in range(19):
        with subtests.test(above=above):
            for sign in (0, 1):
                key = (P + above | sign << 255).to_bytes(32, "little")

                assert not is_valid_key(key)


def test_a_key_of_small_order_signs_nothing() -> None:
    # R is the neutral point and S is 0: lax verifiers accept it for any message.
    neutral = (1).to_bytes(32, "little")

    assert not verify(neutral, neutral + bytes(32), b"whatever")


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_a_key_has_32_bytes(size: int) -> None:
    assert not is_valid_key(bytes([7]) * size)


@given(st.binary(min_size=32, max_size=32))
def test_key_is_case_insensitive(key: bytes) -> None:
    assert public_key_of(key.hex()) == public_key_of(key.hex().upper()) == key


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ab",
        "g" * 64,
        "a" * 63,
        "a" * 65,
        "0x" + "a" * 62,
        "0x" + "a" * 64,
        " " + "a" * 63,
        "a" * 64 + "\n",
        "\u0661" * 64,
        "a b" * 21 + "a",
    ],
)
def test_malformed_key_is_rejected(text: str) -> None:
    assert public_key_of(text) is None


def small_points() -> set[Point]:
    """Return all points whose order divides eight, from the curve's definition."""
    points = {(0, 1)}
    y = 2
    while len(points) < 8:
        x = root_of((y * y - 1) * pow(D * y * y + 1, -1, P) % P)
        if x is not None:
            small = times(ORDER, (x, y))
            points |= {times(n, small) for n in range(8)}
        y += 1
    return points


def root_of(square: int) -> int | None:
    root = pow(square, (P + 3) // 8, P)
    for candidate in (root, root * pow(2, (P - 1) // 4, P) % P):
        if candidate * candidate % P == square:
            return candidate
    return None


def plus(a: Point, b: Point) -> Point:
    """RFC 8032, section 5.1.4, in affine form."""
    (x1, y1), (x2, y2) = a, b
    product = D * x1 * x2 * y1 * y2 % P
    x = (x1 * y2 + x2 * y1) * pow(1 + product, -1, P) % P
    y = (y1 * y2 + x1 * x2) * pow(1 - product, -1, P) % P
    return x, y


def times(n: int, point: Point) -> Point:
    total = (0, 1)
    while n:
        if n & 1:
            total = plus(total, point)
        point = plus(point, point)
        n >>= 1
    return total
