from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.ledger.keys import Signer
from shoal.protocols.seam.peer_session import Protection
from shoal.protocols.seam.session import Notice
from shoal.protocols.tealenet.encryption.secure_session import (
    NOISE_FIRST,
    NOISE_HEADER,
    NOISE_MESSAGE,
    NOISE_TIMEOUT,
    PENDING_MAX,
    PENDING_SIZE_MAX,
    TEALE_FIRST,
    TEALE_TIMEOUT,
    DataToSend,
    MessageReceived,
    SecureOutput,
    SecureSession,
    SessionParties,
)

ANNE, BELA = Signer.from_seed(b"a" * 32), Signer.from_seed(b"b" * 32)
SESSION = "550E8400-E29B-41D4-A716-446655440000"
TEXT = b'{"heartbeat":{}}'


def counting_bytes(seed: int) -> Callable[[int], bytes]:
    """Return a source of bytes that differ at each call."""
    calls = 0

    def draw(size: int) -> bytes:
        nonlocal calls
        calls += 1
        return bytes([seed, calls]) * (size // 2)

    return draw


def is_bound(key: bytes, signature: bytes) -> bool:
    """Verify the placeholder signature of these tests."""
    return signature == b"signed " + key


def parties(
    local: Signer, peer: Signer, *, noise: bool, teale: bool = False
) -> SessionParties:
    return SessionParties(
        identity=local,
        local_id=local.public_key.hex(),
        peer_id=peer.public_key.hex(),
        session_id=SESSION,
        random_bytes=counting_bytes(local.public_key[0]),
        is_bound=is_bound,
        signature=b"signed " + local.exchange_key,
        epoch=1.8e9,
        noise_key=peer.exchange_key if noise else None,
        teale_key=peer.exchange_key if teale else None,
    )


def pair(
    *, noise: bool = False, teale: bool = False
) -> tuple[SecureSession, SecureSession]:
    """Return the initiator of a session, and the responder."""
    anne = parties(ANNE, BELA, noise=noise, teale=teale)
    bela = parties(BELA, ANNE, noise=noise, teale=teale)
    return SecureSession(anne, initiates=True), SecureSession(bela, initiates=False)


def packets(steps: Sequence[SecureOutput]) -> list[bytes]:
    return [step.data for step in steps if isinstance(step, DataToSend)]


def messages(steps: Sequence[SecureOutput]) -> list[bytes]:
    return [step.data for step in steps if isinstance(step, MessageReceived)]


def notices(steps: Sequence[SecureOutput]) -> list[str]:
    return [step.text for step in steps if isinstance(step, Notice)]


def established_pair(**keys: bool) -> tuple[SecureSession, SecureSession]:
    """Return both ends after the handshake and one message of the initiator."""
    anne, bela = pair(**keys)
    for data in packets(anne.start(0.0)):
        for answer in packets(bela.receive(data, 0.0)):
            assert not anne.receive(answer, 0.0)
    (packet,) = packets(anne.send(TEXT))
    assert messages(bela.receive(packet, 0.0)) == [TEXT]
    return anne, bela


@pytest.mark.parametrize(
    ("keys", "protection"),
    [
        ({"noise": True, "teale": True}, Protection.NOISE),
        ({"noise": True}, Protection.NOISE),
        ({"teale": True}, Protection.TEALE),
        ({}, Protection.PLAIN),
    ],
)
def test_both_ends_use_the_best_common_protection(
    keys: dict[str, bool], protection: Protection
) -> None:
    anne, bela = established_pair(**keys)

    assert anne.protection is bela.protection is protection
    assert anne.deadline is bela.deadline is None
    for sender, receiver in [(anne, bela), (bela, anne), (bela, anne), (anne, bela)]:
        (packet,) = packets(sender.send(b'{"hello":"there"}'))
        assert (b"hello" in packet) == (protection is Protection.PLAIN)
        assert messages(receiver.receive(packet, 1.0)) == [b'{"hello":"there"}']


@pytest.mark.parametrize("keys", [{"noise": True}, {"teale": True}])
def test_messages_before_the_handshake_are_queued_in_order(
    keys: dict[str, bool],
) -> None:
    anne, bela = pair(**keys)
    opening = packets(anne.start(0.0))

    assert not anne.send(b"one")
    assert not anne.send(b"two")
    (answer,) = packets(bela.receive(opening[0], 0.0))
    queued = packets(anne.receive(answer, 0.0))

    assert [messages(bela.receive(each, 0.0)) for each in queued] == [
        [b"one"],
        [b"two"],
    ]


def test_an_unknown_peer_proves_its_key_in_the_handshake() -> None:
    anne, _ = pair(noise=True)
    bela = SecureSession(parties(BELA, ANNE, noise=False), initiates=False)

    (answer,) = packets(bela.receive(packets(anne.start(0.0))[0], 0.0))

    assert not anne.receive(answer, 0.0)
    assert anne.protection is bela.protection is Protection.NOISE
    assert bela.noise_key == ANNE.exchange_key


def test_a_handshake_with_an_unsigned_key_is_dropped() -> None:
    unsigned = replace(parties(ANNE, BELA, noise=True), signature=b"signed by another")
    anne, (_, bela) = SecureSession(unsigned, initiates=True), pair(noise=True)

    steps = bela.receive(packets(anne.start(0.0))[0], 0.0)

    assert notices(steps) == [
        "data dropped: the initiator's key is not the one that the peer announced"
    ]
    assert bela.protection is None


def test_a_peer_with_noise_gets_no_plain_messages() -> None:
    anne, bela = pair(noise=True, teale=True)
    anne.start(0.0)
    anne.send(TEXT)

    answers = [*anne.receive(TEXT, 1.0), *anne.receive(b"\x02" + bytes(60), 1.0)]

    assert not packets(answers)
    assert not messages(answers)
    assert anne.deadline == NOISE_TIMEOUT
    assert not anne.tick(NOISE_TIMEOUT - 0.1)
    with pytest.raises(PeerError, match="the peer requires encryption"):
        anne.tick(NOISE_TIMEOUT)
    steps = bela.receive(TEXT, 1.0)
    assert notices(steps) == [
        "data dropped: no encryption from a peer that announced it"
    ]
    assert not messages(steps)


def test_a_peer_with_noise_cannot_downgrade_to_the_teale_channel() -> None:
    downgraded, _ = pair(teale=True)
    bela = SecureSession(parties(BELA, ANNE, noise=True, teale=True), initiates=False)

    steps = bela.receive(packets(downgraded.start(0.0))[0], 0.0)

    assert not packets(steps)
    assert bela.protection is None


def test_an_unanswered_teale_handshake_falls_back_to_plain() -> None:
    anne, _ = pair(teale=True)
    anne.start(0.0)
    anne.send(TEXT)

    assert not anne.tick(TEALE_TIMEOUT - 0.1)
    assert packets(anne.tick(TEALE_TIMEOUT)) == [TEXT]
    assert anne.protection is Protection.PLAIN
    assert anne.deadline is None


def test_a_plain_answer_ends_the_teale_handshake() -> None:
    anne, _ = pair(teale=True)
    anne.start(0.0)
    anne.send(b"one")

    steps = anne.receive(TEXT, 0.1)

    assert (packets(steps), messages(steps)) == ([b"one"], [TEXT])
    assert anne.protection is Protection.PLAIN


def test_a_late_answer_to_the_teale_handshake_ends_the_session() -> None:
    anne, bela = pair(teale=True)
    (answer,) = packets(bela.receive(packets(anne.start(0.0))[0], 0.0))
    anne.tick(TEALE_TIMEOUT)

    assert not messages(anne.receive(b"\x02" + bytes(60), 3.0))
    with pytest.raises(PeerError, match="too late"):
        anne.receive(answer, 3.0)


def test_a_noise_key_of_low_order_is_refused() -> None:
    weak = replace(parties(ANNE, BELA, noise=False), noise_key=bytes(32))

    with pytest.raises(PeerError, match="gives no secret"):
        SecureSession(weak, initiates=True).start(0.0)


def test_a_teale_key_of_low_order_is_not_used() -> None:
    weak = replace(parties(ANNE, BELA, noise=False), teale_key=bytes(32))
    anne = SecureSession(weak, initiates=True)

    steps = anne.start(0.0)

    assert not packets(steps)
    assert "gives no secret" in notices(steps)[0]
    assert anne.protection is Protection.PLAIN


@pytest.mark.parametrize("keys", [{"noise": True}, {"teale": True}])
def test_a_replayed_first_message_changes_nothing(
    keys: dict[str, bool],
) -> None:
    anne, bela = pair(**keys)
    (first,) = packets(anne.start(0.0))
    (second,) = packets(bela.receive(first, 0.0))
    anne.receive(second, 0.0)

    assert not packets(bela.receive(first, 1.0))
    assert not packets(anne.receive(second, 1.0))
    (packet,) = packets(anne.send(TEXT))
    assert messages(bela.receive(packet, 1.0)) == [TEXT]


@pytest.mark.parametrize("keys", [{"noise": True}, {"teale": True}])
def test_injected_data_is_dropped(
    keys: dict[str, bool],
) -> None:
    anne, bela = established_pair(**keys)
    injected = [b"", TEXT, bytes([NOISE_MESSAGE]), bytes(24), bytes(100)]
    injected.append(bytes([TEALE_FIRST]) + bytes(108))
    injected.append(bytes([NOISE_FIRST]) + bytes(96))
    injected.append(NOISE_HEADER.pack(NOISE_MESSAGE, 2**64 - 1) + bytes(16))

    for each in injected:
        assert not messages(bela.receive(each, 1.0))

    (packet,) = packets(anne.send(TEXT))
    assert messages(bela.receive(packet, 1.0)) == [TEXT]
    assert not messages(bela.receive(packet, 1.0)), "a replayed packet"


def test_dropped_data_is_noticed_once() -> None:
    _, bela = established_pair(noise=True)

    assert len(notices(bela.receive(TEXT, 0.0))) == 1
    assert not bela.receive(TEXT, 0.0)


def test_a_lost_message_ends_the_session() -> None:
    anne, bela = established_pair(noise=True)
    anne.send(b"lost")
    (packet,) = packets(anne.send(TEXT))

    with pytest.raises(PeerError, match="were lost: message 2 came after 0"):
        bela.receive(packet, 0.0)


def test_reordered_messages_end_the_session() -> None:
    anne, bela = established_pair(noise=True)
    anne.send(b"first")
    (second,) = packets(anne.send(b"second"))

    with pytest.raises(PeerError, match="were lost"):
        bela.receive(second, 0.0)


def test_the_relay_cannot_connect_the_ends_of_two_sessions() -> None:
    anne, _ = pair(noise=True)
    other = "00000000-0000-0000-0000-000000000000"
    bela = SecureSession(
        replace(parties(BELA, ANNE, noise=True), session_id=other), initiates=False
    )

    steps = bela.receive(packets(anne.start(0.0))[0], 0.0)

    assert notices(steps) == ["data dropped: a handshake message is not genuine"]


def test_session_ids_are_compared_without_case() -> None:
    anne, _ = pair(noise=True)
    lower = replace(parties(BELA, ANNE, noise=True), session_id=SESSION.lower())
    bela = SecureSession(lower, initiates=False)

    assert packets(bela.receive(packets(anne.start(0.0))[0], 0.0))


def test_the_initiator_does_not_answer_a_handshake() -> None:
    anne, _ = pair()
    bela, _ = pair(noise=True)
    anne.start(0.0)
    (first,) = packets(bela.start(0.0))

    steps = anne.receive(first, 0.0)

    assert not packets(steps)
    assert not messages(steps)


def test_pending_messages_are_limited_in_number() -> None:
    anne, _ = pair(noise=True)
    anne.start(0.0)
    for _ in range(PENDING_MAX):
        anne.send(b"")

    with pytest.raises(LimitExceeded, match="before the end of the handshake"):
        anne.send(b"")


def test_pending_messages_are_limited_in_size() -> None:
    anne, _ = pair(noise=True)
    anne.start(0.0)

    with pytest.raises(LimitExceeded):
        anne.send(bytes(PENDING_SIZE_MAX + 1))


@given(st.lists(st.binary(max_size=200)))
def test_garbage_is_dropped_or_read_as_plain(garbage: list[bytes]) -> None:
    for keys in ({}, {"noise": True}, {"teale": True}):
        anne, bela = pair(**keys)
        anne.start(0.0)
        for data in garbage:
            for end in (anne, bela):
                received = messages(end.receive(data, 0.0))
                assert received in ([], [data])
                assert not received or end.protection is Protection.PLAIN
