"""Rust nodes and Macs on a relay: they join, answer, change and leave."""

import base64
import json

from msgspec.structs import replace

from protocols.tealenet.network import HOST
from protocols.tealenet.recordings import case_of
from protocols.tealenet.relay_client.relay_nodes import (
    CHAT,
    HOST_ID,
    JOB,
    NODE_A,
    NODE_B,
    RUST_CAPABILITIES,
    RUST_REQUEST_ID,
    SECRET,
    SESSION,
    TEALE_MODEL,
    A,
    B,
    accept_session,
    addresses,
    chunk,
    mac,
    messages_to,
    open_pool,
    register,
    rust_node,
    send_in_session,
)
from shoal.domain.vocabulary import AnswerChunk, Completed, LoadChanged, OffersChanged
from shoal.ledger.keys import verify
from shoal.protocols.seam.peer_session import (
    PeerDescribed,
    PeerJoined,
    PeerLeft,
    PeerMessage,
    Protection,
)
from shoal.protocols.tealenet.relay_client.encryption import ANSWER_TIMEOUT
from shoal.protocols.tealenet.relay_client.node import (
    DISCOVER_INTERVAL,
    DISCOVER_INTERVAL_MIN,
)

# Rust nodes: they serve one request at a time, and need no hello.


def test_a_rust_node_is_dialled_and_joins_with_its_capabilities() -> None:
    net, host = open_pool()

    node = rust_node(net)
    accept_session(net, node, B)

    (joined,) = host.messages(PeerJoined, B)
    assert (joined.name, joined.protection) == (B, Protection.PLAIN)
    (offered,) = host.messages(OffersChanged, B)
    (offer,) = offered.offers
    assert (offer.models, offer.slots, offer.context) == (frozenset({"a"}), 1, 32768)
    assert not [each for each in messages_to(node) if "hello" in each]


def test_a_rust_node_answers_as_in_the_recordings() -> None:
    net, host = open_pool()
    node = rust_node(net)
    session_id = accept_session(net, node, B)

    net.send(host, B, replace(JOB, work=replace(CHAT, model="a")))
    (request,) = [each for each in messages_to(node) if "inferenceRequest" in each]
    run = request["inferenceRequest"]["_0"]
    complete = case_of("cluster_rust_emits/inferenceComplete_tokens")["json_text"]
    for text in (
        chunk(run["requestID"], "Hello"),
        chunk(run["requestID"], "!"),
        chunk(run["requestID"], "", "length"),
    ):
        send_in_session(net, node, B, session_id, text)
    send_in_session(
        net,
        node,
        B,
        session_id,
        complete.replace(RUST_REQUEST_ID, run["requestID"]),
    )

    assert run["request"]["messages"] == [{"role": "user", "content": SECRET}]
    pieces = [each.pieces for each in host.messages(AnswerChunk, B)]
    assert pieces == [["Hello"], ["!"]]
    (completed,) = host.messages(Completed, B)
    assert (completed.job_id, completed.finish_reason) == (JOB.job_id, "length")


def test_changed_models_of_a_node_are_reported() -> None:
    net, host = open_pool()
    node = rust_node(net)
    accept_session(net, node, B)

    register(net, node, NODE_B, loadedModels=["a", "b"])
    net.run(DISCOVER_INTERVAL)

    (_, offered) = host.messages(OffersChanged, B)
    assert [each.models for each in offered.offers] == [{"a", "b"}]


def test_an_unavailable_node_is_unfit() -> None:
    net, host = open_pool()
    node = rust_node(net)
    accept_session(net, node, B)

    register(net, node, NODE_B, isAvailable=False)
    net.run(DISCOVER_INTERVAL)
    register(net, node, NODE_B, isAvailable=True)
    net.run(DISCOVER_INTERVAL)

    conditions = [each.load.unfit for each in host.messages(LoadChanged)]
    assert conditions == ["not available", ""]


def test_a_disconnected_peer_leaves_once() -> None:
    net, host = open_pool()
    node = rust_node(net)
    accept_session(net, node, B)
    net.send(host, B, replace(JOB, work=replace(CHAT, model="a")))

    net.detach(node)
    net.run(20.0)

    assert len(host.messages(PeerLeft)) == 1


def test_an_error_that_names_no_peer_ends_none() -> None:
    net, host = open_pool()
    accept_session(net, rust_node(net), B)

    error = {"code": "peer_not_found", "message": "no such peer"}

    assert host.node.receive([json.dumps({"error": error})], net.now) == []


def test_a_peer_unknown_to_the_relay_leaves() -> None:
    net, host = open_pool()
    node = rust_node(net)
    accept_session(net, node, B)

    error = {"code": "peer_not_found", "message": f"Peer {B} is not connected"}
    received = host.node.receive([json.dumps({"error": error})], net.now)

    assert [
        type(each.message) for each in received if isinstance(each, PeerMessage)
    ] == [PeerLeft]


# Macs: they prefer a direct connection, and have their own encrypted channel.


