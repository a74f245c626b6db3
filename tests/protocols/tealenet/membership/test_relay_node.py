import base64
import gc
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.contexts import require_token
from protocols.session_pair import sent
from protocols.tealenet.network import (
    EPOCH,
    HOST,
    ForeignNode,
    Network,
    ShoalNode,
    deterministic_bytes,
    local_coordinator,
)
from protocols.tealenet.recordings import case_of
from shoal.domain.errors import NotAdmitted
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Dismiss,
    HealthReported,
    LoadChanged,
    OffersChanged,
    RunJob,
)
from shoal.domain.work import Chat, Feature
from shoal.domain.worker import (
    CHAT_ONLY,
    MachineHealth,
    Offer,
    ServedModel,
    WorkerLoad,
)
from shoal.ledger.keys import Signer, verify
from shoal.protocols.seam.admission import AdmissionGrant, JoinRequest
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.peer_session import (
    ALL_PEERS,
    PeerDescribed,
    PeerJoined,
    PeerLeft,
    PeerMessage,
    PeerRefused,
    Protection,
    ToPeer,
)
from shoal.protocols.seam.session import Close, Notice, Send
from shoal.protocols.tealenet.codec.signatures import encode_base64, noise_binding
from shoal.protocols.tealenet.config import Config
from shoal.protocols.tealenet.encryption.secure_session import TEALE_TIMEOUT
from shoal.protocols.tealenet.local_node import TealeLocalNode, worker_node
from shoal.protocols.tealenet.membership import relay_dialer
from shoal.protocols.tealenet.membership.node_directory import PinnedKeys
from shoal.protocols.tealenet.membership.registration import (
    ACK_TIMEOUT,
    CHANGE_INTERVAL,
    REFRESH_INTERVAL,
)
from shoal.protocols.tealenet.membership.relay_dialer import (
    DIAL_INTERVAL,
    SESSIONS_OF_PEER_MAX,
)
from shoal.protocols.tealenet.membership.relay_node import (
    DISCOVER_INTERVAL,
    DISCOVER_INTERVAL_MIN,
    INVALID_MAX,
    RelayNode,
)
from shoal.protocols.tealenet.membership.relay_peer import RelayPeer
from shoal.protocols.tealenet.membership.relay_peers import (
    DISMISSED_PAUSE,
    LINGER,
    REDIAL_FIRST,
)
from shoal.protocols.tealenet.membership.relay_session import (
    READY_TIMEOUT,
    SILENCE_TIMEOUT,
    RelaySession,
)

SESSION = "550E8400-E29B-41D4-A716-446655440000"
OTHER_SESSION = "00000000-0000-4000-8000-000000000001"
SECRET = "a confidential prompt"
CHAT = Chat("m1", ({"role": "user", "content": SECRET},))
JOB = RunJob(JobId("a job"), LeaseNumber(3), CHAT)

NODE_A = Signer.from_seed(b"\x11" * 32)  # of the recordings
NODE_B = Signer.from_seed(b"\x22" * 32)
HOST_ID, A, B = (each.public_key.hex() for each in (HOST, NODE_A, NODE_B))
TEALE_MODEL = "mlx-community/Qwen3-8B-4bit"


def local_worker(name: str = "bela", token: str = "tok") -> tuple[TealeLocalNode, str]:
    """Return a worker's end, and its id."""
    signer = Signer.from_seed(name.encode().ljust(32))
    model = ServedModel("m1", CHAT_ONLY, frozenset(Feature))
    worker = WorkerProfile(
        name,
        model,
        2,
        token,
        identity=signer,
        epoch=EPOCH,
        random_bytes=deterministic_bytes(name.encode()),
    )
    return worker_node(worker), signer.public_key.hex()


def pool() -> tuple[Network, ShoalNode, ShoalNode, str]:
    """Return a coordinator and a worker that has joined through its relay."""
    net = Network()
    host = net.attach(local_coordinator(admission=require_token("tok")))
    local, worker_id = local_worker()
    worker = net.attach(local)
    net.run(1.0)
    return net, host, worker, worker_id


