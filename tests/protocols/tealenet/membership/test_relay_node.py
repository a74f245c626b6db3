import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.pairs import sent
from protocols.tealenet.network import (
    EPOCH,
    HOST,
    ForeignNode,
    Network,
    ShoalNode,
    coordinator_side,
    deterministic_bytes,
)
from protocols.tealenet.recordings import case_of
from shoal.domain.errors import NotAdmitted
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Dismiss,
    LoadChanged,
    OffersChanged,
    RunJob,
)
from shoal.domain.work import Chat, Feature
from shoal.domain.worker import CHAT_ONLY, Offer, ServedModel, WorkerLoad
from shoal.ledger.keys import Signer, verify
from shoal.protocols.seam.admission import AdmissionGrant, JoinRequest, require_token
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.peer_session import (
    ALL_PEERS,
    PeerJoined,
    PeerLeft,
    PeerMessage,
    Protection,
    ToPeer,
)
from shoal.protocols.seam.session import Notice, Send
from shoal.protocols.tealenet.codec.signatures import encode_base64, noise_binding
from shoal.protocols.tealenet.config import Config
from shoal.protocols.tealenet.encryption.secure_session import TEALE_TIMEOUT
from shoal.protocols.tealenet.local_node import TealeLocalNode, worker_node
from shoal.protocols.tealenet.membership.node_directory import PinnedKeys
from shoal.protocols.tealenet.membership.registration import (
    ACK_TIMEOUT,
    REFRESH_INTERVAL,
)
from shoal.protocols.tealenet.membership.relay_dialer import SESSIONS_OF_PEER_MAX
from shoal.protocols.tealenet.membership.relay_node import (
    DISCOVER_INTERVAL,
    DISCOVER_INTERVAL_MIN,
    INVALID_MAX,
    RelayNode,
)
from shoal.protocols.tealenet.membership.relay_peers import DISMISSED_PAUSE, LINGER
from shoal.protocols.tealenet.membership.relay_session import SILENCE_TIMEOUT

SESSION = "550E8400-E29B-41D4-A716-446655440000"
OTHER_SESSION = "00000000-0000-4000-8000-000000000001"
SECRET = "words that are nobody's business"
ASKED = Chat("m1", ({"role": "user", "content": SECRET},))
JOB = RunJob(JobId("a job"), LeaseNumber(3), ASKED)

NODE_A = Signer.from_seed(b"\x11" * 32)  # of the recordings
NODE_B = Signer.from_seed(b"\x22" * 32)
HOST_ID, A, B = (each.public_key.hex() for each in (HOST, NODE_A, NODE_B))
TEALE_MODEL = "mlx-community/Qwen3-8B-4bit"


def worker_side(name: str = "bela", token: str = "tok") -> tuple[TealeLocalNode, str]:
    """Return a worker's side, and its id."""
    signer = Signer.from_seed(name.encode().ljust(32))
    model = ServedModel("m1", CHAT_ONLY, frozenset(Feature))
    member = WorkerProfile(
        name,
        model,
        2,
        token,
        identity=signer,
        epoch=EPOCH,
        random_bytes=deterministic_bytes(name.encode()),
    )
    return worker_node(member), signer.public_key.hex()


def pool() -> tuple[Network, ShoalNode, ShoalNode, str]:
    """Return a coordinator and a worker that have met, through the former's relay."""
    net = Network()
    host = net.attach(coordinator_side(admission=require_token("tok")))
    side, worker_id = worker_side()
    member = net.attach(side)
    net.run(1.0)
    return net, host, member, worker_id


def open_pool() -> tuple[Network, ShoalNode]:
    """Return a coordinator that lets everybody in, alone on its relay."""
    net = Network()
    host = net.attach(coordinator_side(Config(open=True)))
    return net, host


def register(
    net: Network, end: ForeignNode, signer: Signer, **capabilities: Any
) -> None:
    """Register a node that is not ours, as Rust nodes do."""
    node_id = signer.public_key.hex()
    payload = {
        "nodeID": node_id,
        "publicKey": node_id,
        "displayName": "n",
        "capabilities": RUST_CAPABILITIES | capabilities,
        "signature": signer.sign(node_id.encode()).hex(),
    }
    net.say(end, "register", payload)


def ends(sender: str, session_id: str) -> dict[str, str]:
    return {"fromNodeID": sender, "toNodeID": HOST_ID, "sessionID": session_id}