def test_the_answer_to_a_macs_offer_keeps_it_on_the_relay() -> None:
    net, _ = open_pool()
    end = mac(net)

    offer = json.loads(case_of("relay_swift_emits/offer")["json_text"])["offer"]
    net.send_raw(end, "offer", offer | {"toNodeID": HOST_ID})

    (answer,) = end.payloads("answer")
    assert answer["sessionID"] == offer["sessionID"]
    assert answer["connectionInfo"] == {
        "publicIP": "",
        "publicPort": 0,
        "natType": "symmetric",
        "wgPublicKey": HOST.exchange_key.hex(),
    }
    signed = f"{HOST_ID}:{A}:{offer['sessionID']}".encode()
    assert verify(HOST.public_key, bytes.fromhex(answer["signature"]), signed)


def test_a_mac_may_open_its_session_again() -> None:
    net, host = open_pool()
    end = mac(net)

    net.send_raw(end, "relayOpen", addresses(A, SESSION))
    net.send_raw(end, "relayOpen", addresses(A, SESSION))

    assert len(end.payloads("relayReady")) == 2
    assert not host.notices


def test_a_mac_that_ignores_the_handshake_gets_plain_messages() -> None:
    net, host = open_pool()
    end = mac(net)
    net.run(DISCOVER_INTERVAL)

    session_id = accept_session(net, end, A)
    (offer,) = (base64.b64decode(each["data"]) for each in end.payloads("relayData"))
    assert (offer[0], len(offer)) == (1, 109)
    assert not host.messages(PeerJoined)
    net.run(ANSWER_TIMEOUT)

    (joined,) = host.messages(PeerJoined)
    assert (joined.name, joined.protection) == (A, Protection.PLAIN)
    (offered,) = host.messages(OffersChanged)
    assert [each.models for each in offered.offers] == [{TEALE_MODEL}]
    net.send(host, A, replace(JOB, work=replace(CHAT, model=TEALE_MODEL)))
    assert "inferenceRequest" in json.dumps(messages_to(end, session_id))


def test_a_mac_with_a_session_is_not_dialled() -> None:
    net, host = open_pool()
    end = mac(net)
    heartbeat = case_of("cluster_swift_emits/heartbeat_full")["json_text"]
    net.send_raw(end, "relayOpen", addresses(A, SESSION))
    send_in_session(net, end, A, SESSION, heartbeat)

    net.run(DISCOVER_INTERVAL + 1)

    assert not end.payloads("relayOpen")
    assert {TEALE_MODEL} in [
        each.models
        for message in host.messages(OffersChanged)
        for each in message.offers
    ]
    net.send(host, A, replace(JOB, work=replace(CHAT, model=TEALE_MODEL)))
    assert "inferenceRequest" in json.dumps(messages_to(end, SESSION))


def test_a_mac_gets_jobs_in_its_session_at_once() -> None:
    net, host = open_pool()
    end = mac(net)
    net.run(DISCOVER_INTERVAL_MIN + 1)  # it is described, and has been dialled
    heartbeat = case_of("cluster_swift_emits/heartbeat_full")["json_text"]
    net.send_raw(end, "relayOpen", addresses(A, SESSION))
    send_in_session(net, end, A, SESSION, heartbeat)

    net.send(host, A, replace(JOB, work=replace(CHAT, model=TEALE_MODEL)))

    assert "inferenceRequest" in json.dumps(messages_to(end, SESSION))


def test_a_silent_mac_leaves() -> None:
    net, host = open_pool()
    end = mac(net)
    net.run(DISCOVER_INTERVAL)
    accept_session(net, end, A)
    net.run(ANSWER_TIMEOUT)

    net.run(50.0)
    assert host.messages(LoadChanged)[-1].load.unfit
    net.run(50.0)

    assert len(host.messages(PeerLeft)) == 1


# What nodes say about themselves.


def test_a_relay_describes_its_nodes_by_their_display_names() -> None:
    net, host = open_pool()
    node = rust_node(net)
    accept_session(net, node, B)
    net.run(3 * DISCOVER_INTERVAL)

    (described,) = host.messages(PeerDescribed, B)
    hardware = described.profile.hardware
    assert described.profile.name == "n"
    assert hardware is not None
    assert hardware.memory_gb == RUST_CAPABILITIES["hardware"]["totalRAMGB"]


def test_a_node_that_the_relay_has_not_described_yet_is_described_later() -> None:
    net, host = open_pool()
    net.run(DISCOVER_INTERVAL)
    gateway = net.attach_raw()
    register(net, gateway, NODE_A, loadedModels=[])
    net.send_raw(gateway, "relayOpen", addresses(A, SESSION))
    send_in_session(net, gateway, A, SESSION, '{"heartbeat":{}}')
    joined = host.messages(PeerJoined, A)
    before = host.messages(PeerDescribed, A)

    net.run(DISCOVER_INTERVAL)

    assert (len(joined), before) == (1, [])
    assert [each.profile.name for each in host.messages(PeerDescribed, A)] == ["n"]


def test_a_hello_of_a_relays_node_describes_it() -> None:
    net, host = open_pool()
    node = rust_node(net)
    session_id = accept_session(net, node, B)
    net.run(1.0)
    hello = case_of("cluster_rust_emits/hello")["json_text"]

    send_in_session(net, node, B, session_id, hello)

    profile = host.messages(PeerDescribed, B)[-1].profile
    assert profile.protocol_version == 1
    assert profile.registered_at is not None