def open_pool() -> tuple[Network, ShoalNode]:
    """Return a coordinator that admits every node, alone on its relay."""
    net = Network()
    host = net.attach(local_coordinator(Config(open=True)))
    return net, host


def register(
    net: Network, end: ForeignNode, signer: Signer, **capabilities: Any
) -> None:
    """Register a foreign node, as Rust nodes do."""
    node_id = signer.public_key.hex()
    payload = {
        "nodeID": node_id,
        "publicKey": node_id,
        "displayName": "n",
        "capabilities": RUST_CAPABILITIES | capabilities,
        "signature": signer.sign(node_id.encode()).hex(),
    }
    net.send_raw(end, "register", payload)


def addresses(sender: str, session_id: str) -> dict[str, str]:
    return {"fromNodeID": sender, "toNodeID": HOST_ID, "sessionID": session_id}


def send_in_session(
    net: Network, end: ForeignNode, sender: str, session_id: str, text: str
) -> None:
    """Send a message of a foreign node in a session."""
    data = base64.b64encode(text.encode()).decode()
    net.send_raw(end, "relayData", addresses(sender, session_id) | {"data": data})


def messages_to(
    end: ForeignNode, session_id: str | None = None
) -> list[dict[str, Any]]:
    """Return the messages sent to a foreign node in one session, or in all."""
    return [
        json.loads(base64.b64decode(each["data"]))
        for each in end.payloads("relayData")
        if session_id in (None, each["sessionID"])
        and base64.b64decode(each["data"])[:1] == b"{"
    ]


RUST_CAPABILITIES = json.loads(case_of("node_capabilities/rust_extras")["json_text"])
RUST_REQUEST = case_of("cluster_rust_emits/inferenceRequest")["json_text"]
RUST_REQUEST_ID = "550e8400-e29b-41d4-a716-446655440000"


def rust_node(net: Network, **capabilities: Any) -> ForeignNode:
    """Connect a Rust node, which the coordinator dials."""
    end = net.attach_raw()
    register(net, end, NODE_B, **capabilities)
    net.run(DISCOVER_INTERVAL_MIN + 1)
    return end


