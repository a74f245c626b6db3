"""Workers serve the nodes of a relay, which reads none of their prompts."""

import base64
import json
from dataclasses import replace

from msgspec import structs

from protocols.session_pair import sent
from protocols.tealenet.network import Network, deterministic_bytes, local_coordinator
from protocols.tealenet.relay_client.relay_nodes import (
    CHAT,
    HOST_ID,
    JOB,
    NODE_B,
    RUST_REQUEST,
    SECRET,
    SESSION,
    B,
    addresses,
    held,
    local_worker,
    opened,
    pool,
)
from shoal.domain.ids import JobId
from shoal.domain.vocabulary import (
    AnswerChunk,
    Completed,
    Dismiss,
    LoadChanged,
    OffersChanged,
    RunJob,
)
from shoal.domain.worker import WorkerLoad
from shoal.protocols.seam.peer_session import (
    ALL_PEERS,
    PeerDescribed,
    PeerJoined,
    PeerLeft,
    PeerMessage,
    Protection,
    ToPeer,
)
from shoal.protocols.tealenet.local_node import Config
from shoal.protocols.tealenet.relay_client.node import RelayNode
from shoal.protocols.tealenet.relay_client.session import RelaySession


def test_a_worker_is_dialled_by_the_coordinator_of_a_relay() -> None:
    _, host, worker, worker_id = pool()

    (joined,) = host.messages(PeerJoined)
    assert (joined.name, joined.protection) == (worker_id, Protection.TEALE)
    (offered,) = host.messages(OffersChanged, worker_id)
    assert [each.models for each in offered.offers] == [frozenset({"m1"})]
    everybody, coordinator = worker.messages(PeerJoined)
    assert (everybody.name, coordinator.name) == (ALL_PEERS, HOST_ID)
    assert not host.notices + worker.notices


def test_the_relay_sees_no_prompt_and_no_answer() -> None:
    net, host, worker, worker_id = pool()

    net.send(host, worker_id, JOB)
    (run,) = worker.messages(RunJob)
    net.send(worker, HOST_ID, AnswerChunk(run.job_id, run.lease, ["an answer"]))
    net.send(worker, HOST_ID, Completed(run.job_id, run.lease))

    assert run.work == CHAT
    assert host.messages(AnswerChunk) == [
        AnswerChunk(JOB.job_id, JOB.lease, ["an answer"])
    ]
    (completed,) = host.messages(Completed)
    assert (completed.job_id, completed.lease) == (JOB.job_id, JOB.lease)
    carried = [json.loads(each).get("relayData") for each in net.carried]
    data = b"".join(base64.b64decode(each["data"]) for each in carried if each)
    assert len(data) > 1000
    for secret in (SECRET, "an answer", "inferenceRequest", "deviceID"):
        assert secret.encode() not in data
        assert not any(secret in text for text in net.carried)


def test_many_jobs_share_one_session() -> None:
    net, host, worker, worker_id = pool()
    jobs = [structs.replace(JOB, job_id=JobId(f"job {n}")) for n in range(20)]

    for job in jobs:
        net.send(host, worker_id, job)
    for run in reversed(worker.messages(RunJob)):
        net.send(worker, HOST_ID, AnswerChunk(run.job_id, run.lease, ["x"]))
        net.send(worker, HOST_ID, Completed(run.job_id, run.lease))

    ended = [each.job_id for each in host.messages(Completed)]
    assert ended == [job.job_id for job in reversed(jobs)]
    assert len({json.loads(t)["relayOpen"]["sessionID"] for t in opened(net)}) == 1


def test_the_chunks_of_one_read_are_one_event() -> None:
    net, host, worker, worker_id = pool()
    net.send(host, worker_id, JOB)
    (run,) = worker.messages(RunJob)

    batch = [
        data
        for text in ("one ", "two ", "three")
        for data in sent(
            worker.node.send(
                ToPeer(HOST_ID, AnswerChunk(run.job_id, run.lease, [text])), net.now
            )
        )
    ]
    (received,) = host.node.receive(batch, net.now)

    expected = AnswerChunk(JOB.job_id, JOB.lease, ["one ", "two ", "three"])
    assert received == PeerMessage(worker_id, expected)


def test_a_disconnected_worker_leaves_and_joins_again() -> None:
    net, host, worker, worker_id = pool()
    net.send(host, worker_id, JOB)

    net.detach(worker)
    net.run(1.0)
    assert len(host.messages(PeerLeft)) == 1
    returned = net.attach(local_worker()[0])
    net.run(1.0)

    assert [type(each.message) for each in host.received[-3:]] == [
        PeerJoined,
        PeerDescribed,
        OffersChanged,
    ]
    assert len(returned.messages(PeerJoined)) == 2


