import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.ledger.keys import Signer, verify
from shoal.protocols.tealenet.codec.signatures import (
    decode_base64,
    encode_base64,
    noise_binding,
    noise_fields,
    parse_key,
    proof_text,
)

WORKER = Signer.from_seed(bytes(range(32)))
COORDINATOR = Signer.from_seed(bytes(reversed(range(32))))
CHALLENGE = bytes(32)
BINDING = b"a channel"


def test_a_proof_is_valid_for_one_challenge_of_one_verifier() -> None:
    key, other = WORKER.public_key, COORDINATOR.public_key

    proof = WORKER.sign(proof_text(CHALLENGE, other, key, BINDING))

    assert verify(key, proof, proof_text(CHALLENGE, other, key, BINDING))
    assert not verify(key, proof, proof_text(b"x" * 32, other, key, BINDING))
    assert not verify(key, proof, proof_text(CHALLENGE, key, key, BINDING))


def test_a_proof_is_valid_on_one_channel() -> None:
    key, other = WORKER.public_key, COORDINATOR.public_key

    proof = WORKER.sign(proof_text(CHALLENGE, other, key, BINDING))

    for binding in (b"", b"another channel"):
        assert not verify(key, proof, proof_text(CHALLENGE, other, key, binding))


def test_a_proof_cannot_be_reflected() -> None:
    key, other = WORKER.public_key, COORDINATOR.public_key

    there = proof_text(CHALLENGE, other, key, BINDING)
    assert there != proof_text(CHALLENGE, key, other, BINDING)


def test_the_exchange_key_is_bound_to_the_signing_key() -> None:
    noise, proof = noise_fields(WORKER)

    assert parse_key(noise) == WORKER.exchange_key
    binding = noise_binding(parse_key(noise))
    assert verify(WORKER.public_key, decode_base64(proof), binding)
    assert not verify(COORDINATOR.public_key, decode_base64(proof), binding)


@given(st.binary(max_size=100))
def test_base64_round_trips(data: bytes) -> None:
    assert decode_base64(encode_base64(data)) == data


@pytest.mark.parametrize("text", ["", "00" * 31, "0g" * 32, "00" * 32 + "\n", "é" * 64])
def test_an_invalid_key_is_empty(text: str) -> None:
    assert parse_key(text) == b""


@pytest.mark.parametrize("text", ["A", "AA", "AA=A", "é", "\ud800", "AA\n=="])
def test_invalid_base64_is_empty(text: str) -> None:
    assert decode_base64(text) == b""