def chunk(request_id: str, text: str, finish_reason: str | None = None) -> str:
    """Return a chunk of an answer, as Rust nodes write it."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    body = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "/models/a.gguf",
        "choices": [choice],
    }
    payload = {"requestID": request_id, "chunk": body}
    return json.dumps({"inferenceChunk": {"_0": payload}})


def accept_session(net: Network, end: ForeignNode, sender: str) -> str:
    """Accept the session that was opened last; return its id."""
    session_id: str = end.payloads("relayOpen")[-1]["sessionID"]
    net.send_raw(end, "relayReady", addresses(sender, session_id))
    return session_id


# Shoal nodes only.


def test_only_workers_on_the_own_relay_serve_this_coordinator_alone() -> None:
    _, host, _, worker_id = pool()
    other = Network(hosted=False)
    elsewhere = other.attach(local_coordinator(Config(open=True)))
    other.attach(local_worker(token="")[0])
    other.run(15.0)

    for end, exclusive in ((host, True), (elsewhere, False)):
        (joined,) = end.messages(PeerJoined, worker_id)
        assert joined.exclusive is exclusive


def test_a_worker_dials_the_coordinator_of_its_relay() -> None:
    _, host, worker, worker_id = pool()

    (joined,) = host.messages(PeerJoined)
    assert (joined.name, joined.submits_jobs, joined.protection) == (
        "bela",
        False,
        Protection.NOISE,
    )
    (offered,) = host.messages(OffersChanged, worker_id)
    assert [each.models for each in offered.offers] == [frozenset({"m1"})]
    assert offered.offers[0].proven
    assert [each.name for each in worker.messages(PeerJoined)] == [HOST_ID]
    assert worker.node.is_host_proven
    assert not host.notices + worker.notices


def test_the_relay_sees_no_prompt_answer_or_token() -> None:
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
    for secret in (SECRET, "an answer", "inferenceRequest", '"tok"', "deviceInfo"):
        assert secret.encode() not in data
        assert not any(secret in text for text in net.carried)


def test_many_jobs_share_one_session() -> None:
    net, host, worker, worker_id = pool()
    jobs = [replace(JOB, job_id=JobId(f"job {n}")) for n in range(20)]

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


def test_a_lost_message_ends_the_session() -> None:
    net, host, worker, worker_id = pool()
    net.send(host, worker_id, JOB)
    (run,) = worker.messages(RunJob)
    for _ in range(2):
        message = AnswerChunk(run.job_id, run.lease, ["x"])
        (data,) = sent(worker.node.send(ToPeer(HOST_ID, message), net.now))

    received = host.node.receive([data], net.now)

    (left,) = (each.message for each in received if isinstance(each, PeerMessage))
    assert isinstance(left, PeerLeft)
    assert "were lost" in left.reason
    assert not [each for each in received if isinstance(each, Notice)]


def test_a_cancellation_reaches_the_worker() -> None:
    net, host, worker, worker_id = pool()
    net.send(host, worker_id, JOB)

    net.send(host, worker_id, CancelJob(JOB.job_id, JOB.lease))

    (run,) = worker.messages(RunJob)
    assert worker.messages(CancelJob) == [CancelJob(run.job_id, run.lease)]


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
    assert len(returned.messages(PeerJoined)) == 1


def test_a_session_that_ended_is_not_held() -> None:
    before = held(RelaySession)
    net, host, worker, worker_id = pool()
    assert held(RelaySession) == before + 2  # one at each end

    net.detach(worker)
    net.run(1.0)

    assert len(host.messages(PeerLeft, worker_id)) == 1
    assert held(RelaySession) == before + 1  # nobody told the worker


def held(kind: type) -> int:
    gc.collect()
    return sum(isinstance(each, kind) for each in gc.get_objects())


def test_a_newer_connection_of_a_worker_replaces_the_older() -> None:
    net, host, worker, _ = pool()

    newer = net.attach(local_worker()[0])
    net.run(1.0)

    assert worker.closed == "Replaced by newer session"
    assert [type(w) for w in (each.message for each in host.received)].count(
        PeerJoined
    ) == 2
    assert len(host.messages(PeerLeft)) == 1
    assert len(newer.messages(PeerJoined)) == 1


def test_a_worker_that_forgot_its_session_opens_another() -> None:
    net, host, worker, worker_id = pool()

    local, _ = local_worker()
    started = replace(local, random_bytes=deterministic_bytes(b"another session"))
    worker.node = RelayNode(started, net.now)
    net.run(2.0)

    assert [each.reason for each in host.messages(PeerLeft, worker_id)] == [
        "the peer opened a new session"
    ]
    assert len(host.messages(PeerJoined, worker_id)) == 2
    closed = [text for text in net.carried if text.startswith('{"relayClose"')]
    assert [json.loads(text)["relayClose"]["fromNodeID"] for text in closed] == [
        HOST_ID
    ]
    net.send(host, worker_id, JOB)
    assert worker.messages(RunJob)


def test_a_late_coordinator_finds_its_workers() -> None:
    net = Network()
    local, worker_id = local_worker()
    worker = net.attach(local)
    net.run(5.0)
    assert not worker.messages(PeerJoined)

    host = net.attach(local_coordinator(admission=require_token("tok")))
    net.run(30.0)

    assert [
        each.peer for each in host.received if isinstance(each.message, PeerJoined)
    ] == [worker_id]


def test_a_worker_with_a_wrong_token_does_not_join() -> None:
    net = Network()
    host = net.attach(local_coordinator(admission=require_token("another")))
    worker = net.attach(local_worker()[0])

    net.run(20.0)

    assert not host.messages(PeerJoined)
    assert not worker.messages(RunJob)


def test_a_worker_serves_only_the_coordinator_of_its_relay() -> None:
    net, _, worker, worker_id = pool()
    stranger = net.attach_raw()
    register(net, stranger, NODE_B)

    net.send_raw(
        stranger,
        "relayOpen",
        {"fromNodeID": B, "toNodeID": worker_id, "sessionID": SESSION},
    )

    assert not stranger.payloads("relayReady")
    assert [each["sessionID"] for each in stranger.payloads("relayClose")] == [SESSION]
    assert len(worker.messages(PeerJoined)) == 1


def test_a_worker_accepts_sessions_of_the_coordinator_of_its_relay() -> None:
    net, _, worker, worker_id = pool()
    opening = {"fromNodeID": HOST_ID, "toNodeID": worker_id, "sessionID": SESSION}

    answers = sent(worker.node.receive([json.dumps({"relayOpen": opening})], net.now))

    assert [[*json.loads(each)] for each in answers] == [["relayReady"]]


def test_two_coordinators_join_once_and_exchange_offers() -> None:
    net, host = open_pool()
    other = net.attach(local_coordinator(Config(open=True), signer=NODE_A))
    offers = (Offer(CHAT_ONLY, frozenset({"m1"})),)

    net.send(host, ALL_PEERS, OffersChanged(offers))
    net.run(3 * DISCOVER_INTERVAL)

    assert len(opened(net)) == 1
    assert [each.protection for each in host.messages(PeerJoined)] == [Protection.NOISE]
    assert [each.protection for each in other.messages(PeerJoined)] == [
        Protection.NOISE
    ]
    (offer,) = other.messages(OffersChanged)[-1].offers
    assert (offer.models, offer.neighbour) == ({"m1"}, True)
    net.send(other, HOST_ID, JOB)
    assert [each.work for each in host.messages(RunJob)] == [CHAT]


@pytest.mark.parametrize("signers", [(HOST, NODE_A), (NODE_A, HOST)])
def test_of_two_coordinators_the_one_with_the_greater_id_dials(
    signers: tuple[Signer, Signer],
) -> None:
    net = Network()
    for signer in signers:
        net.attach(local_coordinator(Config(open=True), signer=signer))

    net.run(3 * DISCOVER_INTERVAL)

    openings = [json.loads(each)["relayOpen"] for each in opened(net)]
    assert [each["fromNodeID"] for each in openings] == [max(HOST_ID, A)]


def test_a_coordinator_with_a_passcode_does_not_dial_others() -> None:
    net = Network()
    net.attach(local_coordinator(Config(passcode="of our cluster")))
    net.attach(local_coordinator(Config(passcode="of our cluster"), signer=NODE_A))

    net.run(3 * DISCOVER_INTERVAL)

    assert not opened(net)


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


def test_the_health_of_a_node_is_no_reason_to_register_again() -> None:
    net, _, worker, _ = pool()
    before = registered(net)

    net.send(worker, ALL_PEERS, HealthReported(MachineHealth()))
    net.run(CHANGE_INTERVAL + 1.0)

    assert registered(net) == before


def test_a_peer_that_joins_learns_the_state_of_this_node() -> None:
    net = Network()
    local, worker_id = local_worker()
    worker = net.attach(local)
    net.send(worker, ALL_PEERS, LoadChanged(WorkerLoad(unfit="its owner plays")))

    host = net.attach(local_coordinator(admission=require_token("tok")))
    net.run(30.0)

    (changed,) = host.messages(LoadChanged, worker_id)
    assert changed.load.unfit == "its owner plays"


def registered(net: Network) -> int:
    return sum(text.startswith('{"register"') for text in net.carried)


def test_a_coordinator_takes_no_jobs_from_all_nodes_of_another_relay() -> None:
    net = Network(hosted=False)

    host = net.attach(local_coordinator(Config(open=True)))

    assert host.messages(PeerJoined) == []


def opened(net: Network) -> list[str]:
    return [text for text in net.carried if text.startswith('{"relayOpen"')]


def test_a_worker_with_a_token_serves_no_relay_without_a_coordinator() -> None:
    local, worker_id = local_worker()
    node = RelayNode(local, 0.0)
    node.tick(0.0)
    opening = {"relayOpen": addresses(B, SESSION)}
    data = base64.b64encode(RUST_REQUEST.encode()).decode()
    request = {"relayData": addresses(B, SESSION) | {"data": data}}

    early = node.receive([json.dumps(opening), json.dumps(request)], 0.0)
    ack = {"nodeID": worker_id, "registeredAt": 1.0, "ttlSeconds": 300}
    outputs = node.receive([json.dumps({"registerAck": ack})], 0.0)

    assert not any(
        isinstance(each, PeerMessage) and isinstance(each.message, RunJob | PeerJoined)
        for each in early
    )
    (close,) = outputs
    assert isinstance(close, Close)
    assert "join without --token" in close.reason


def test_a_worker_on_a_relay_without_a_coordinator_serves_every_node() -> None:
    local, worker_id = local_worker(token="")
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
    assert not node.is_host_proven
    types = [type(each.message) for each in received if isinstance(each, PeerMessage)]
    assert (types[0], types[-1]) == (PeerJoined, RunJob)


# The relay.


def test_a_farewell_on_another_relay_ends_only_its_session() -> None:
    reasons: list[str] = []
    net = Network(hosted=False)
    local, worker_id = local_worker(token="")
    worker = net.attach(replace(local, on_rejected=reasons.append))

    stranger = net.attach(local_coordinator(Config(open=True)))
    net.run(1.0)
    assert stranger.messages(PeerJoined, worker_id)
    net.send(stranger, worker_id, Dismiss("leave"))

    assert reasons == []
    assert worker.closed is None


def test_a_farewell_of_the_coordinator_of_the_relay_is_reported() -> None:
    reasons: list[str] = []
    net = Network()
    host = net.attach(local_coordinator(admission=require_token("tok")))
    local, worker_id = local_worker()
    net.attach(replace(local, on_rejected=reasons.append))
    net.run(1.0)

    net.send(host, worker_id, Dismiss("leave"))

    assert reasons == ["leave"]


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


def registrations(net: Network) -> int:
    return sum(text.startswith('{"register"') for text in net.carried)


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


# Gateways: they submit jobs, in a session for each request.


def gateway(net: Network) -> ForeignNode:
    end = net.attach_raw()
    register(net, end, NODE_B, loadedModels=[])
    return end


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

    local = local_coordinator(admission=admission)
    net.attach(local, relay=net.relay)
    worker, _ = local_worker()
    net.attach(worker)
    net.run(1.0)

    assert set(presented) == {"192.0.2.1"}


def test_unadmitted_sessions_do_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "shoal.protocols.tealenet.membership.relay_sessions.UNADMITTED_MAX", 10
    )
    net, host, _, worker_id = pool()
    end = gateway(net)

    for number in range(20):
        session_id = f"{number:08}-0000-4000-8000-000000000001"
        net.send_raw(end, "relayOpen", addresses(B, session_id))
        send_in_session(net, end, B, session_id, RUST_REQUEST)
    other, other_id = local_worker("carl")
    net.attach(other)
    net.run(1.0)

    assert [each["sessionID"][:8] for each in end.payloads("relayClose")] == [
        f"{number:08}" for number in range(11)
    ]
    assert not host.messages(PeerLeft)
    assert {
        each.peer for each in host.received if isinstance(each.message, PeerJoined)
    } == {
        worker_id,
        other_id,
    }


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


# Macs: they prefer a direct connection, and have their own encrypted channel.


def mac(net: Network) -> ForeignNode:
    end = net.attach_raw()
    register_text = case_of("relay_swift_emits/register")["json_text"]
    net.send_raw(end, "register", json.loads(register_text)["register"])
    return end


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
    net.run(TEALE_TIMEOUT)

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
    net.run(TEALE_TIMEOUT)

    net.run(50.0)
    assert host.messages(LoadChanged)[-1].load.unfit
    net.run(50.0)

    assert len(host.messages(PeerLeft)) == 1


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


def test_a_node_that_is_not_admitted_is_described() -> None:
    net = Network()
    host = net.attach(local_coordinator(admission=require_token("tok")))
    accept_session(net, rust_node(net), B)

    net.run(DISCOVER_INTERVAL)

    assert [type(each.message) for each in host.received if each.peer == B] == [
        PeerRefused,
        PeerDescribed,
    ]


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
