"""Which nodes of a relay a coordinator dials, and when it dials them again."""

import base64
import json

import pytest

from protocols.tealenet.network import local_coordinator
from protocols.tealenet.relay_client.relay_nodes import (
    CHAT,
    HOST_ID,
    JOB,
    NODE_A,
    NODE_B,
    OTHER_SESSION,
    RUST_REQUEST,
    SESSION,
    A,
    B,
    accept_session,
    addresses,
    gateway,
    held,
    open_pool,
    opened,
    register,
    rust_node,
    send_in_session,
)
from shoal.domain.vocabulary import Dismiss, OffersChanged, RunJob
from shoal.domain.worker import CHAT_ONLY, Offer
from shoal.protocols.seam.peer_session import (
    ALL_PEERS,
    PeerJoined,
    PeerLeft,
    PeerMessage,
    Protection,
    ToPeer,
)
from shoal.protocols.seam.session import Send
from shoal.protocols.tealenet.local_node import Config
from shoal.protocols.tealenet.relay_client import peers as relay_dialer
from shoal.protocols.tealenet.relay_client.node import (
    DISCOVER_INTERVAL,
    DISCOVER_INTERVAL_MIN,
)
from shoal.protocols.tealenet.relay_client.peer import RelayPeer
from shoal.protocols.tealenet.relay_client.peers import (
    DIAL_INTERVAL,
    DISMISSED_PAUSE,
    LINGER,
    REDIAL_FIRST,
)
from shoal.protocols.tealenet.relay_client.session import READY_TIMEOUT


def test_two_coordinators_join_once_and_exchange_offers() -> None:
    net, host = open_pool()
    other = net.attach(local_coordinator(Config(open=True), signer=NODE_A))
    offers = (Offer(CHAT_ONLY, frozenset({"m1"})),)

    net.send(host, ALL_PEERS, OffersChanged(offers))
    net.run(3 * DISCOVER_INTERVAL)

    assert len(opened(net)) == 1
    for end in (host, other):
        (joined,) = end.messages(PeerJoined)
        assert joined.protection is Protection.TEALE
    (offer,) = other.messages(OffersChanged)[-1].offers
    assert offer.models == {"m1"}
    net.send(other, HOST_ID, JOB)
    assert [each.work for each in host.messages(RunJob)] == [CHAT]


def test_two_coordinators_that_dial_each_other_stay_connected() -> None:
    net, host = open_pool()
    other = net.attach(local_coordinator(Config(open=True), signer=NODE_A))
    for end in (host, other):
        offers = (Offer(CHAT_ONLY, frozenset({end.node.id[:8]})),)
        net.send(end, ALL_PEERS, OffersChanged(offers))

    net.run(20 * DISCOVER_INTERVAL)

    for end, peer in ((host, A), (other, HOST_ID)):
        assert len(end.messages(PeerJoined, peer)) == 1
        assert not end.messages(PeerLeft)
        (offer,) = end.messages(OffersChanged, peer)[-1].offers
        assert offer.models == {peer[:8]}
        net.send(end, peer, JOB)
    assert len(host.messages(RunJob)) == len(other.messages(RunJob)) == 1


def test_a_dismissed_peer_is_not_dialled_for_a_while() -> None:
    net, host = open_pool()
    node = rust_node(net)
    accept_session(net, node, B)
    assert len(host.messages(PeerJoined)) == 1

    net.send(host, B, Dismiss("another connection has taken its place"))
    net.run(DISMISSED_PAUSE - DISCOVER_INTERVAL)

    assert node.payloads("relayClose")
    assert host.messages(PeerLeft, B) == [
        PeerLeft("another connection has taken its place")
    ]
    assert len(node.payloads("relayOpen")) == 1
    net.run(2 * DISCOVER_INTERVAL)
    assert len(node.payloads("relayOpen")) == 2


def test_a_peer_leaves_before_it_comes_back() -> None:
    net, host = open_pool()
    node = rust_node(net)
    accept_session(net, node, B)
    ends = addresses(B, SESSION)
    request = base64.b64encode(RUST_REQUEST.encode()).decode()
    back = [{"relayOpen": ends}, {"relayData": ends | {"data": request}}]

    host.node.send(ToPeer(B, Dismiss("another connection has taken its place")), 0.0)
    received = host.node.receive([json.dumps(each) for each in back], net.now)

    reported = [each.message for each in received if isinstance(each, PeerMessage)]
    assert [type(each) for each in reported[:2]] == [PeerLeft, PeerJoined]