def test_a_session_that_ended_is_not_held() -> None:
    before = held(RelaySession)
    net, host, worker, worker_id = pool()
    assert held(RelaySession) == before + 2  # one at each end

    net.detach(worker)
    net.run(1.0)

    assert len(host.messages(PeerLeft, worker_id)) == 1
    assert held(RelaySession) == before + 1  # nobody told the worker


def test_a_newer_connection_of_a_worker_replaces_the_older() -> None:
    net, host, worker, _ = pool()

    newer = net.attach(local_worker()[0])
    net.run(1.0)

    assert worker.closed == "Replaced by newer session"
    assert [type(w) for w in (each.message for each in host.received)].count(
        PeerJoined
    ) == 2
    assert len(host.messages(PeerLeft)) == 1
    assert len(newer.messages(PeerJoined)) == 2


def test_a_worker_that_forgot_its_session_opens_another() -> None:
    net, host, worker, worker_id = pool()

    local, _ = local_worker()
    started = replace(local, random_bytes=deterministic_bytes(b"another session"))
    worker.node = RelayNode(started, net.now)
    net.run(2.0)

    assert [each.reason for each in host.messages(PeerLeft, worker_id)] == [
        "the peer closed the session"
    ]
    assert len(host.messages(PeerJoined, worker_id)) == 2
    closed = [text for text in net.carried if text.startswith('{"relayClose"')]
    assert [json.loads(text)["relayClose"]["fromNodeID"] for text in closed] == [
        worker_id
    ]
    net.send(host, worker_id, JOB)
    assert worker.messages(RunJob)


def test_a_late_coordinator_finds_its_workers() -> None:
    net = Network()
    local, worker_id = local_worker()
    worker = net.attach(local)
    net.run(5.0)
    assert len(worker.messages(PeerJoined)) == 1  # for all nodes

    host = net.attach(local_coordinator(Config(open=True)))
    net.run(30.0)

    assert [
        each.peer for each in host.received if isinstance(each.message, PeerJoined)
    ] == [worker_id]


def test_a_peer_that_joins_learns_the_state_of_this_node() -> None:
    net = Network()
    local, worker_id = local_worker()
    worker = net.attach(local)
    net.send(worker, ALL_PEERS, LoadChanged(WorkerLoad(full=True, waiting=2)))

    host = net.attach(local_coordinator(Config(open=True)))
    net.run(30.0)

    (changed,) = host.messages(LoadChanged, worker_id)
    assert changed.load.queued == 2


def test_a_coordinator_takes_no_jobs_from_all_nodes_of_another_relay() -> None:
    net = Network(NODE_B)

    host = net.attach(local_coordinator(Config(open=True)))

    assert host.messages(PeerJoined) == []


def test_a_worker_on_a_relay_without_a_coordinator_serves_every_node() -> None:
    local, worker_id = local_worker()
    node = RelayNode(local, 0.0)
    node.tick(0.0)

    ack = {"nodeID": worker_id, "registeredAt": 1.0, "ttlSeconds": 300}
    (joined, *_) = node.receive([json.dumps({"registerAck": ack})], 0.0)
    renewed = node.receive([json.dumps({"registerAck": ack})], 0.0)
    opening = {"relayOpen": addresses(B, SESSION)}
    data = base64.b64encode(RUST_REQUEST.encode()).decode()
    request = {"relayData": addresses(B, SESSION) | {"data": data}}
    received = node.receive([json.dumps(opening), json.dumps(request)], 0.0)

    assert joined == PeerMessage(ALL_PEERS, PeerJoined(ALL_PEERS, submits_jobs=True))
    assert renewed == []
    types = [type(each.message) for each in received if isinstance(each, PeerMessage)]
    assert (types[0], types[-1]) == (PeerJoined, RunJob)


def test_a_farewell_on_another_relay_ends_only_its_session() -> None:
    reasons: list[str] = []
    net = Network(NODE_B)
    local, worker_id = local_worker()
    worker = net.attach(replace(local, on_rejected=reasons.append))

    stranger = net.attach(local_coordinator(Config(open=True)))
    net.run(1.0)
    assert stranger.messages(PeerJoined, worker_id)
    net.send(stranger, worker_id, Dismiss("leave"))

    assert reasons == []
    assert worker.closed is None
