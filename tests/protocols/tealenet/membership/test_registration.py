import json
from dataclasses import replace

import msgspec
import pytest

from protocols.tealenet.network import (
    EPOCH,
    HOST,
    coordinator_side,
    deterministic_bytes,
)
from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import Draining, LoadChanged, OffersChanged
from shoal.domain.work import JobKind
from shoal.domain.worker import CHAT_ONLY, Offer, ServedModel, WorkerLoad
from shoal.ledger.keys import Signer, verify
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.tealenet.codec.extension import read_introduction
from shoal.protocols.tealenet.codec.hardware import NodeCapabilities
from shoal.protocols.tealenet.codec.relay_messages import (
    RegistrationProof,
    RelayRegister,
    RelayRegisterAck,
    RelayRegisterChallenge,
    challenge_text,
)
from shoal.protocols.tealenet.local_node import TealeLocalNode, worker_node
from shoal.protocols.tealenet.membership.node_directory import announced_key
from shoal.protocols.tealenet.membership.registration import (
    ACK_TIMEOUT,
    CHANGE_INTERVAL,
    REFRESH_INTERVAL,
    NodeRegistration,
)

HOST_ID = HOST.public_key.hex()
CHAT = Offer(CHAT_ONLY, frozenset({"m1"}), slots=2, context=4096)


def registration(own: TealeLocalNode | None = None) -> NodeRegistration:
    own = own or coordinator_side()
    assert own.identity is not None
    return NodeRegistration(own, own.identity, 0.0)


def said(given: NodeRegistration, now: float = 0.0) -> NodeCapabilities:
    """Return what a relay is told of us."""
    message = given.tick(now)
    assert message is not None
    text = json.dumps(message.capabilities)
    return msgspec.json.decode(text, type=NodeCapabilities)


def acknowledge(given: NodeRegistration, ttl: float = 300.0, now: float = 0.0) -> None:
    given.on_ack(RelayRegisterAck(HOST_ID, 1.0, ttl), now)


def test_what_is_registered_has_our_key_for_noise_signed() -> None:
    ours = read_introduction(said(registration()).shoal)

    assert ours is not None
    assert (ours.role, ours.name) == ("coordinator", "host")
    assert announced_key(HOST_ID, ours) == HOST.exchange_key
    assert not ours.token


@pytest.mark.parametrize(
    ("offers", "models", "slots", "context"),
    [
        ((), (), 1, None),
        ((CHAT,), ("m1",), 2, 4096),
        (
            (CHAT, replace(CHAT, models=frozenset({"a/b"}), slots=5, context=0)),
            ("a/b", "m1"),
            5,
            4096,
        ),
        ((replace(CHAT, kinds=frozenset({JobKind.EMBEDDING})),), (), 1, None),
        ((replace(CHAT, only_for=frozenset({"al"})),), (), 1, None),
        ((replace(CHAT, slots=0),), (), 1, None),
        ((replace(CHAT, models=frozenset({"x" * 300})),), (), 2, 4096),
    ],
)
def test_a_registration_lists_models_that_plain_peers_can_use(
    offers: tuple[Offer, ...], models: tuple[str, ...], slots: int, context: int | None
) -> None:
    given = registration()
    given.update(OffersChanged(offers))

    capabilities = said(given)

    assert capabilities.loaded_models == models
    assert capabilities.max_concurrent_requests == slots
    assert capabilities.effective_context == context


def test_a_worker_without_anything_to_offer_is_not_available() -> None:
    signer = Signer.from_seed(b"w" * 32)
    member = WorkerProfile(
        "w",
        ServedModel("m1"),
        1,
        identity=signer,
        random_bytes=deterministic_bytes(b"w"),
        epoch=EPOCH,
    )
    own = worker_node(member)
    given = registration(own)
    assert said(given).is_available

    given.update(OffersChanged(()))

    assert not said(given, CHANGE_INTERVAL).is_available


def test_a_coordinator_is_there_for_its_workers_with_nothing_to_offer() -> None:
    given = registration()
    assert said(given).is_available

    given.update(Draining("going home"))

    assert not said(given, CHANGE_INTERVAL).is_available


def test_the_first_registration_is_due_at_once_and_then_every_few_minutes() -> None:
    given = registration()

    assert given.tick(0.0) is not None
    assert given.tick(0.0) is None
    acknowledge(given)
    assert given.deadline == REFRESH_INTERVAL
    assert given.tick(REFRESH_INTERVAL) is not None


@pytest.mark.parametrize(
    ("ttl", "again"),
    [(300.0, 240.0), (100.0, 80.0), (0.0, CHANGE_INTERVAL), (1e9, REFRESH_INTERVAL)],
)
def test_a_short_lifetime_shortens_the_renewal(ttl: float, again: float) -> None:
    given = registration()
    given.tick(0.0)

    acknowledge(given, ttl)

    assert given.deadline == again


def test_a_relay_has_to_acknowledge_within_its_time() -> None:
    given = registration()
    given.tick(0.0)

    with pytest.raises(PeerError, match="did not acknowledge"):
        given.tick(ACK_TIMEOUT)


def test_an_expired_registration_has_a_new_timeout() -> None:
    given = registration()
    given.tick(0.0)
    acknowledge(given)

    given.on_expired(100.0)

    assert given.tick(100.0) is not None
    with pytest.raises(PeerError):
        given.tick(100.0 + ACK_TIMEOUT)


def test_a_change_of_load_alone_is_not_registered() -> None:
    given = registration()
    given.tick(0.0)
    acknowledge(given)

    given.update(LoadChanged(WorkerLoad(queued=7, speed=0.5)))
    assert given.deadline == REFRESH_INTERVAL
    given.update(LoadChanged(WorkerLoad(unfit="too hot")))

    assert given.deadline == CHANGE_INTERVAL


def test_a_challenge_is_answered_by_the_registration_with_a_proof() -> None:
    given = registration()
    first = given.tick(0.0)
    assert isinstance(first, RelayRegister)

    second = given.prove(RelayRegisterChallenge("once"))

    assert isinstance(second.shoal, RegistrationProof)
    text = challenge_text("once", HOST_ID)
    assert verify(HOST.public_key, bytes.fromhex(second.shoal.proof), text)
    assert msgspec.structs.replace(second, shoal=first.shoal) == first
