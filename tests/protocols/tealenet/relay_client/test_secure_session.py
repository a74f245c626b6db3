from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.ledger.keys import Signer
from shoal.protocols.seam.peer_session import Protection
from shoal.protocols.seam.session import Notice, Send
from shoal.protocols.tealenet.relay_client.encryption import (
    ANSWER_TIMEOUT,
    FIRST_TYPE,
    PENDING_MAX,
    PENDING_SIZE_MAX,
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


def parties(local: Signer, peer: Signer, *, keyed: bool) -> SessionParties:
    return SessionParties(
        identity=local,
        peer_id=peer.public_key.hex(),
        session_id=SESSION,
        random_bytes=counting_bytes(local.public_key[0]),
        epoch=1.8e9,
        peer_key=peer.exchange_key if keyed else None,
    )


def pair(*, keyed: bool = True) -> tuple[SecureSession, SecureSession]:
    """Return the initiator of a session, and the responder."""
    anne = parties(ANNE, BELA, keyed=keyed)
    bela = parties(BELA, ANNE, keyed=keyed)
    return SecureSession(anne, initiates=True), SecureSession(bela, initiates=False)


def packets(steps: Sequence[SecureOutput]) -> list[bytes]:
    data = [step.data for step in steps if isinstance(step, Send)]
    return [each for each in data if isinstance(each, bytes)]


def messages(steps: Sequence[SecureOutput]) -> list[bytes]:
    return [step.data for step in steps if isinstance(step, MessageReceived)]


def notices(steps: Sequence[SecureOutput]) -> list[str]:
    return [step.text for step in steps if isinstance(step, Notice)]


def established_pair(*, keyed: bool = True) -> tuple[SecureSession, SecureSession]:
    """Return both ends after the handshake and one message of the initiator."""
    anne, bela = pair(keyed=keyed)
    for data in packets(anne.start(0.0)):
        for answer in packets(bela.receive(data, 0.0)):
            assert not anne.receive(answer, 0.0)
    (packet,) = packets(anne.send(TEXT))
    assert messages(bela.receive(packet, 0.0)) == [TEXT]
    return anne, bela


@pytest.mark.parametrize(
    ("keyed", "protection"), [(True, Protection.TEALE), (False, Protection.PLAIN)]
)
def test_both_ends_use_the_best_common_protection(
    keyed: bool, protection: Protection
) -> None:
    anne, bela = established_pair(keyed=keyed)

    assert anne.protection is bela.protection is protection
    assert anne.deadline is bela.deadline is None
    for sender, receiver in [(anne, bela), (bela, anne), (bela, anne), (anne, bela)]:
        (packet,) = packets(sender.send(b'{"hello":"there"}'))
        assert (b"hello" in packet) == (protection is Protection.PLAIN)
        assert messages(receiver.receive(packet, 1.0)) == [b'{"hello":"there"}']


def test_messages_before_the_handshake_are_queued_in_order() -> None:
    anne, bela = pair()
    opening = packets(anne.start(0.0))

    assert not anne.send(b"one")
    assert not anne.send(b"two")
    (answer,) = packets(bela.receive(opening[0], 0.0))
    queued = packets(anne.receive(answer, 0.0))

    assert [messages(bela.receive(each, 0.0)) for each in queued] == [
        [b"one"],
        [b"two"],
    ]


def test_an_unanswered_handshake_falls_back_to_plain() -> None:
    anne, _ = pair()
    anne.start(0.0)
    anne.send(TEXT)

    assert not anne.tick(ANSWER_TIMEOUT - 0.1)
    assert packets(anne.tick(ANSWER_TIMEOUT)) == [TEXT]
    assert anne.protection is Protection.PLAIN
    assert anne.deadline is None


def test_a_plain_answer_ends_the_handshake() -> None:
    anne, _ = pair()
    anne.start(0.0)
    anne.send(b"one")

    steps = anne.receive(TEXT, 0.1)

    assert (packets(steps), messages(steps)) == ([b"one"], [TEXT])
    assert anne.protection is Protection.PLAIN


def test_a_late_answer_to_the_handshake_ends_the_session() -> None:
    anne, bela = pair()
    (answer,) = packets(bela.receive(packets(anne.start(0.0))[0], 0.0))
    anne.tick(ANSWER_TIMEOUT)

    assert not messages(anne.receive(b"\x02" + bytes(60), 3.0))
    with pytest.raises(PeerError, match="too late"):
        anne.receive(answer, 3.0)


def test_a_key_of_low_order_is_not_used() -> None:
    weak = replace(parties(ANNE, BELA, keyed=False), peer_key=bytes(32))
    anne = SecureSession(weak, initiates=True)

    steps = anne.start(0.0)

    assert not packets(steps)
    assert "gives no secret" in notices(steps)[0]
    assert anne.protection is Protection.PLAIN


def test_a_replayed_first_message_changes_nothing() -> None:
    anne, bela = pair()
    (first,) = packets(anne.start(0.0))
    (second,) = packets(bela.receive(first, 0.0))
    anne.receive(second, 0.0)

    assert not packets(bela.receive(first, 1.0))
    assert not packets(anne.receive(second, 1.0))
    (packet,) = packets(anne.send(TEXT))
    assert messages(bela.receive(packet, 1.0)) == [TEXT]


def test_injected_data_is_dropped() -> None:
    anne, bela = established_pair()
    injected = [b"", TEXT, bytes(24), bytes(100), FIRST_TYPE + bytes(108)]

    for each in injected:
        assert not messages(bela.receive(each, 1.0))

    (packet,) = packets(anne.send(TEXT))
    assert messages(bela.receive(packet, 1.0)) == [TEXT]
    assert not messages(bela.receive(packet, 1.0)), "a replayed packet"


def test_dropped_data_is_noticed_once() -> None:
    _, bela = established_pair()

    assert len(notices(bela.receive(TEXT, 0.0))) == 1
    assert not bela.receive(TEXT, 0.0)


def test_the_initiator_does_not_answer_a_handshake() -> None:
    anne, _ = pair(keyed=False)
    bela, _ = pair()
    anne.start(0.0)
    (first,) = packets(bela.start(0.0))

    steps = anne.receive(first, 0.0)

    assert not packets(steps)
    assert not messages(steps)


def test_pending_messages_are_limited_in_number() -> None:
    anne, _ = pair()
    anne.start(0.0)
    for _ in range(PENDING_MAX):
        anne.send(b"")

    with pytest.raises(LimitExceeded, match="before the end of the handshake"):
        anne.send(b"")


def test_pending_messages_are_limited_in_size() -> None:
    anne, _ = pair()
    anne.start(0.0)

    with pytest.raises(LimitExceeded):
        anne.send(bytes(PENDING_SIZE_MAX + 1))


@given(st.lists(st.binary(max_size=200)))
def test_garbage_is_dropped_or_read_as_plain(garbage: list[bytes]) -> None:
    for keyed in (False, True):
        anne, bela = pair(keyed=keyed)
        anne.start(0.0)
        for data in garbage:
            for end in (anne, bela):
                received = messages(end.receive(data, 0.0))
                assert received in ([], [data])
                assert not received or end.protection is Protection.PLAIN
