"""Nodes on a relay: a coordinator of Shoal, its workers, and foreign nodes."""

import base64
import gc
import json
from typing import Any

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
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import RunJob
from shoal.domain.work import Chat, Feature
from shoal.domain.worker import CHAT_ONLY, ServedModel
from shoal.ledger.keys import Signer
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.tealenet.local_node import Config, TealeLocalNode, worker_node
from shoal.protocols.tealenet.relay_client.node import DISCOVER_INTERVAL_MIN

SESSION = "550E8400-E29B-41D4-A716-446655440000"
OTHER_SESSION = "00000000-0000-4000-8000-000000000001"
SECRET = "a confidential prompt"
CHAT = Chat("m1", ({"role": "user", "content": SECRET},))
JOB = RunJob(JobId("a job"), LeaseNumber(3), CHAT)
NODE_A = Signer.from_seed(b"\x11" * 32)  # of the recordings
NODE_B = Signer.from_seed(b"\x22" * 32)
HOST_ID, A, B = (each.public_key.hex() for each in (HOST, NODE_A, NODE_B))
TEALE_MODEL = "mlx-community/Qwen3-8B-4bit"
RUST_CAPABILITIES = json.loads(case_of("node_capabilities/rust_extras")["json_text"])
RUST_REQUEST = case_of("cluster_rust_emits/inferenceRequest")["json_text"]
RUST_REQUEST_ID = "550e8400-e29b-41d4-a716-446655440000"


def local_worker(name: str = "bela") -> tuple[TealeLocalNode, str]:
    """Return a worker's end, and its id."""
    signer = Signer.from_seed(name.encode().ljust(32))
    model = ServedModel("m1", CHAT_ONLY, frozenset(Feature))
    worker = WorkerProfile(
        name,
        model,
        2,
        identity=signer,
        epoch=EPOCH,
        random_bytes=deterministic_bytes(name.encode()),
    )
    return worker_node(worker), signer.public_key.hex()


def pool() -> tuple[Network, ShoalNode, ShoalNode, str]:
    """Return a coordinator and a worker that has joined through its relay."""
    net, host = open_pool()
    local, worker_id = local_worker()
    worker = net.attach(local)
    net.run(DISCOVER_INTERVAL_MIN + 1)
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


def held(kind: type) -> int:
    """Return how many objects of a type there are."""
    gc.collect()
    return sum(isinstance(each, kind) for each in gc.get_objects())


def opened(net: Network) -> list[str]:
    """Return the messages by which sessions were opened."""
    return [text for text in net.carried if text.startswith('{"relayOpen"')]


def registrations(net: Network) -> int:
    """Return how often Shoal nodes have registered."""
    return sum(text.startswith('{"register"') for text in net.carried)


def gateway(net: Network) -> ForeignNode:
    """Connect a node without models, which submits jobs."""
    end = net.attach_raw()
    register(net, end, NODE_B, loadedModels=[])
    return end


def mac(net: Network) -> ForeignNode:
    """Connect a Mac as in the recordings."""
    end = net.attach_raw()
    register_text = case_of("relay_swift_emits/register")["json_text"]
    net.send_raw(end, "register", json.loads(register_text)["register"])
    return end