def say(
    net: Network, end: ForeignNode, sender: str, session_id: str, text: str
) -> None:
    """Let a node that is not ours say something in a session."""
    data = base64.b64encode(text.encode()).decode()
    net.say(end, "relayData", ends(sender, session_id) | {"data": data})


def said_to(end: ForeignNode, session_id: str | None = None) -> list[dict[str, Any]]:
    """Return what a node that is not ours was told in a session, or in any."""
    return [
        json.loads(base64.b64decode(each["data"]))
        for each in end.of("relayData")
        if session_id in (None, each["sessionID"])
        and base64.b64decode(each["data"])[:1] == b"{"
    ]


RUST_CAPABILITIES = json.loads(case_of("node_capabilities/rust_extras")["json_text"])
RUST_REQUEST = case_of("cluster_rust_emits/inferenceRequest")["json_text"]
RUST_REQUEST_ID = "550e8400-e29b-41d4-a716-446655440000"


def rust_node(net: Network, **capabilities: Any) -> ForeignNode:
    """Connect a Rust node that is ready when it is called on."""
    end = net.attach_raw()
    register(net, end, NODE_B, **capabilities)
    net.run(DISCOVER_INTERVAL_MIN + 1)
    return end


def chunk(request_id: str, text: str) -> str:
    """Return a piece of an answer, as Rust nodes write it."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    said = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "/models/a.gguf",
        "choices": [choice],
    }
    payload = {"requestID": request_id, "chunk": said}
    return json.dumps({"inferenceChunk": {"_0": payload}})


def accept_call(net: Network, end: ForeignNode, sender: str) -> str:
    """Say that the session is ready that a node was called on in."""
    session_id: str = end.of("relayOpen")[-1]["sessionID"]
    net.say(end, "relayReady", ends(sender, session_id))
    return session_id


# Nodes of ours among themselves.


def test_a_worker_calls_on_the_coordinator_of_its_relay() -> None:
    _, host, member, worker_id = pool()

    (met,) = host.words(PeerJoined)
    assert (met.name, met.submits_jobs, met.protection) == (
        "bela",
        False,
        Protection.NOISE,
    )
    (offered,) = host.words(OffersChanged, worker_id)
    assert [each.models for each in offered.offers] == [frozenset({"m1"})]
    assert offered.offers[0].proven
    assert [each.name for each in member.words(PeerJoined)] == [HOST_ID]
    assert not host.notices + member.notices


def test_the_relay_sees_neither_question_nor_answer_nor_token() -> None:
    net, host, member, worker_id = pool()

    net.tell(host, worker_id, JOB)
    (asked,) = member.words(RunJob)
    net.tell(member, HOST_ID, AnswerChunk(asked.job_id, asked.lease, ["an answer"]))
    net.tell(member, HOST_ID, Completed(asked.job_id, asked.lease))

    assert asked.work == ASKED
    assert host.words(AnswerChunk) == [
        AnswerChunk(JOB.job_id, JOB.lease, ["an answer"])
    ]
    (completed,) = host.words(Completed)
    assert (completed.job_id, completed.lease) == (JOB.job_id, JOB.lease)
    carried = [json.loads(each).get("relayData") for each in net.carried]
    data = b"".join(base64.b64decode(each["data"]) for each in carried if each)
    assert len(data) > 1000
    for secret in (SECRET, "an answer", "inferenceRequest", '"tok"', "deviceInfo"):
        assert secret.encode() not in data
        assert not any(secret in text for text in net.carried)


def test_many_jobs_go_on_in_one_session_and_end_in_any_order() -> None:
    net, host, member, worker_id = pool()
    jobs = [replace(JOB, job_id=JobId(f"job {n}")) for n in range(20)]

    for job in jobs:
        net.tell(host, worker_id, job)
    for asked in reversed(member.words(RunJob)):
        net.tell(member, HOST_ID, AnswerChunk(asked.job_id, asked.lease, ["x"]))
        net.tell(member, HOST_ID, Completed(asked.job_id, asked.lease))

    ended = [each.job_id for each in host.words(Completed)]
    assert ended == [job.job_id for job in reversed(jobs)]
    assert len({json.loads(t)["relayOpen"]["sessionID"] for t in opened(net)}) == 1


def test_the_chunks_of_one_read_are_one_event() -> None:
    net, host, member, worker_id = pool()
    net.tell(host, worker_id, JOB)
    (asked,) = member.words(RunJob)

    said = [
        data
        for text in ("one ", "two ", "three")
        for data in sent(
            member.node.send(
                ToPeer(HOST_ID, AnswerChunk(asked.job_id, asked.lease, [text])), net.now
            )
        )
    ]
    (heard,) = host.node.receive(said, net.now)

    expected = AnswerChunk(JOB.job_id, JOB.lease, ["one ", "two ", "three"])
    assert heard == PeerMessage(worker_id, expected)


def test_a_message_that_the_relay_loses_ends_the_session_and_the_next_begins() -> None:
    net, host, member, worker_id = pool()
    net.tell(host, worker_id, JOB)
    (asked,) = member.words(RunJob)
    for _ in range(2):
        word = AnswerChunk(asked.job_id, asked.lease, ["x"])
        (data,) = sent(member.node.send(ToPeer(HOST_ID, word), net.now))

    heard = host.node.receive([data], net.now)

    (gone,) = (each.message for each in heard if isinstance(each, PeerMessage))
    assert isinstance(gone, PeerLeft)
    assert "were lost" in gone.reason
    assert not [each for each in heard if isinstance(each, Notice)]


def test_an_abandoned_job_is_cancelled_at_the_worker() -> None:
    net, host, member, worker_id = pool()
    net.tell(host, worker_id, JOB)

    net.tell(host, worker_id, CancelJob(JOB.job_id, JOB.lease))

    (asked,) = member.words(RunJob)
    assert member.words(CancelJob) == [CancelJob(asked.job_id, asked.lease)]


def test_a_worker_that_is_cut_off_is_gone_and_met_again_when_it_returns() -> None:
    net, host, member, worker_id = pool()
    net.tell(host, worker_id, JOB)

    net.detach(member)
    net.run(1.0)
    assert len(host.words(PeerLeft)) == 1
    returned = net.attach(worker_side()[0])
    net.run(1.0)

    assert [type(each.message) for each in host.heard[-2:]] == [
        PeerJoined,
        OffersChanged,
    ]
    assert len(returned.words(PeerJoined)) == 1


def test_a_worker_that_takes_the_place_of_its_older_self_is_met_anew() -> None:
    net, host, member, _ = pool()

    newer = net.attach(worker_side()[0])
    net.run(1.0)

    assert member.closed == "Replaced by newer session"
    assert [type(w) for w in (each.message for each in host.heard)].count(
        PeerJoined
    ) == 2
    assert len(host.words(PeerLeft)) == 1
    assert len(newer.words(PeerJoined)) == 1


def test_a_coordinator_that_comes_later_finds_its_workers() -> None:
    net = Network()
    side, worker_id = worker_side()
    member = net.attach(side)
    net.run(5.0)
    assert not member.words(PeerJoined)

    host = net.attach(coordinator_side(admission=require_token("tok")))
    net.run(30.0)

    assert [
        each.peer for each in host.heard if isinstance(each.message, PeerJoined)
    ] == [worker_id]


def test_a_worker_with_a_wrong_token_does_not_join() -> None:
    net = Network()
    host = net.attach(coordinator_side(admission=require_token("another")))
    member = net.attach(worker_side()[0])

    net.run(20.0)

    assert not host.words(PeerJoined)
    assert not member.words(RunJob)


def test_a_worker_serves_only_the_coordinator_of_its_relay() -> None:
    net, _, member, worker_id = pool()
    stranger = net.attach_raw()
    register(net, stranger, NODE_B)

    net.say(
        stranger,
        "relayOpen",
        {"fromNodeID": B, "toNodeID": worker_id, "sessionID": SESSION},
    )

    assert not stranger.of("relayReady")
    assert [each["sessionID"] for each in stranger.of("relayClose")] == [SESSION]
    assert len(member.words(PeerJoined)) == 1


def test_two_coordinators_join_once_and_exchange_offers() -> None:
    net, host = open_pool()
    other = net.attach(coordinator_side(Config(open=True), signer=NODE_A))
    offers = (Offer(CHAT_ONLY, frozenset({"m1"})),)

    net.tell(host, ALL_PEERS, OffersChanged(offers))
    net.run(3 * DISCOVER_INTERVAL)

    assert len(opened(net)) == 1
    assert [each.protection for each in host.words(PeerJoined)] == [Protection.NOISE]
    assert [each.protection for each in other.words(PeerJoined)] == [Protection.NOISE]
    (offer,) = other.words(OffersChanged)[-1].offers
    assert (offer.models, offer.neighbour) == ({"m1"}, True)
    net.tell(other, HOST_ID, JOB)
    assert [each.work for each in host.words(RunJob)] == [ASKED]


def test_a_coordinator_with_a_passcode_does_not_show_it_to_others() -> None:
    net = Network()
    net.attach(coordinator_side(Config(passcode="of our cluster")))
    net.attach(coordinator_side(Config(passcode="of our cluster"), signer=NODE_A))

    net.run(3 * DISCOVER_INTERVAL)

    assert not opened(net)


def test_a_dismissed_peer_is_not_dialled_for_a_while() -> None:
    net, host = open_pool()
    node = rust_node(net)
    accept_call(net, node, B)
    assert len(host.words(PeerJoined)) == 1

    net.tell(host, B, Dismiss("another connection has taken its place"))
    net.run(DISMISSED_PAUSE - DISCOVER_INTERVAL)

    assert node.of("relayClose")
    assert len(node.of("relayOpen")) == 1
    net.run(2 * DISCOVER_INTERVAL)
    assert len(node.of("relayOpen")) == 2


def opened(net: Network) -> list[str]:
    return [text for text in net.carried if text.startswith('{"relayOpen"')]


def test_a_worker_on_a_relay_without_a_coordinator_serves_every_node() -> None:
    side, worker_id = worker_side()
    node = RelayNode(side, 0.0)
    node.tick(0.0)

    ack = {"nodeID": worker_id, "registeredAt": 1.0, "ttlSeconds": 300}
    (met, *_) = node.receive([json.dumps({"registerAck": ack})], 0.0)
    opening = {"relayOpen": ends(B, SESSION)}
    data = base64.b64encode(RUST_REQUEST.encode()).decode()
    said = {"relayData": ends(B, SESSION) | {"data": data}}
    heard = node.receive([json.dumps(opening), json.dumps(said)], 0.0)

    assert met == PeerMessage(ALL_PEERS, PeerJoined(ALL_PEERS, submits_jobs=True))
    words = [type(each.message) for each in heard if isinstance(each, PeerMessage)]
    assert (words[0], words[-1]) == (PeerJoined, RunJob)


# The relay.


def test_a_node_registers_as_in_the_recordings() -> None:
    case = case_of("identity/1")
    net = Network()

    net.attach(coordinator_side(signer=NODE_B))

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
    node = RelayNode(coordinator_side(config, admission=require_token("tok")), 0.0)
    node.tick(0.0)
    ack = {"nodeID": node.id, "registeredAt": 0, "ttlSeconds": 300}

    heard = [
        each
        for _ in range(2)
        for each in node.receive([json.dumps({"registerAck": ack})], 1.0)
        if isinstance(each, Notice)
    ]

    assert [("--tealenet-open" in each.text) for each in heard] == [True] * noticed


def test_a_node_proves_its_key_to_a_relay_that_asks() -> None:
    net = Network()
    net.attach(coordinator_side())

    first, second, *_ = (json.loads(text) for text in net.carried)

    assert "shoal" not in first["register"]
    proof = second["register"]["shoal"]
    text = f"shoal relay register 1:{proof['challenge']}:{HOST_ID}".encode()
    assert verify(HOST.public_key, bytes.fromhex(proof["proof"]), text)


def test_a_node_registers_again_before_it_is_forgotten() -> None:
    net, _ = open_pool()
    count = registrations(net)

    net.run(REFRESH_INTERVAL - 1)
    assert registrations(net) == count
    net.run(2)

    assert registrations(net) == count + 1


def test_a_change_of_models_is_registered_soon_and_only_once() -> None:
    net, host = open_pool()
    count = registrations(net)

    for name in ("m1", "m2", "m3"):
        offers = (Offer(CHAT_ONLY, frozenset({name}), slots=4, context=8192),)
        net.tell(host, ALL_PEERS, OffersChanged(offers))
    net.run(5.0)

    assert registrations(net) == count + 1
    said = json.loads([t for t in net.carried if t.startswith('{"register"')][-1])
    capabilities = said["register"]["capabilities"]
    assert capabilities["loadedModels"] == ["m3"]
    assert capabilities["maxConcurrentRequests"] == 4
    assert capabilities["effectiveContext"] == 8192


def test_a_node_without_capacity_registers_as_unavailable() -> None:
    net, host = open_pool()

    net.tell(host, ALL_PEERS, LoadChanged(WorkerLoad(unfit="too hot")))
    net.run(5.0)

    said = json.loads([t for t in net.carried if t.startswith('{"register"')][-1])
    assert said["register"]["capabilities"]["isAvailable"] is False


def test_a_node_looks_for_others_every_few_seconds() -> None:
    net, _ = open_pool()

    net.run(5 * DISCOVER_INTERVAL)

    looks = [text for text in net.carried if text.startswith('{"discover"')]
    assert len(looks) == 6


def test_a_relay_that_does_not_acknowledge_is_left() -> None:
    node = RelayNode(coordinator_side(), 0.0)
    node.tick(0.0)
    assert node.deadline == ACK_TIMEOUT

    (close,) = node.tick(ACK_TIMEOUT)

    assert "did not acknowledge" in str(close)
    assert node.deadline is None
    assert not node.tick(100.0)
    assert not node.receive(['{"registerAck":{}}'], 100.0)


def test_a_relay_that_refuses_us_is_left_with_its_reason() -> None:
    node = RelayNode(coordinator_side(), 0.0)
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


def test_a_relay_that_sends_garbage_is_left_in_the_end() -> None:
    node = RelayNode(coordinator_side(), 0.0)
    node.tick(0.0)

    heard = [each for _ in range(INVALID_MAX) for each in node.receive(["no"], 0.0)]

    assert "invalid messages of the relay in a row" in str(heard[-1])
    assert node.deadline is None


def registrations(net: Network) -> int:
    return sum(text.startswith('{"register"') for text in net.carried)


# Rust nodes: they serve, one request after the other, and are not greeted.


def test_a_rust_node_is_called_on_and_met_by_its_capabilities() -> None:
    net, host = open_pool()

    node = rust_node(net)
    accept_call(net, node, B)

    (met,) = host.words(PeerJoined, B)
    assert (met.name, met.protection) == (B, Protection.PLAIN)
    (offered,) = host.words(OffersChanged, B)
    (offer,) = offered.offers
    assert (offer.models, offer.slots, offer.context) == (frozenset({"a"}), 4, 32768)
    assert not [each for each in said_to(node) if "hello" in each]


def test_a_rust_node_answers_as_in_the_recordings() -> None:
    net, host = open_pool()
    node = rust_node(net)
    session_id = accept_call(net, node, B)

    net.tell(host, B, replace(JOB, work=replace(ASKED, model="a")))
    (request,) = [each for each in said_to(node) if "inferenceRequest" in each]
    asked = request["inferenceRequest"]["_0"]
    complete = case_of("cluster_rust_emits/inferenceComplete_tokens")["json_text"]
    for text in (chunk(asked["requestID"], "Hello"), chunk(asked["requestID"], "!")):
        say(net, node, B, session_id, text)
    say(
        net,
        node,
        B,
        session_id,
        complete.replace(RUST_REQUEST_ID, asked["requestID"]),
    )

    assert asked["request"]["messages"] == [{"role": "user", "content": SECRET}]
    pieces = [each.pieces for each in host.words(AnswerChunk, B)]
    assert pieces == [["Hello"], ["!"]]
    (completed,) = host.words(Completed, B)
    assert completed.job_id == JOB.job_id


def test_a_node_that_has_other_models_than_before_offers_those() -> None:
    net, host = open_pool()
    node = rust_node(net)
    accept_call(net, node, B)

    register(net, node, NODE_B, loadedModels=["a", "b"])
    net.run(DISCOVER_INTERVAL)

    (_, offered) = host.words(OffersChanged, B)
    assert [each.models for each in offered.offers] == [{"a"}, {"b"}]


def test_a_node_that_is_not_available_any_more_is_unfit() -> None:
    net, host = open_pool()
    node = rust_node(net)
    accept_call(net, node, B)

    register(net, node, NODE_B, isAvailable=False)
    net.run(DISCOVER_INTERVAL)
    register(net, node, NODE_B, isAvailable=True)
    net.run(DISCOVER_INTERVAL)

    conditions = [each.load.unfit for each in host.words(LoadChanged)]
    assert conditions == ["not available", ""]


def test_a_peer_that_is_cut_off_is_gone_once() -> None:
    net, host = open_pool()
    node = rust_node(net)
    accept_call(net, node, B)
    net.tell(host, B, replace(JOB, work=replace(ASKED, model="a")))

    net.detach(node)
    net.run(20.0)

    assert len(host.words(PeerLeft)) == 1


def test_a_peer_that_ends_its_session_is_gone_and_called_on_again() -> None:
    net, host = open_pool()
    node = rust_node(net)
    session_id = accept_call(net, node, B)

    net.say(node, "relayClose", ends(B, session_id))
    assert [each.reason for each in host.words(PeerLeft)] == [
        "the peer closed the session"
    ]
    net.run(2.0)

    assert len(node.of("relayOpen")) == 2
    accept_call(net, node, B)
    assert len(host.words(PeerJoined)) == 2


def test_a_peer_that_the_relay_does_not_know_any_more_is_gone() -> None:
    net, host = open_pool()
    node = rust_node(net)
    accept_call(net, node, B)

    error = {"code": "peer_not_found", "message": f"Peer {B} is not connected"}
    heard = host.node.receive([json.dumps({"error": error})], net.now)

    assert [type(each.message) for each in heard if isinstance(each, PeerMessage)] == [
        PeerLeft
    ]


def test_a_peer_that_is_never_ready_is_called_on_ever_more_rarely() -> None:
    net, host = open_pool()
    node = rust_node(net)

    net.run(100.0)

    assert not host.words(PeerJoined)
    calls = len(node.of("relayOpen"))
    assert 4 <= calls <= 8
    assert len(node.of("relayClose")) in (calls, calls - 1)
    net.run(200.0)
    assert len(node.of("relayOpen")) <= calls + 4


# Gateways: they ask, in a session for each request, and go by that session alone.


def gateway(net: Network) -> ForeignNode:
    end = net.attach_raw()
    register(net, end, NODE_B, loadedModels=[])
    return end


@pytest.mark.parametrize("flat", [False, True])
def test_a_gateway_is_answered_in_the_session_that_it_asked_in(flat: bool) -> None:
    net, host = open_pool()
    end = gateway(net)
    request = json.loads(RUST_REQUEST)
    if flat:
        request = {"inferenceRequest": request["inferenceRequest"]["_0"]}

    for session_id in (SESSION, OTHER_SESSION):
        net.say(end, "relayOpen", ends(B, session_id))
        text = json.dumps(request).replace(RUST_REQUEST_ID, session_id)
        say(net, end, B, session_id, text)
    one, two = host.words(RunJob, B)
    net.tell(host, B, AnswerChunk(two.job_id, two.lease, ["for the second"]))
    net.tell(host, B, AnswerChunk(one.job_id, one.lease, ["for the first"]))
    net.tell(host, B, Completed(one.job_id, one.lease))

    assert [each["sessionID"] for each in end.of("relayReady")] == [
        SESSION,
        OTHER_SESSION,
    ]
    assert "for the first" in json.dumps(said_to(end, SESSION))
    assert "for the second" in json.dumps(said_to(end, OTHER_SESSION))
    kinds = [next(iter(each)) for each in said_to(end, SESSION)]
    assert kinds[-1] == "inferenceComplete"
    assert "inferenceComplete" not in json.dumps(said_to(end, OTHER_SESSION))
    assert len(host.words(PeerJoined)) == 1


def test_a_gateway_that_closes_its_session_wants_no_answer_any_more() -> None:
    net, host = open_pool()
    end = gateway(net)
    net.say(end, "relayOpen", ends(B, SESSION))
    say(net, end, B, SESSION, RUST_REQUEST)
    (asked,) = host.words(RunJob)

    net.say(end, "relayClose", ends(B, SESSION))

    assert host.words(CancelJob) == [CancelJob(asked.job_id, asked.lease)]
    assert not host.words(PeerLeft)
    net.run(LINGER + 1)
    assert len(host.words(PeerLeft)) == 1


def test_a_long_request_survives_a_gateway_without_heartbeats() -> None:
    net, host = open_pool()
    end = gateway(net)
    net.say(end, "relayOpen", ends(B, SESSION))
    say(net, end, B, SESSION, RUST_REQUEST)
    (asked,) = host.words(RunJob)

    net.run(250.0)
    net.tell(host, B, Completed(asked.job_id, asked.lease))

    assert not host.words(PeerLeft) + host.words(CancelJob)
    assert "inferenceComplete" in json.dumps(said_to(end, SESSION))


def test_a_request_that_is_under_way_in_another_session_is_refused_there() -> None:
    net, host = open_pool()
    end = gateway(net)

    for session_id in (SESSION, OTHER_SESSION):
        net.say(end, "relayOpen", ends(B, session_id))
        say(net, end, B, session_id, RUST_REQUEST)

    assert len(host.words(RunJob)) == 1
    assert "inferenceError" in json.dumps(said_to(end, OTHER_SESSION))
    assert "inferenceError" not in json.dumps(said_to(end, SESSION))


def test_no_relay_node_is_admitted_if_a_token_is_required() -> None:
    net = Network()
    host = net.attach(coordinator_side(admission=require_token("tok")))
    end = gateway(net)

    net.say(end, "relayOpen", ends(B, SESSION))
    say(net, end, B, SESSION, RUST_REQUEST)

    assert not host.words(PeerJoined) + host.words(RunJob)
    assert "a peer needs a passcode or a join token here" in json.dumps(
        said_to(end, SESSION)
    )


def test_a_peer_may_have_only_so_many_sessions() -> None:
    net, _ = open_pool()
    end = gateway(net)

    for number in range(SESSIONS_OF_PEER_MAX + 1):
        net.say(end, "relayOpen", ends(B, f"{number:08}-0000-4000-8000-000000000001"))

    assert len(end.of("relayReady")) == SESSIONS_OF_PEER_MAX
    assert len(end.of("relayClose")) == 1


def test_guesses_count_for_where_a_node_comes_from() -> None:
    net = Network()
    presented: list[str] = []

    def admission(applicant: JoinRequest) -> AdmissionGrant:
        presented.append(applicant.address)
        raise NotAdmitted("wrong token")

    side = coordinator_side(admission=admission)
    net.attach(side, address_of=net.relay.address_of)
    worker, _ = worker_side()
    net.attach(worker)
    net.run(1.0)

    assert set(presented) == {"here"}


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
        net.say(end, "relayOpen", ends(B, session_id))
        say(net, end, B, session_id, RUST_REQUEST)
    other, other_id = worker_side("carl")
    net.attach(other)
    net.run(1.0)

    assert [each["sessionID"][:8] for each in end.of("relayClose")] == [
        f"{number:08}" for number in range(11)
    ]
    assert not host.words(PeerLeft)
    assert {
        each.peer for each in host.heard if isinstance(each.message, PeerJoined)
    } == {
        worker_id,
        other_id,
    }


def test_a_session_belongs_to_its_opener() -> None:
    net, host = open_pool()
    end = gateway(net)
    net.say(end, "relayOpen", ends(B, SESSION))

    text = json.dumps({"relayOpen": ends(A, SESSION.lower())})
    (notice,) = host.node.receive([text], net.now)

    assert "belongs to another node" in str(notice)


def test_a_silent_session_times_out() -> None:
    net, host = open_pool()
    end = gateway(net)
    net.say(end, "relayOpen", ends(B, SESSION))

    net.run(SILENCE_TIMEOUT + 1)

    assert len(end.of("relayClose")) == 1
    assert not host.words(PeerJoined)


def test_data_with_another_sender_is_ignored() -> None:
    net, host = open_pool()
    end = gateway(net)
    net.say(end, "relayOpen", ends(B, SESSION))

    data = base64.b64encode(RUST_REQUEST.encode()).decode()
    forged = {"relayData": ends(A, SESSION) | {"data": data}}
    heard = host.node.receive([json.dumps(forged)], net.now)

    assert not heard


# Macs: they would rather connect directly, and have keys for a channel of their own.


def mac(net: Network) -> ForeignNode:
    end = net.attach_raw()
    register_text = case_of("relay_swift_emits/register")["json_text"]
    net.say(end, "register", json.loads(register_text)["register"])
    return end


def test_an_offer_of_a_mac_is_answered_so_that_it_keeps_to_the_relay() -> None:
    net, _ = open_pool()
    end = mac(net)

    offer = json.loads(case_of("relay_swift_emits/offer")["json_text"])["offer"]
    net.say(end, "offer", offer | {"toNodeID": HOST_ID})

    (answer,) = end.of("answer")
    assert answer["sessionID"] == offer["sessionID"]
    assert answer["connectionInfo"] == {
        "publicIP": "",
        "publicPort": 0,
        "natType": "symmetric",
        "wgPublicKey": HOST.exchange_key.hex(),
    }
    signed = f"{HOST_ID}:{A}:{offer['sessionID']}".encode()
    assert verify(HOST.public_key, bytes.fromhex(answer["signature"]), signed)


def test_a_mac_opens_its_session_again_after_it_was_cut_off() -> None:
    net, host = open_pool()
    end = mac(net)

    net.say(end, "relayOpen", ends(A, SESSION))
    net.say(end, "relayOpen", ends(A, SESSION))

    assert len(end.of("relayReady")) == 2
    assert not host.notices


def test_a_mac_is_offered_encryption_and_talked_to_in_the_open_without() -> None:
    net, host = open_pool()
    end = mac(net)
    net.run(DISCOVER_INTERVAL)

    session_id = accept_call(net, end, A)
    (offer,) = (base64.b64decode(each["data"]) for each in end.of("relayData"))
    assert (offer[0], len(offer)) == (1, 109)
    assert not host.words(PeerJoined)
    net.run(TEALE_TIMEOUT)

    (met,) = host.words(PeerJoined)
    assert (met.name, met.protection) == (A, Protection.PLAIN)
    (offered,) = host.words(OffersChanged)
    assert [each.models for each in offered.offers] == [{TEALE_MODEL}]
    net.tell(host, A, replace(JOB, work=replace(ASKED, model=TEALE_MODEL)))
    assert "inferenceRequest" in json.dumps(said_to(end, session_id))


def test_a_mac_that_has_opened_a_session_is_not_called_on_in_another() -> None:
    net, host = open_pool()
    end = mac(net)
    heartbeat = case_of("cluster_swift_emits/heartbeat_full")["json_text"]
    net.say(end, "relayOpen", ends(A, SESSION))
    say(net, end, A, SESSION, heartbeat)

    net.run(DISCOVER_INTERVAL + 1)

    assert not end.of("relayOpen")
    assert {TEALE_MODEL} in [
        each.models for word in host.words(OffersChanged) for each in word.offers
    ]
    net.tell(host, A, replace(JOB, work=replace(ASKED, model=TEALE_MODEL)))
    assert "inferenceRequest" in json.dumps(said_to(end, SESSION))


def test_a_mac_without_a_sign_of_life_is_gone() -> None:
    net, host = open_pool()
    end = mac(net)
    net.run(DISCOVER_INTERVAL)
    accept_call(net, end, A)
    net.run(TEALE_TIMEOUT)

    net.run(50.0)
    assert host.words(LoadChanged)[-1].load.unfit
    net.run(50.0)

    assert len(host.words(PeerLeft)) == 1


# Relays that are not to be trusted.


def test_a_node_that_once_had_a_key_is_not_listened_to_without() -> None:
    side, worker_id = worker_side()
    assert side.identity is not None
    pinned = PinnedKeys({worker_id: side.identity.exchange_key})
    node = RelayNode(coordinator_side(Config(open=True)), 0.0, pinned)
    node.tick(0.0)

    opening = {"relayOpen": ends(worker_id, SESSION)}
    data = base64.b64encode(RUST_REQUEST.encode()).decode()
    said = {"relayData": ends(worker_id, SESSION) | {"data": data}}
    heard = node.receive([json.dumps(opening), json.dumps(said)], 0.0)

    assert [type(each) for each in heard] == [Send, Notice]
    assert "no encryption from a peer" in str(heard[1])


def test_an_invalid_key_of_a_node_affects_only_that_node() -> None:
    net, host = open_pool()
    signers = (Signer.from_seed(bytes([n]) * 32) for n in range(99))
    evil = next(each for each in signers if each.public_key.hex() < HOST_ID)
    node_id = evil.public_key.hex()
    proof = encode_base64(evil.sign(noise_binding(bytes(32))))
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

    ready = {"relayReady": ends(node_id, session_id)}
    (answer,) = sent(host.node.receive([json.dumps(ready)], net.now))

    assert "relayClose" in str(answer)
    assert host.node.deadline is not None


@given(st.lists(st.text() | st.binary(), max_size=5))
def test_no_garbage_of_a_relay_is_more_than_a_notice(garbage: list[Any]) -> None:
    node = RelayNode(coordinator_side(), 0.0)
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
def test_messages_of_any_content_do_no_harm(kind: str, payload: Any) -> None:
    node = RelayNode(coordinator_side(Config(open=True)), 0.0)
    node.tick(0.0)
    open_one = {"relayOpen": ends(B, SESSION)}
    node.receive([json.dumps(open_one)], 0.0)

    for _ in range(2):
        outputs = node.receive([json.dumps({kind: payload})], 0.0)
        assert all(isinstance(o.data, str) for o in outputs if isinstance(o, Send))
