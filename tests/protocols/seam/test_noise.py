from collections.abc import Callable

import pytest
from noise.connection import NoiseConnection

from shoal.domain.errors import PeerError
from shoal.protocols.seam.noise import (
    NN_NAME,
    NONCE_MAX,
    EphemeralInitiator,
    Opener,
    Sealer,
    answer_ephemeral,
)

PROLOGUE = b"a session"

# Keys of low order, which give every peer the same secret; some libraries accept them.
WEAK_KEYS = [
    bytes(32),
    (1).to_bytes(32, "little"),
    (2**255 - 20).to_bytes(32, "little"),
    (2**255 - 19).to_bytes(32, "little"),
    (2**255 - 18).to_bytes(32, "little"),
]


def constant_bytes(secret: bytes) -> Callable[[int], bytes]:
    """Return a source of constant bytes."""
    return lambda size: (secret * size)[:size]


@pytest.mark.parametrize("initiates", [True, False])
def test_an_ephemeral_handshake_interoperates_with_another_implementation(
    initiates: bool,
) -> None:
    other = NoiseConnection.from_name(NN_NAME)
    other.set_prologue(PROLOGUE)
    if initiates:
        other.set_as_responder()
        other.start_handshake()
        initiator = EphemeralInitiator(PROLOGUE, constant_bytes(b"1"))
        assert other.read_message(initiator.write_first()) == b""
        keys = initiator.read_second(bytes(other.write_message()))
    else:
        other.set_as_initiator()
        other.start_handshake()
        first = bytes(other.write_message())
        second, keys = answer_ephemeral(PROLOGUE, first, constant_bytes(b"2"))
        assert other.read_message(second) == b""

    assert keys.hash == other.get_handshake_hash()
    assert other.decrypt(keys.sealer.seal(b"ours")[1]) == b"ours"
    assert keys.opener.open(0, other.encrypt(b"theirs")) == b"theirs"


def test_an_ephemeral_handshake_in_between_gives_two_hashes() -> None:
    client = EphemeralInitiator(PROLOGUE, constant_bytes(b"1"))
    between = EphemeralInitiator(PROLOGUE, constant_bytes(b"2"))

    to_client, with_client = answer_ephemeral(
        PROLOGUE, client.write_first(), constant_bytes(b"3")
    )
    to_between, at_server = answer_ephemeral(
        PROLOGUE, between.write_first(), constant_bytes(b"4")
    )

    assert client.read_second(to_client).hash == with_client.hash
    assert between.read_second(to_between).hash == at_server.hash
    assert with_client.hash != at_server.hash


def test_an_invalid_ephemeral_handshake_is_refused() -> None:
    initiator = EphemeralInitiator(PROLOGUE, constant_bytes(b"1"))
    first = initiator.write_first()
    second, _ = answer_ephemeral(b"another", first, constant_bytes(b"2"))

    with pytest.raises(PeerError, match="not genuine"):
        initiator.read_second(second)
    for wrong in (second + b"x", second[:-1]):
        with pytest.raises(PeerError, match="expected 48"):
            initiator.read_second(wrong)
    with pytest.raises(PeerError, match="expected 32"):
        answer_ephemeral(PROLOGUE, first[1:], constant_bytes(b"2"))
    for weak in WEAK_KEYS:
        with pytest.raises(PeerError, match="gives no secret"):
            answer_ephemeral(PROLOGUE, weak, constant_bytes(b"2"))


def test_a_message_opens_only_with_its_nonce() -> None:
    sealer, opener = Sealer(bytes(32)), Opener(bytes(32))
    number, sealed = sealer.seal(b"text")

    assert opener.open(number, sealed) == b"text"
    assert opener.open(number + 1, sealed) is None
    assert opener.open(number, sealed[:-1]) is None
    assert opener.open(number, b"") is None
    assert opener.open(-1, sealed) is None
    assert opener.open(NONCE_MAX + 1, sealed) is None


def test_nonces_are_never_reused() -> None:
    sealer = Sealer(bytes(32))
    sealer._next = NONCE_MAX

    assert sealer.seal(b"")[0] == NONCE_MAX
    with pytest.raises(PeerError, match="messages, its limit"):
        sealer.seal(b"")
