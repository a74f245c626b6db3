"""A node registers with its relay, and trusts no message of it."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from protocols.contexts import require_token
from protocols.session_pair import sent
from protocols.tealenet.membership.relay_nodes import (
    HOST_ID,
    NODE_B,
    RUST_CAPABILITIES,
    RUST_REQUEST,
    SESSION,
    A,
    B,
    addresses,
    local_worker,
    open_pool,
    pool,
    registrations,
)
from protocols.tealenet.network import HOST, Network, local_coordinator
from protocols.tealenet.recordings import case_of
from shoal.domain.vocabulary import HealthReported, LoadChanged, OffersChanged
from shoal.domain.worker import CHAT_ONLY, MachineHealth, Offer, WorkerLoad
from shoal.ledger.keys import Signer, verify
from shoal.protocols.seam.peer_session import ALL_PEERS
from shoal.protocols.seam.session import Notice, Send
from shoal.protocols.tealenet.codec.signatures import encode_base64, noise_binding
from shoal.protocols.tealenet.config import Config
from shoal.protocols.tealenet.membership.node_directory import PinnedKeys
from shoal.protocols.tealenet.membership.registration import (
    ACK_TIMEOUT,
    CHANGE_INTERVAL,
    REFRESH_INTERVAL,
)
from shoal.protocols.tealenet.membership.relay_node import (
    DISCOVER_INTERVAL,
    INVALID_MAX,
    RelayNode,
)


def test_a_node_registers_as_in_the_recordings() -> None:
    case = case_of("identity/1")
    net = Network()

    net.attach(local_coordinator(signer=NODE_B))

    (payload, _) = (json.loads(text)["register"] for text in net.carried[:2])
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


def test_a_node_answers_the_challenge_of_a_relay() -> None:
    net = Network()
    net.attach(local_coordinator())

    first, second, *_ = (json.loads(text) for text in net.carried)

    assert "shoal" not in first["register"]
    proof = second["register"]["shoal"]
    text = f"shoal relay register 1:{proof['challenge']}:{HOST_ID}".encode()
    assert verify(HOST.public_key, bytes.fromhex(proof["proof"]), text)


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


def test_the_health_of_a_node_is_no_reason_to_register_again() -> None:
    net, _, worker, _ = pool()
    before = registrations(net)

    net.send(worker, ALL_PEERS, HealthReported(MachineHealth()))
    net.run(CHANGE_INTERVAL + 1.0)

    assert registrations(net) == before


# Untrusted relays.


def test_a_node_with_a_pinned_key_must_encrypt() -> None:
    local, worker_id = local_worker()
    assert local.identity is not None
    pinned_keys = PinnedKeys({worker_id: local.identity.exchange_key})
    node = RelayNode(local_coordinator(Config(open=True)), 0.0, pinned_keys)
    node.tick(0.0)

    opening = {"relayOpen": addresses(worker_id, SESSION)}
    data = base64.b64encode(RUST_REQUEST.encode()).decode()
    request = {"relayData": addresses(worker_id, SESSION) | {"data": data}}
    received = node.receive([json.dumps(opening), json.dumps(request)], 0.0)

    assert [type(each) for each in received] == [Send, Notice]
    assert "no encryption from a peer" in str(received[1])


def test_an_invalid_key_of_a_node_affects_only_that_node() -> None:
    net, host = open_pool()
    signers = (Signer.from_seed(bytes([n]) * 32) for n in range(99))
    attacker = next(each for each in signers if each.public_key.hex() < HOST_ID)
    node_id = attacker.public_key.hex()
    proof = encode_base64(attacker.sign(noise_binding(bytes(32))))
    introduction = {
        "version": 1,
        "role": "coordinator",
        "noise": bytes(32).hex(),
        "noise_proof": proof,
    }
    known = {
        "nodeID": node_id,
        "publicKey": node_id,
        "displayName": "n",
        "capabilities": RUST_CAPABILITIES | {"shoal": introduction},
        "lastSeen": 1.0,
    }
    text = json.dumps({"discoverResponse": {"peers": [known]}})
    (call,) = sent(host.node.receive([text], net.now))
    session_id = json.loads(call)["relayOpen"]["sessionID"]

    ready = {"relayReady": addresses(node_id, session_id)}
    (answer,) = sent(host.node.receive([json.dumps(ready)], net.now))

    assert "relayClose" in str(answer)
    assert host.node.deadline is not None


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
