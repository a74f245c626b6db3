import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from noise.connection import Keypair, NoiseConnection

from shoal.domain.errors import PeerError
from shoal.ledger.keys import Signer
from shoal.protocols.seam.noise import (
    FIRST_SIZE_MIN,
    IK_NAME,
    NN_NAME,
    NONCE_MAX,
    SECOND_SIZE_MIN,
    EphemeralInitiator,
    NoiseInitiator,
    NoiseResponder,
    Opener,
    Sealer,
    answer_ephemeral,
)

VECTORS = json.loads((Path(__file__).with_name("noise.json")).read_text())
ANNE, BELA = Signer.from_seed(b"a" * 32), Signer.from_seed(b"b" * 32)
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


def started_handshake() -> tuple[NoiseInitiator, bytes, NoiseResponder]:
    initiator = NoiseInitiator(ANNE, BELA.exchange_key, PROLOGUE, constant_bytes(b"1"))
    first = initiator.write_first(b"hi")
    return initiator, first, NoiseResponder(BELA, PROLOGUE, first)


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_published_vectors_match(case: dict[str, Any]) -> None:
    def value(name: str) -> bytes:
        return bytes.fromhex(case[name])

    messages = [
        (bytes.fromhex(each["payload"]), bytes.fromhex(each["ciphertext"]))
        for each in case["messages"]
    ]
    initiator_key, responder_key = (
        Signer.from_seed(value(f"{end}_static")) for end in ("init", "resp")
    )
    initiator = NoiseInitiator(
        initiator_key,
        value("init_remote_static"),
        value("init_prologue"),
        lambda _: value("init_ephemeral"),
    )

    first = initiator.write_first(messages[0][0])
    responder = NoiseResponder(responder_key, value("resp_prologue"), first)
    second, responder_keys = responder.write_second(
        lambda _: value("resp_ephemeral"), messages[1][0]
    )
    payload, initiator_keys = initiator.read_second(second)

    assert (first, second) == (messages[0][1], messages[1][1])
    assert (responder.payload, payload) == (messages[0][0], messages[1][0])
    assert responder.peer_key == initiator_key.exchange_key
    assert initiator_keys.hash == responder_keys.hash == value("handshake_hash")
    for index, (plain, sealed) in enumerate(messages[2:]):
        sender, receiver = (
            (initiator_keys, responder_keys)
            if index % 2 == 0
            else (responder_keys, initiator_keys)
        )
        assert sender.sealer.seal(plain) == (index // 2, sealed)
        assert receiver.opener.open(index // 2, sealed) == plain


@pytest.mark.parametrize("payload", [b"", b"some payload"])
def test_the_initiator_interoperates_with_another_implementation(
    payload: bytes,
) -> None:
    other = reference_connection(BELA_SEED)
    initiator = NoiseInitiator(ANNE, BELA.exchange_key, PROLOGUE, constant_bytes(b"1"))

    assert other.read_message(initiator.write_first(payload)) == payload
    received, secrets = initiator.read_second(bytes(other.write_message(b"and back")))

    assert received == b"and back"
    for _ in range(3):
        assert other.decrypt(secrets.sealer.seal(b"ours")[1]) == b"ours"
    for number in range(3):
        assert secrets.opener.open(number, other.encrypt(b"theirs")) == b"theirs"


def test_the_responder_interoperates_with_another_implementation() -> None:
    other = reference_connection(ANNE_SEED, initiates=True)

    first = bytes(other.write_message(b"hi"))
    responder = NoiseResponder(BELA, PROLOGUE, first)
    second, secrets = responder.write_second(constant_bytes(b"2"), b"and back")

    assert responder.payload == b"hi"
    assert responder.peer_key == ANNE.exchange_key
    assert other.read_message(second) == b"and back"
    assert secrets.opener.open(0, other.encrypt(b"theirs")) == b"theirs"
    assert other.decrypt(secrets.sealer.seal(b"ours")[1]) == b"ours"


def test_a_first_message_for_another_key_is_refused() -> None:
    _, first, _ = started_handshake()

    with pytest.raises(PeerError, match="not genuine"):
        NoiseResponder(Signer.from_seed(b"c" * 32), PROLOGUE, first)


def test_different_prologues_are_refused() -> None:
    _, first, _ = started_handshake()

    with pytest.raises(PeerError, match="not genuine"):
        NoiseResponder(BELA, b"another session", first)


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
    with pytest.raises(PeerError, match="expected 48"):
        initiator.read_second(second + b"x")
    with pytest.raises(PeerError, match="expected 32"):
        answer_ephemeral(PROLOGUE, first[1:], constant_bytes(b"2"))
    for weak in WEAK_KEYS:
        with pytest.raises(PeerError, match="gives no secret"):
            answer_ephemeral(PROLOGUE, weak, constant_bytes(b"2"))


@given(st.integers(0, 8 * (FIRST_SIZE_MIN + 2) - 1))
def test_a_first_message_with_a_flipped_bit_is_refused(bit: int) -> None:
    _, first, _ = started_handshake()
    changed = bytearray(first)
    changed[bit // 8] ^= 1 << bit % 8

    # The highest bit of a key has no meaning on this curve, but it is hashed.
    with pytest.raises(PeerError):
        NoiseResponder(BELA, PROLOGUE, bytes(changed))


def test_a_truncated_first_message_is_refused(
    subtests: pytest.Subtests,
) -> None:
    for size in range(FIRST_SIZE_MIN):
        with subtests.test(size=size):
            _, first, _ = started_handshake()

            with pytest.raises(
                PeerError, match=f"{size} bytes, expected {FIRST_SIZE_MIN}"
            ):
                NoiseResponder(BELA, PROLOGUE, first[:size])


def test_a_truncated_second_message_is_refused(
    subtests: pytest.Subtests,
) -> None:
    for size in range(SECOND_SIZE_MIN):
        with subtests.test(size=size):
            initiator, _, responder = started_handshake()
            second, _ = responder.write_second(constant_bytes(b"2"))

            with pytest.raises(
                PeerError, match=f"{size} bytes, expected {SECOND_SIZE_MIN}"
            ):
                initiator.read_second(second[:size])


def test_an_invalid_second_message_changes_nothing() -> None:
    initiator, _, responder = started_handshake()
    second, responder_keys = responder.write_second(constant_bytes(b"2"), b"yes")

    with pytest.raises(PeerError):
        initiator.read_second(bytes(reversed(second)))
    payload, initiator_keys = initiator.read_second(second)

    assert payload == b"yes"
    assert initiator_keys.hash == responder_keys.hash


@pytest.mark.parametrize("weak", WEAK_KEYS)
def test_a_key_of_low_order_is_refused(weak: bytes) -> None:
    initiator, first, _ = started_handshake()

    with pytest.raises(PeerError, match="gives no secret"):
        NoiseInitiator(ANNE, weak, PROLOGUE, constant_bytes(b"1")).write_first()
    with pytest.raises(PeerError, match="gives no secret"):
        NoiseResponder(BELA, PROLOGUE, weak + first[32:])
    with pytest.raises(PeerError, match="gives no secret"):
        initiator.read_second(weak + bytes(32))


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


ANNE_SEED, BELA_SEED = b"a" * 32, b"b" * 32


def reference_connection(seed: bytes, *, initiates: bool = False) -> Any:
    """Return one end of a handshake in the package ``noiseprotocol``."""
    connection = NoiseConnection.from_name(IK_NAME)
    connection.set_prologue(PROLOGUE)
    connection.set_keypair_from_private_bytes(Keypair.STATIC, seed)
    if initiates:
        connection.set_as_initiator()
        key = BELA.exchange_key
        connection.set_keypair_from_public_bytes(Keypair.REMOTE_STATIC, key)
    else:
        connection.set_as_responder()
    connection.start_handshake()
    return connection
