"""Gateways submit jobs in sessions of their own, which are limited and admitted."""

import base64
import json

import pytest

from protocols.contexts import require_token
from protocols.tealenet.network import Network, local_coordinator
from protocols.tealenet.relay_client.relay_nodes import (
    NODE_B,
    OTHER_SESSION,
    RUST_REQUEST,
    RUST_REQUEST_ID,
    SESSION,
    A,
    B,
    accept_session,
    addresses,
    gateway,
    local_worker,
    mac,
    messages_to,
    open_pool,
    register,
    rust_node,
    send_in_session,
)
from shoal.domain.errors import NotAdmitted
from shoal.domain.vocabulary import AnswerChunk, CancelJob, Completed, RunJob
from shoal.protocols.seam.admission import AdmissionGrant, JoinRequest
from shoal.protocols.seam.peer_session import (
    PeerDescribed,
    PeerJoined,
    PeerLeft,
    PeerMessage,
    PeerRefused,
)
from shoal.protocols.tealenet.relay_client.node import DISCOVER_INTERVAL
from shoal.protocols.tealenet.relay_client.peers import LINGER, SESSIONS_OF_PEER_MAX
from shoal.protocols.tealenet.relay_client.session import SILENCE_TIMEOUT


@pytest.mark.parametrize("flat", [False, True])
def test_a_gateway_is_answered_in_the_session_of_its_request(flat: bool) -> None:
    net, host = open_pool()
    end = gateway(net)
    request = json.loads(RUST_REQUEST)
    if flat:
        request = {"inferenceRequest": request["inferenceRequest"]["_0"]}

    for session_id in (SESSION, OTHER_SESSION):
        net.send_raw(end, "relayOpen", addresses(B, session_id))
        text = json.dumps(request).replace(RUST_REQUEST_ID, session_id)
        send_in_session(net, end, B, session_id, text)
    one, two = host.messages(RunJob, B)
    net.send(host, B, AnswerChunk(two.job_id, two.lease, ["for the second"]))
    net.send(host, B, AnswerChunk(one.job_id, one.lease, ["for the first"]))
    net.send(host, B, Completed(one.job_id, one.lease))

    assert [each["sessionID"] for each in end.payloads("relayReady")] == [
        SESSION,
        OTHER_SESSION,
    ]
    assert "for the first" in json.dumps(messages_to(end, SESSION))
    assert "for the second" in json.dumps(messages_to(end, OTHER_SESSION))
    kinds = [next(iter(each)) for each in messages_to(end, SESSION)]
    assert kinds[-1] == "inferenceComplete"
    assert ("_0" in messages_to(end, SESSION)[-1]["inferenceComplete"]) is not flat
    assert "inferenceComplete" not in json.dumps(messages_to(end, OTHER_SESSION))
    assert len(host.messages(PeerJoined)) == 1


def test_a_gateway_cancels_its_job_by_closing_the_session() -> None:
    net, host = open_pool()
    end = gateway(net)
    net.send_raw(end, "relayOpen", addresses(B, SESSION))
    send_in_session(net, end, B, SESSION, RUST_REQUEST)
    (run,) = host.messages(RunJob)

    net.send_raw(end, "relayClose", addresses(B, SESSION))

    assert host.messages(CancelJob) == [CancelJob(run.job_id, run.lease)]
    assert not host.messages(PeerLeft)
    net.run(LINGER + 1)
    assert len(host.messages(PeerLeft)) == 1


def test_a_gateway_without_heartbeats_gets_a_late_answer() -> None:
    net, host = open_pool()
    end = gateway(net)
    net.send_raw(end, "relayOpen", addresses(B, SESSION))
    send_in_session(net, end, B, SESSION, RUST_REQUEST)
    (run,) = host.messages(RunJob)

    net.run(250.0)
    net.send(host, B, Completed(run.job_id, run.lease))

    assert not host.messages(PeerLeft) + host.messages(CancelJob)
    assert "inferenceComplete" in json.dumps(messages_to(end, SESSION))


def test_a_duplicate_job_in_another_session_is_refused() -> None:
    net, host = open_pool()
    end = gateway(net)

    for session_id in (SESSION, OTHER_SESSION):
        net.send_raw(end, "relayOpen", addresses(B, session_id))
        send_in_session(net, end, B, session_id, RUST_REQUEST)

    assert len(host.messages(RunJob)) == 1
    assert "inferenceError" in json.dumps(messages_to(end, OTHER_SESSION))
    assert "inferenceError" not in json.dumps(messages_to(end, SESSION))


def test_no_relay_node_is_admitted_if_a_token_is_required() -> None:
    net = Network()
    host = net.attach(local_coordinator(admission=require_token("tok")))
    end = gateway(net)

    net.send_raw(end, "relayOpen", addresses(B, SESSION))
    send_in_session(net, end, B, SESSION, RUST_REQUEST)

    assert not host.messages(PeerJoined) + host.messages(RunJob)
    assert "relay nodes do not authenticate" in json.dumps(messages_to(end, SESSION))


