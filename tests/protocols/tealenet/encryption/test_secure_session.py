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


def source(seed: int) -> Callable[[int], bytes]:
    """Return a source of chance that says something else each time."""
    drawn = 0

    def draw(size: int) -> bytes:
        nonlocal drawn
        drawn += 1
        return bytes([seed, drawn]) * (size // 2)

    return draw


def is_it(key: bytes, signature: bytes) -> bool:
    """Say whether a key was "signed", as these tests have it."""
    return signature == b"signed " + key


def ends(
    own: Signer, peer: Signer, *, noise: bool, teale: bool = False
) -> SessionParties:
    return SessionParties(
        identity=own,
        local_id=own.public_key.hex(),
        peer_id=peer.public_key.hex(),
        session_id=SESSION,
        random_bytes=source(own.public_key[0]),
        is_bound=is_it,
        signature=b"signed " + own.exchange_key,
        epoch=1.8e9,
        noise_key=peer.exchange_key if noise else None,
        teale_key=peer.exchange_key if teale else None,
    )


def pair(
    *, noise: bool = False, teale: bool = False
) -> tuple[SecureSession, SecureSession]:
    """Return whoever opened a session, and the other end of it."""
    anne = ends(ANNE, BELA, noise=noise, teale=teale)
    bela = ends(BELA, ANNE, noise=noise, teale=teale)
    return SecureSession(anne, initiates=True), SecureSession(bela, initiates=False)


def carried(steps: Sequence[SecureOutput]) -> list[bytes]:
    return [step.data for step in steps if isinstance(step, DataToSend)]


def heard(steps: Sequence[SecureOutput]) -> list[bytes]:
    return [step.data for step in steps if isinstance(step, MessageReceived)]


def notices(steps: Sequence[SecureOutput]) -> list[str]:
    return [step.text for step in steps if isinstance(step, Notice)]


def settled(**keys: bool) -> tuple[SecureSession, SecureSession]:
    """Return both ends after the handshake, and after one message of the first."""
    anne, bela = pair(**keys)
    for data in carried(anne.start(0.0)):
        for answer in carried(bela.receive(data, 0.0)):
            assert not anne.receive(answer, 0.0)
    (packet,) = carried(anne.send(TEXT))
    assert heard(bela.receive(packet, 0.0)) == [TEXT]
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
def test_both_ends_use_the_best_that_both_have(
    keys: dict[str, bool], protection: Protection
) -> None:
    anne, bela = settled(**keys)

    assert anne.protection is bela.protection is protection
    assert anne.deadline is bela.deadline is None
    for speaker, hearer in [(anne, bela), (bela, anne), (bela, anne), (anne, bela)]:
        (packet,) = carried(speaker.send(b'{"hello":"there"}'))
        assert (b"hello" in packet) == (protection is Protection.PLAIN)
        assert heard(hearer.receive(packet, 1.0)) == [b'{"hello":"there"}']


@pytest.mark.parametrize("keys", [{"noise": True}, {"teale": True}])
def test_messages_before_the_handshake_are_kept_in_order(
    keys: dict[str, bool],
) -> None:
    anne, bela = pair(**keys)
    opening = carried(anne.start(0.0))

    assert not anne.send(b"one")
    assert not anne.send(b"two")
    (answer,) = carried(bela.receive(opening[0], 0.0))
    kept = carried(anne.receive(answer, 0.0))

    assert [heard(bela.receive(each, 0.0)) for each in kept] == [[b"one"], [b"two"]]


def test_an_unknown_peer_proves_its_key_in_the_handshake() -> None:
    anne, _ = pair(noise=True)
    bela = SecureSession(ends(BELA, ANNE, noise=False), initiates=False)

    (answer,) = carried(bela.receive(carried(anne.start(0.0))[0], 0.0))

    assert not anne.receive(answer, 0.0)
    assert anne.protection is bela.protection is Protection.NOISE
    assert bela.noise_key == ANNE.exchange_key


def test_a_handshake_with_a_key_that_the_peer_did_not_sign_is_dropped() -> None:
    false = replace(ends(ANNE, BELA, noise=True), signature=b"signed by another")
    anne, (_, bela) = SecureSession(false, initiates=True), pair(noise=True)

    steps = bela.receive(carried(anne.start(0.0))[0], 0.0)

    assert notices(steps) == [
        "data dropped: the initiator's key is not the one that the peer announced"
    ]
    assert bela.protection is None


def test_a_peer_that_announced_noise_is_never_talked_to_in_the_open() -> None:
    anne, bela = pair(noise=True, teale=True)
    anne.start(0.0)
    anne.send(TEXT)

    answers = [*anne.receive(TEXT, 1.0), *anne.receive(b"\x02" + bytes(60), 1.0)]

    assert not carried(answers)
    assert not heard(answers)
    assert anne.deadline == NOISE_TIMEOUT
    assert not anne.tick(NOISE_TIMEOUT - 0.1)
    with pytest.raises(PeerError, match="the peer requires encryption"):
        anne.tick(NOISE_TIMEOUT)
    steps = bela.receive(TEXT, 1.0)
    assert notices(steps) == [
        "data dropped: no encryption from a peer that announced it"
    ]
    assert not heard(steps)


def test_a_peer_that_announced_noise_is_not_let_down_to_the_other_channel() -> None:
    offering, _ = pair(teale=True)
    bela = SecureSession(ends(BELA, ANNE, noise=True, teale=True), initiates=False)

    steps = bela.receive(carried(offering.start(0.0))[0], 0.0)

    assert not carried(steps)
    assert bela.protection is None


def test_a_peer_that_does_not_answer_the_offer_is_talked_to_in_the_open() -> None:
    anne, _ = pair(teale=True)
    anne.start(0.0)
    anne.send(TEXT)

    assert not anne.tick(TEALE_TIMEOUT - 0.1)
    assert carried(anne.tick(TEALE_TIMEOUT)) == [TEXT]
    assert anne.protection is Protection.PLAIN
    assert anne.deadline is None


def test_a_plain_answer_to_the_offer_is_read_at_once() -> None:
    anne, _ = pair(teale=True)
    anne.start(0.0)
    anne.send(b"one")

    steps = anne.receive(TEXT, 0.1)

    assert (carried(steps), heard(steps)) == ([b"one"], [TEXT])
    assert anne.protection is Protection.PLAIN


def test_an_answer_to_the_offer_that_comes_too_late_begins_the_session_anew() -> None:
    anne, bela = pair(teale=True)
    (answer,) = carried(bela.receive(carried(anne.start(0.0))[0], 0.0))
    anne.tick(TEALE_TIMEOUT)

    assert not heard(anne.receive(b"\x02" + bytes(60), 3.0))
    with pytest.raises(PeerError, match="too late"):
        anne.receive(answer, 3.0)


def test_an_announced_key_that_gives_no_secret_is_refused() -> None:
    weak = replace(ends(ANNE, BELA, noise=False), noise_key=bytes(32))

    with pytest.raises(PeerError, match="gives no secret"):
        SecureSession(weak, initiates=True).start(0.0)


def test_a_key_that_gives_no_secret_is_not_used() -> None:
    weak = replace(ends(ANNE, BELA, noise=False), teale_key=bytes(32))
    anne = SecureSession(weak, initiates=True)

    steps = anne.start(0.0)

    assert not carried(steps)
    assert "gives no secret" in notices(steps)[0]
    assert anne.protection is Protection.PLAIN


@pytest.mark.parametrize("keys", [{"noise": True}, {"teale": True}])
def test_a_first_message_that_is_sent_again_resets_nothing(
    keys: dict[str, bool],
) -> None:
    anne, bela = pair(**keys)
    (first,) = carried(anne.start(0.0))
    (second,) = carried(bela.receive(first, 0.0))
    anne.receive(second, 0.0)

    assert not carried(bela.receive(first, 1.0))
    assert not carried(anne.receive(second, 1.0))
    (packet,) = carried(anne.send(TEXT))
    assert heard(bela.receive(packet, 1.0)) == [TEXT]


@pytest.mark.parametrize("keys", [{"noise": True}, {"teale": True}])
def test_data_that_others_inject_into_a_session_is_dropped(
    keys: dict[str, bool],
) -> None:
    anne, bela = settled(**keys)
    injected = [b"", TEXT, bytes([NOISE_MESSAGE]), bytes(24), bytes(100)]
    injected.append(bytes([TEALE_FIRST]) + bytes(108))
    injected.append(bytes([NOISE_FIRST]) + bytes(96))
    injected.append(NOISE_HEADER.pack(NOISE_MESSAGE, 2**64 - 1) + bytes(16))

    for each in injected:
        assert not heard(bela.receive(each, 1.0))

    (packet,) = carried(anne.send(TEXT))
    assert heard(bela.receive(packet, 1.0)) == [TEXT]
    assert not heard(bela.receive(packet, 1.0)), "sent again"


def test_one_notice_is_enough_for_all_that_is_dropped() -> None:
    _, bela = settled(noise=True)

    assert len(notices(bela.receive(TEXT, 0.0))) == 1
    assert not bela.receive(TEXT, 0.0)


def test_a_message_that_was_lost_on_the_way_ends_the_session() -> None:
    anne, bela = settled(noise=True)
    anne.send(b"lost")
    (packet,) = carried(anne.send(TEXT))

    with pytest.raises(PeerError, match="were lost: message 2 came after 0"):
        bela.receive(packet, 0.0)


def test_messages_that_change_places_end_the_session() -> None:
    anne, bela = settled(noise=True)
    anne.send(b"first")
    (second,) = carried(anne.send(b"second"))

    with pytest.raises(PeerError, match="were lost"):
        bela.receive(second, 0.0)


def test_the_relay_cannot_connect_the_ends_of_two_sessions() -> None:
    anne, _ = pair(noise=True)
    other = "00000000-0000-0000-0000-000000000000"
    bela = SecureSession(
        replace(ends(BELA, ANNE, noise=True), session_id=other), initiates=False
    )

    steps = bela.receive(carried(anne.start(0.0))[0], 0.0)

    assert notices(steps) == ["data dropped: a handshake message is not genuine"]


def test_ids_are_the_same_in_upper_and_in_lower_case() -> None:
    anne, _ = pair(noise=True)
    lower = replace(ends(BELA, ANNE, noise=True), session_id=SESSION.lower())
    bela = SecureSession(lower, initiates=False)

    assert carried(bela.receive(carried(anne.start(0.0))[0], 0.0))


def test_the_initiator_does_not_answer_a_handshake() -> None:
    anne, _ = pair()
    bela, _ = pair(noise=True)
    anne.start(0.0)
    (first,) = carried(bela.start(0.0))

    steps = anne.receive(first, 0.0)

    assert not carried(steps)
    assert not heard(steps)


def test_a_peer_that_does_not_answer_is_not_kept_messages_without_end() -> None:
    anne, _ = pair(noise=True)
    anne.start(0.0)
    for _ in range(PENDING_MAX):
        anne.send(b"")

    with pytest.raises(LimitExceeded, match="before the end of the handshake"):
        anne.send(b"")


def test_long_messages_are_not_kept_without_end_either() -> None:
    anne, _ = pair(noise=True)
    anne.start(0.0)

    with pytest.raises(LimitExceeded):
        anne.send(bytes(PENDING_SIZE_MAX + 1))


@given(st.lists(st.binary(max_size=200)))
def test_garbage_is_met_with_silence(garbage: list[bytes]) -> None:
    for keys in ({}, {"noise": True}, {"teale": True}):
        anne, bela = pair(**keys)
        anne.start(0.0)
        for data in garbage:
            for end in (anne, bela):
                said = heard(end.receive(data, 0.0))
                assert said in ([], [data])
                assert not said or end.protection is Protection.PLAIN
