import json
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from protocols.tealenet.network import (
    EPOCH,
    HOST,
    deterministic_bytes,
    local_coordinator,
)
from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import Draining, LoadChanged, OffersChanged
from shoal.domain.work import JobKind
from shoal.domain.worker import CHAT_ONLY, Hardware, Offer, ServedModel, WorkerLoad
from shoal.ledger.keys import Signer
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.tealenet.codec.hardware import NodeCapabilities
from shoal.protocols.tealenet.codec.relay_messages import (
    CAPABILITIES_MAX,
    REGISTRATION_MAX,
    RelayRegisterAck,
    encode,
)
from shoal.protocols.tealenet.codec.scalars import MODELS_MAX
from shoal.protocols.tealenet.local_node import TealeLocalNode, worker_node
from shoal.protocols.tealenet.relay_client.registration import (
    ACK_TIMEOUT,
    CHANGE_INTERVAL,
    REFRESH_INTERVAL,
    NodeRegistration,
    fitting_names,
)

HOST_ID = HOST.public_key.hex()
CHAT = Offer(CHAT_ONLY, frozenset({"m1"}), slots=2, context=4096)


def registration(local: TealeLocalNode | None = None) -> NodeRegistration:
    local = local or local_coordinator()
    assert local.identity is not None
    return NodeRegistration(local, local.identity, 0.0)


def registered(node: NodeRegistration, now: float = 0.0) -> NodeCapabilities:
    """Return the registered capabilities."""
    message = node.tick(now)
    assert message is not None
    text = json.dumps(message.capabilities)
    return msgspec.json.decode(text, type=NodeCapabilities)


def acknowledge(node: NodeRegistration, ttl: float = 300.0, now: float = 0.0) -> None:
    node.on_ack(RelayRegisterAck(HOST_ID, 1.0, ttl), now)


@pytest.mark.parametrize(
    ("offers", "models", "slots", "context"),
    [
        ((), (), 1, None),
        ((CHAT,), ("m1",), 2, 4096),
        (
            (
                CHAT,
                structs.replace(CHAT, models=frozenset({"a/b"}), slots=5, context=0),
            ),
            ("a/b", "m1"),
            5,
            4096,
        ),
        ((structs.replace(CHAT, kinds=frozenset({JobKind.EMBEDDING})),), (), 1, None),
        ((structs.replace(CHAT, only_for=frozenset({"al"})),), (), 1, None),
        ((structs.replace(CHAT, slots=0),), (), 1, None),
        ((structs.replace(CHAT, models=frozenset({"x" * 300})),), (), 2, 4096),
    ],
)
def test_a_registration_lists_models_that_plain_peers_can_use(
    offers: tuple[Offer, ...], models: tuple[str, ...], slots: int, context: int | None
) -> None:
    node = registration()
    node.update(OffersChanged(offers))

    capabilities = registered(node)

    assert capabilities.loaded_models == models
    assert capabilities.max_concurrent_requests == slots
    assert capabilities.effective_context == context


def test_a_worker_without_offers_is_unavailable() -> None:
    signer = Signer.from_seed(b"w" * 32)
    profile = WorkerProfile(
        "w",
        ServedModel("m1"),
        1,
        identity=signer,
        random_bytes=deterministic_bytes(b"w"),
        epoch=EPOCH,
    )
    local = worker_node(profile)
    node = registration(local)
    assert registered(node).is_available

    node.update(OffersChanged(()))

    assert not registered(node, CHANGE_INTERVAL).is_available


def test_a_coordinator_without_offers_is_available() -> None:
    node = registration()
    assert registered(node).is_available

    node.update(Draining("going home"))

    assert not registered(node, CHANGE_INTERVAL).is_available


def test_a_registration_is_due_at_once_and_then_periodically() -> None:
    node = registration()

    assert node.tick(0.0) is not None
    assert node.tick(0.0) is None
    acknowledge(node)
    assert node.deadline == REFRESH_INTERVAL
    assert node.tick(REFRESH_INTERVAL) is not None


@pytest.mark.parametrize(
    ("ttl", "renewed_at"),
    [(300.0, 240.0), (100.0, 80.0), (0.0, CHANGE_INTERVAL), (1e9, REFRESH_INTERVAL)],
)
def test_a_short_lifetime_shortens_the_renewal(ttl: float, renewed_at: float) -> None:
    node = registration()
    node.tick(0.0)

    acknowledge(node, ttl)

    assert node.deadline == renewed_at


def test_a_missing_acknowledgement_is_an_error() -> None:
    node = registration()
    node.tick(0.0)

    with pytest.raises(PeerError, match="did not acknowledge"):
        node.tick(ACK_TIMEOUT)


def test_an_expired_registration_has_a_new_timeout() -> None:
    node = registration()
    node.tick(0.0)
    acknowledge(node)

    node.on_expired(100.0)

    assert node.tick(100.0) is not None
    with pytest.raises(PeerError):
        node.tick(100.0 + ACK_TIMEOUT)


def test_a_change_of_load_alone_is_not_registered() -> None:
    node = registration()
    node.tick(0.0)
    acknowledge(node)

    node.update(LoadChanged(WorkerLoad(queued=7, speed=0.5)))
    assert node.deadline == REFRESH_INTERVAL
    node.update(LoadChanged(WorkerLoad(unfit="too hot")))

    assert node.deadline == CHANGE_INTERVAL


def test_a_registration_of_many_models_fits_into_the_relays_limits() -> None:
    # Nothing takes more bytes in JSON than a control character.
    hardware = Hardware("\x01" * 999, chip_family="\x01" * 999, gpu_backend="\x01" * 99)
    local = replace(local_coordinator(), name="\x01" * 999, hardware=hardware)
    models = frozenset(f"{number:04}" + "\x01" * 250 for number in range(MODELS_MAX))
    node = registration(replace(local, offers=(structs.replace(CHAT, models=models),)))

    message = node.tick(0.0)

    assert message is not None
    assert len(msgspec.json.encode(message.capabilities)) <= CAPABILITIES_MAX
    assert len(encode(message)) < REGISTRATION_MAX
    assert [*message.capabilities["loadedModels"]] == sorted(models)[:27]


def test_names_fit_into_their_size_to_the_byte() -> None:
    assert fitting_names(["a", "b"], len('"a","b",')) == ["a", "b"]
    assert fitting_names(["a", "b"], len('"a","b"')) == ["a"]