def test_a_node_that_is_not_admitted_is_reported_until_it_leaves() -> None:
    net = Network()
    host = net.attach(local_coordinator(admission=require_token("tok")))
    node = rust_node(net)
    accept_session(net, node, B)
    net.run(30.0)

    (refused,) = host.messages(PeerRefused, B)
    assert refused.name == B
    assert "--tealenet-open" in refused.reason
    assert not host.messages(PeerLeft, B)
    net.detach(node)
    net.run(1.0)
    assert len(host.messages(PeerLeft, B)) == 1


def test_a_node_that_is_not_admitted_leaves_when_it_is_dialled_no_more() -> None:
    net = Network()
    host = net.attach(local_coordinator(admission=require_token("tok")))
    node = rust_node(net)
    accept_session(net, node, B)
    net.run(30.0)
    assert host.messages(PeerRefused, B)

    register(net, node, NODE_B, isAvailable=False)
    net.run(DISCOVER_INTERVAL)
    for each in node.payloads("relayOpen"):
        net.send_raw(node, "relayClose", addresses(B, each["sessionID"]))
    net.run(2 * LINGER)

    assert len(host.messages(PeerLeft, B)) == 1


def test_a_node_that_is_not_admitted_is_described() -> None:
    net = Network()
    host = net.attach(local_coordinator(admission=require_token("tok")))
    accept_session(net, rust_node(net), B)

    net.run(DISCOVER_INTERVAL)

    assert [type(each.message) for each in host.received if each.peer == B] == [
        PeerRefused,
        PeerDescribed,
    ]


def test_sessions_of_a_peer_are_limited() -> None:
    net, _ = open_pool()
    end = gateway(net)

    for number in range(SESSIONS_OF_PEER_MAX + 1):
        net.send_raw(
            end, "relayOpen", addresses(B, f"{number:08}-0000-4000-8000-000000000001")
        )

    assert len(end.payloads("relayReady")) == SESSIONS_OF_PEER_MAX
    assert len(end.payloads("relayClose")) == 1


def test_admission_gets_the_address_of_a_node() -> None:
    net = Network()
    presented: list[str] = []

    def admission(applicant: JoinRequest) -> AdmissionGrant:
        presented.append(applicant.address)
        raise NotAdmitted("wrong token")

    net.attach(local_coordinator(admission=admission))
    worker, _ = local_worker()
    net.attach(worker)
    net.run(DISCOVER_INTERVAL)

    assert set(presented) == {"192.0.2.1"}


def test_unadmitted_sessions_do_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "shoal.protocols.tealenet.relay_client.session.UNADMITTED_MAX", 10
    )
    net = Network()
    host = net.attach(local_coordinator(admission=require_token("tok")))
    end = gateway(net)

    for number in range(20):
        session_id = f"{number:08}-0000-4000-8000-000000000001"
        net.send_raw(end, "relayOpen", addresses(B, session_id))
        send_in_session(net, end, B, session_id, RUST_REQUEST)

    assert [each["sessionID"][:8] for each in end.payloads("relayClose")] == [
        f"{number:08}" for number in range(10)
    ]
    assert not host.messages(PeerJoined)


def test_a_session_belongs_to_its_opener() -> None:
    net, host = open_pool()
    end = gateway(net)
    net.send_raw(end, "relayOpen", addresses(B, SESSION))

    text = json.dumps({"relayOpen": addresses(A, SESSION.lower())})
    (notice,) = host.node.receive([text], net.now)

    assert "belongs to another node" in str(notice)
    for kind in ("relayReady", "relayClose"):
        text = json.dumps({kind: addresses(A, SESSION)})
        assert host.node.receive([text], net.now) == []
    send_in_session(net, end, B, SESSION, RUST_REQUEST)
    assert len(host.messages(RunJob, B)) == 1


def test_a_session_that_is_ready_is_so_once() -> None:
    net, host = open_pool()
    end = mac(net)
    net.run(DISCOVER_INTERVAL)
    session_id = accept_session(net, end, A)
    assert end.payloads("relayData")  # it is offered encryption

    ready = {"relayReady": addresses(A, session_id)}

    assert host.node.receive([json.dumps(ready)], net.now) == []


def test_a_silent_session_times_out() -> None:
    net, host = open_pool()
    end = gateway(net)
    net.send_raw(end, "relayOpen", addresses(B, SESSION))

    net.run(SILENCE_TIMEOUT - 1)
    assert not end.payloads("relayClose")
    net.run(2.0)

    assert len(end.payloads("relayClose")) == 1
    assert not host.messages(PeerJoined)


def test_data_with_another_sender_is_ignored() -> None:
    net, host = open_pool()
    end = gateway(net)
    net.send_raw(end, "relayOpen", addresses(B, SESSION))

    data = base64.b64encode(RUST_REQUEST.encode()).decode()
    forged = {"relayData": addresses(A, SESSION) | {"data": data}}
    received = host.node.receive([json.dumps(forged)], net.now)

    assert not received

    own = {"relayData": forged["relayData"] | addresses(B, SESSION)}
    again = base64.b64encode(RUST_REQUEST.replace("550e", "0000").encode()).decode()
    forged["relayData"]["data"] = again
    received = host.node.receive([json.dumps(own), json.dumps(forged)], net.now)

    jobs = [each.message for each in received if isinstance(each, PeerMessage)]
    assert sum(isinstance(each, RunJob) for each in jobs) == 1
