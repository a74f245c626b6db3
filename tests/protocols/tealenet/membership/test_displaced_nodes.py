"""Nodes whose id another connection takes at a relay that reports no departure."""

from dataclasses import replace

import pytest

from protocols.tealenet.membership.relay_nodes import (
    HOST_ID,
    JOB,
    NODE_B,
    SESSION,
    B,
    accept_session,
    addresses,
    local_worker,
    rust_node,
    send_in_session,
)
from protocols.tealenet.network import (
    Network,
    ShoalNode,
    deterministic_bytes,
    local_coordinator,
)
from shoal.domain.vocabulary import CancelJob, RunJob
from shoal.protocols.seam.peer_session import PeerJoined, PeerLeft
from shoal.protocols.tealenet.config import Config
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.peer_state import PROBE_TIMEOUT

WORKER, WORKER_ID = local_worker(token="")
COORDINATOR = local_coordinator(Config(open=True))
SECONDS = 4.0  # in which a node is dialled again


def running() -> tuple[Network, ShoalNode, ShoalNode]:
    """Return a coordinator and a worker on an original relay, which runs a job."""
    net = Network(original=True)
    worker = net.attach(WORKER)
    host = net.attach(COORDINATOR)
    net.run(SECONDS)
    net.send(host, WORKER_ID, JOB)
    assert worker.messages(RunJob)
    return net, host, worker


def restarted(local: TealeLocalNode) -> TealeLocalNode:
    return replace(local, random_bytes=deterministic_bytes(b"restarted"))


def forge(net: Network, node_id: str) -> None:
    """Take the id of a node, by a connection that answers nothing."""
    net.send_raw(
        net.attach_raw(),
        "register",
        {"nodeID": node_id, "displayName": "forged", "capabilities": {}},
    )


def test_a_worker_that_returns_on_a_new_connection_is_joined_anew() -> None:
    net, host, worker = running()

    newer = net.attach(restarted(WORKER))
    net.run(SECONDS)

    assert worker.closed
    assert len(host.messages(PeerLeft, WORKER_ID)) == 1
    assert len(host.messages(PeerJoined, WORKER_ID)) == 2
    net.send(host, WORKER_ID, JOB)
    assert newer.messages(RunJob)


def test_a_coordinator_that_returns_on_a_new_connection_ends_its_old_jobs() -> None:
    net, host, worker = running()

    newer = net.attach(restarted(COORDINATOR))
    net.run(SECONDS)

    assert host.closed
    assert len(worker.messages(CancelJob)) == 1
    assert newer.messages(PeerJoined, WORKER_ID)


@pytest.mark.parametrize("displaced", [WORKER_ID, HOST_ID])
def test_a_forged_node_is_noticed_although_it_answers_nothing(displaced: str) -> None:
    net, host, worker = running()
    other, peer_id = (host, WORKER_ID) if displaced == WORKER_ID else (worker, HOST_ID)

    forge(net, displaced)
    net.run(PROBE_TIMEOUT + 1.0)

    (left,) = other.messages(PeerLeft, peer_id)
    assert "no answer within 10 s" in left.reason
    assert len(worker.messages(CancelJob)) == (displaced == HOST_ID)


def test_a_node_that_registers_again_keeps_its_session() -> None:
    net, host, worker = running()

    net.run(600.0)  # it refreshes its registration

    assert not host.messages(PeerLeft)
    assert not worker.messages(CancelJob)


def test_data_in_an_unknown_session_is_answered_once_until_it_is_open() -> None:
    net = Network(original=True)
    net.attach(COORDINATOR)
    node = rust_node(net)

    def refused() -> list[str]:
        return [each["sessionID"] for each in node.payloads("relayClose")]

    for _ in range(3):
        send_in_session(net, node, B, SESSION, "{}")
    assert refused() == [SESSION]

    net.send_raw(node, "relayOpen", addresses(B, SESSION))
    net.send_raw(node, "relayClose", addresses(B, SESSION))
    send_in_session(net, node, B, SESSION, "{}")
    assert refused() == [SESSION, SESSION]


def test_rust_nodes_are_not_probed() -> None:
    net = Network(original=True)
    host = net.attach(COORDINATOR)
    node = rust_node(net)
    accept_session(net, node, B)
    before = len(node.inbox)

    forge(net, NODE_B.public_key.hex())
    net.run(2 * PROBE_TIMEOUT)

    # They answer nothing while they generate, and register every ten seconds.
    assert len(node.inbox) == before
    assert not host.messages(PeerLeft)
