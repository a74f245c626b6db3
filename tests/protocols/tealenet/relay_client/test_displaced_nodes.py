"""Nodes whose id another connection takes at a relay, which reports no departure."""

from dataclasses import replace

import pytest

from protocols.tealenet.network import (
    Network,
    ShoalNode,
    deterministic_bytes,
    local_coordinator,
)
from protocols.tealenet.relay_client.relay_nodes import (
    JOB,
    NODE_A,
    SESSION,
    B,
    addresses,
    local_worker,
    rust_node,
    send_in_session,
)
from shoal.domain.vocabulary import CancelJob, RunJob
from shoal.protocols.seam.peer_session import PeerJoined, PeerLeft
from shoal.protocols.tealenet.local_node import Config, TealeLocalNode

WORKER, WORKER_ID = local_worker()
COORDINATOR = local_coordinator(Config(open=True))
SECONDS = 20.0  # in which a heartbeat is sent, and a node dialled again


def running(*, original: bool) -> tuple[Network, ShoalNode, ShoalNode]:
    """Return a coordinator and a worker on a relay of others, which runs a job."""
    net = Network(NODE_A, original=original)
    worker = net.attach(WORKER)
    host = net.attach(COORDINATOR)
    net.run(SECONDS)
    net.send(host, WORKER_ID, JOB)
    assert worker.messages(RunJob)
    return net, host, worker


def restarted(local: TealeLocalNode) -> TealeLocalNode:
    return replace(local, random_bytes=deterministic_bytes(b"restarted"))


@pytest.mark.parametrize("original", [True, False])
def test_a_worker_that_returns_on_a_new_connection_is_joined_anew(
    original: bool,
) -> None:
    net, host, worker = running(original=original)

    newer = net.attach(restarted(WORKER))
    net.run(SECONDS)

    assert worker.closed
    assert len(host.messages(PeerLeft, WORKER_ID)) == 1
    assert len(host.messages(PeerJoined, WORKER_ID)) == 2
    net.send(host, WORKER_ID, JOB)
    assert newer.messages(RunJob)


@pytest.mark.parametrize("original", [True, False])
def test_a_coordinator_that_returns_on_a_new_connection_ends_its_old_jobs(
    original: bool,
) -> None:
    net, host, worker = running(original=original)

    newer = net.attach(restarted(COORDINATOR))
    net.run(SECONDS)

    assert host.closed
    assert len(worker.messages(CancelJob)) == 1
    assert newer.messages(PeerJoined, WORKER_ID)


@pytest.mark.parametrize("original", [True, False])
def test_a_node_that_registers_again_keeps_its_session(original: bool) -> None:
    net, host, worker = running(original=original)

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
