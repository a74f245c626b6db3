"""A node registers with its relay, and trusts no message of it."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from protocols.contexts import require_token
from protocols.tealenet.network import Network, local_coordinator
from protocols.tealenet.recordings import case_of
from protocols.tealenet.relay_client.relay_nodes import (
    HOST_ID,
    NODE_B,
    SESSION,
    A,
    B,
    addresses,
    open_pool,
    registrations,
)
from shoal.domain.vocabulary import LoadChanged, OffersChanged
from shoal.domain.worker import CHAT_ONLY, Offer, WorkerLoad
from shoal.protocols.seam.peer_session import ALL_PEERS
from shoal.protocols.seam.session import Notice, Send
from shoal.protocols.tealenet.local_node import Config
from shoal.protocols.tealenet.relay_client.node import (
    DISCOVER_INTERVAL,
    INVALID_MAX,
    RelayNode,
)
from shoal.protocols.tealenet.relay_client.registration import (
    ACK_TIMEOUT,
    REFRESH_INTERVAL,
)


def test_a_node_registers_as_in_the_recordings() -> None:
    case = case_of("identity/1")
    net = Network()

    net.attach(local_coordinator(signer=NODE_B))

    payload = json.loads(net.carried[0])["register"]
    assert payload["nodeID"] == payload["publicKey"] == case["nodeID"]
    assert payload["wgPublicKey"] == case["wgPublicKey"]
    assert payload["signature"] == case["register_signature"]


@pytest.mark.parametrize(
    ("config", "noticed"), [(Config(), True), (Config(open=True), False)]
)
def test_a_coordinator_that_admits_no_relay_node_gets_a_notice(
    config: Config, noticed: bool
) -> None:
    node = RelayNode(local_coordinator(config, admission=require_token("tok")), 0.0)
    node.tick(0.0)
    ack = {"nodeID": node.id, "registeredAt": 0, "ttlSeconds": 300}

    received = [
        each
        for _ in range(2)
        for each in node.receive([json.dumps({"registerAck": ack})], 1.0)
        if isinstance(each, Notice)
    ]

    assert [("--tealenet-open" in each.text) for each in received] == [True] * noticed


def test_a_node_registers_again_before_its_registration_expires() -> None:
    net, _ = open_pool()
    count = registrations(net)

    net.run(REFRESH_INTERVAL - 1)
    assert registrations(net) == count
    net.run(2)

    assert registrations(net) == count + 1


def test_changes_of_models_are_registered_together() -> None:
    net, host = open_pool()
    count = registrations(net)

    for name in ("m1", "m2", "m3"):
        offers = (Offer(CHAT_ONLY, frozenset({name}), slots=4, context=8192),)
        net.send(host, ALL_PEERS, OffersChanged(offers))
    net.run(5.0)

    assert registrations(net) == count + 1
    registration = json.loads(
        [t for t in net.carried if t.startswith('{"register"')][-1]
    )
    capabilities = registration["register"]["capabilities"]
    assert capabilities["loadedModels"] == ["m3"]
    assert capabilities["maxConcurrentRequests"] == 4
    assert capabilities["effectiveContext"] == 8192


def test_a_node_without_capacity_registers_as_unavailable() -> None:
    net, host = open_pool()

    net.send(host, ALL_PEERS, LoadChanged(WorkerLoad(unfit="too hot")))
    net.run(5.0)

    registration = json.loads(
        [t for t in net.carried if t.startswith('{"register"')][-1]
    )
    assert registration["register"]["capabilities"]["isAvailable"] is False


def test_a_node_discovers_others_periodically() -> None:
    net, host = open_pool()

    net.run(5 * DISCOVER_INTERVAL)

    assert host.node.tick(net.now) == []  # however often it is called
    requests = [text for text in net.carried if text.startswith('{"discover"')]
    assert len(requests) == 6


def test_a_missing_acknowledgement_closes_the_connection() -> None:
    node = RelayNode(local_coordinator(), 0.0)
    node.tick(0.0)
    assert node.deadline == ACK_TIMEOUT

    (close,) = node.tick(ACK_TIMEOUT)

    assert "did not acknowledge" in str(close)
    assert node.deadline is None
    assert not node.tick(100.0)
    assert not node.receive(['{"registerAck":{}}'], 100.0)


def test_a_refused_registration_closes_the_connection() -> None:
    node = RelayNode(local_coordinator(), 0.0)
    node.tick(0.0)
    error = {"error": {"code": "invalid_register", "message": "no room"}}

    (close,) = node.receive([json.dumps(error)], 0.0)

    assert "refuses the registration: no room" in str(close)


def test_a_node_whose_registration_expired_registers_again() -> None:
    net, host = open_pool()
    count = registrations(net)
    error = {"code": "registration_expired", "message": "register again"}

    host.node.receive([json.dumps({"error": error})], net.now)
    net.run(3.0)

    assert registrations(net) == count + 1


def test_too_many_invalid_messages_close_the_connection() -> None:
    node = RelayNode(local_coordinator(), 0.0)
    node.tick(0.0)

    received = [each for _ in range(INVALID_MAX) for each in node.receive(["no"], 0.0)]

    assert "invalid messages of the relay in a row" in str(received[-1])
    assert node.deadline is None


# Untrusted relays.


@given(st.lists(st.text() | st.binary(), max_size=5))
def test_garbage_of_a_relay_raises_nothing(garbage: list[Any]) -> None:
    node = RelayNode(local_coordinator(), 0.0)
    node.tick(0.0)

    node.receive(garbage, 0.0)


PARTS = st.sampled_from([A, B, HOST_ID, SESSION, "", "x" * 300, None, 7])


@settings(max_examples=examples(0.4))
@given(
    st.sampled_from(
        ["relayOpen", "relayReady", "relayData", "relayClose", "offer", "peerLeft"]
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "fromNodeID": PARTS,
            "toNodeID": PARTS,
            "sessionID": PARTS,
            "nodeID": PARTS,
            "displayName": PARTS,
            "data": PARTS | st.lists(st.integers()),
        },
    ),
)
def test_messages_with_arbitrary_fields_raise_nothing(kind: str, payload: Any) -> None:
    node = RelayNode(local_coordinator(Config(open=True)), 0.0)
    node.tick(0.0)
    opening = {"relayOpen": addresses(B, SESSION)}
    node.receive([json.dumps(opening)], 0.0)

    for _ in range(2):
        outputs = node.receive([json.dumps({kind: payload})], 0.0)
        assert all(isinstance(o.data, str) for o in outputs if isinstance(o, Send))