def test_a_peer_that_came_back_after_its_dismissal_leaves_again() -> None:
    net, host = open_pool()
    node = rust_node(net)
    net.send_raw(node, "relayOpen", addresses(B, SESSION))
    send_in_session(net, node, B, SESSION, RUST_REQUEST)
    net.run(READY_TIMEOUT - REDIAL_FIRST / 2)  # the dialled session is over by now

    net.send(host, B, Dismiss("another connection has taken its place"))
    net.send_raw(node, "relayOpen", addresses(B, OTHER_SESSION))
    send_in_session(net, node, B, OTHER_SESSION, RUST_REQUEST)
    assert len(host.messages(PeerJoined, B)) == 2
    net.send_raw(node, "relayClose", addresses(B, OTHER_SESSION))
    assert len(host.messages(PeerLeft, B)) == 1
    net.run(LINGER + 1)

    assert len(host.messages(PeerLeft, B)) == 2


def test_what_sending_causes_is_received_at_the_next_tick() -> None:
    net, host = open_pool()
    accept_session(net, rust_node(net), B)

    outputs = host.node.send(ToPeer(B, Dismiss("leave")), net.now)

    assert [type(each) for each in outputs] == [Send]
    assert host.node.deadline == net.now
    assert PeerMessage(B, PeerLeft("leave")) in host.node.tick(net.now)


def test_a_node_is_not_dialled_again_before_it_has_answered() -> None:
    net, _ = open_pool()
    node = rust_node(net)

    register(net, net.attach_raw(), NODE_A)
    net.run(DISCOVER_INTERVAL_MIN)

    assert len(node.payloads("relayOpen")) == 1
    assert len(opened(net)) == 2


def test_nodes_are_dialled_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_dialer, "DIALS_MAX", 1)
    net, _ = open_pool()
    for signer in (NODE_A, NODE_B):
        register(net, net.attach_raw(), signer)

    net.run(DISCOVER_INTERVAL_MIN + DIAL_INTERVAL / 2)
    assert len(opened(net)) == 1
    net.run(DIAL_INTERVAL)

    assert len(opened(net)) == 2


def test_a_node_is_dialled_again_once_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, _ = open_pool()
    node = rust_node(net)
    session_id = accept_session(net, node, B)

    with monkeypatch.context() as full:
        full.setattr(relay_dialer, "SESSIONS_MAX", 0)
        net.send_raw(node, "relayClose", addresses(B, session_id))
        net.run(REDIAL_FIRST + 2 * DIAL_INTERVAL)
        assert len(opened(net)) == 1
    net.run(2 * DIAL_INTERVAL)

    assert len(opened(net)) == 2


def test_a_node_without_a_session_may_leave() -> None:
    net, host = open_pool()
    node = rust_node(net, loadedModels=[])

    net.detach(node)
    net.run(1.0)

    assert not opened(net)
    assert (host.received, host.closed) == ([], None)


def test_a_peer_that_closes_its_session_is_dialled_again() -> None:
    net, host = open_pool()
    node = rust_node(net)
    session_id = accept_session(net, node, B)

    net.send_raw(node, "relayClose", addresses(B, session_id))
    assert [each.reason for each in host.messages(PeerLeft)] == [
        "the peer closed the session"
    ]
    net.run(2.0)

    assert len(node.payloads("relayOpen")) == 2
    accept_session(net, node, B)
    assert len(host.messages(PeerJoined)) == 2


def test_a_peer_that_had_joined_is_dialled_again_without_a_longer_delay() -> None:
    net, _ = open_pool()
    node = rust_node(net)

    for dials in range(1, 6):
        session_id = accept_session(net, node, B)
        net.send_raw(node, "relayClose", addresses(B, session_id))
        net.run(1.5 * REDIAL_FIRST)
        assert len(node.payloads("relayOpen")) == dials + 1


def test_sessions_that_a_peer_opened_do_not_delay_its_being_dialled() -> None:
    net, _ = open_pool()
    end = gateway(net)
    for number in range(10):
        session_id = f"{SESSION}{number}"
        net.send_raw(end, "relayOpen", addresses(B, session_id))
        net.send_raw(end, "relayClose", addresses(B, session_id))
    assert not end.payloads("relayOpen")

    register(net, end, NODE_B)
    net.run(DISCOVER_INTERVAL + 1)

    assert end.payloads("relayOpen")


def test_a_peer_without_sessions_is_not_held() -> None:
    net, _ = open_pool()
    before = held(RelayPeer)
    end = gateway(net)
    net.send_raw(end, "relayOpen", addresses(B, SESSION))
    assert held(RelayPeer) == before + 1

    net.send_raw(end, "relayClose", addresses(B, SESSION))
    net.run(LINGER + 1)

    assert held(RelayPeer) == before


def test_a_peer_that_is_never_ready_is_dialled_with_increasing_delays() -> None:
    net, host = open_pool()
    node = rust_node(net)

    net.run(100.0)

    assert not host.messages(PeerJoined)
    dials = len(node.payloads("relayOpen"))
    assert 4 <= dials <= 8
    assert len(node.payloads("relayClose")) in (dials, dials - 1)
    net.run(200.0)
    assert len(node.payloads("relayOpen")) <= dials + 4
