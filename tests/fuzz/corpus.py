"""Initial corpora: recordings of real peers, and exchanges between Shoal peers."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from protocols.tealenet.network import Network
from protocols.tealenet.network import local_coordinator as relay_coordinator
from protocols.tealenet.peers import (
    OFFER,
    RUN,
    PeerPair,
    local_coordinator,
    local_worker,
    signer,
)
from shoal.domain.ids import JobId
from shoal.domain.model_messages import ModelAnswer, ModelChunk, ModelDone, ModelQuery
from shoal.domain.outcome import Delta, Usage
from shoal.domain.vocabulary import (
    AnswerChunk,
    Completed,
    Draining,
    Failed,
    LoadChanged,
    OffersChanged,
    Rejected,
    RunJob,
)
from shoal.domain.worker import WorkerLoad
from shoal.protocols.seam.framing import LENGTH
from shoal.protocols.seam.peer_session import ALL_PEERS

VECTORS = Path(__file__).parents[1] / "protocols" / "tealenet" / "vectors"
CASES: list[dict[str, Any]] = json.loads((VECTORS / "tealenet.json").read_text())[
    "cases"
]


def recorded(*groups: str) -> list[bytes]:
    """Return the texts of recorded cases."""
    found: list[bytes] = []
    for case in CASES:
        if case["group"] not in groups:
            continue
        for name in ("json_text", "send", "data_json"):
            if (given := case.get(name)) is not None:
                text = given if isinstance(given, str) else json.dumps(given)
                found.append(text.encode(errors="surrogatepass"))
    return found


def lan_exchange() -> tuple[list[bytes], list[bytes]]:
    """Return the messages of two coordinators to each other on a LAN."""
    one = local_coordinator("b", offers=(OFFER,))
    pair = PeerPair(one, local_coordinator("a", open=True)).joined()
    submitter, server = pair.acceptor, pair.dialler
    for number in range(4):
        submitter.send(_numbered(number), 1.0)
        pair.settle()
        run: RunJob = server.messages(RunJob)[-1]
        job = (run.job_id, run.lease)
        tool = Delta(0, {"tool_calls": [{"index": 0, "id": "x"}]})
        server.send(AnswerChunk(*job, ["a", tool]), 1.0)
        ends = (
            Completed(*job, usage=Usage(3, 4)),
            Rejected(*job, "busy"),
            Failed(*job, "broken"),
            Completed(*job, "length"),
        )
        server.send(ends[number], 1.0)
        pair.settle()
    for end in (submitter, server):
        for event in (
            OffersChanged((OFFER,)),
            LoadChanged(WorkerLoad("hot", 3, 0.5)),
            ModelQuery("m"),
            ModelAnswer("m", True, 5),
            ModelChunk("550E8400-E29B-41D4-A716-446655440000", "a.bin", 0, b"12345"),
            ModelDone("550E8400-E29B-41D4-A716-446655440000", "m"),
            Draining("soon"),
        ):
            end.send(event, 3.0)
    pair.until(6.0)
    return server.sent, submitter.sent


def _numbered(number: int) -> RunJob:
    return replace(RUN, job_id=JobId(f"job{number}"))


def relay_exchange() -> tuple[list[bytes], list[bytes]]:
    """Return the messages of nodes to Shoal's relay, and those of the relay."""
    network = Network()
    host = network.attach(relay_coordinator())
    network.send(host, ALL_PEERS, OffersChanged((OFFER,)))
    worker = network.attach(local_worker("w"))
    raw = network.attach_raw()
    key = signer("raw")
    node_id = key.public_key.hex()
    network.send_raw(
        raw,
        "register",
        {
            "nodeID": node_id,
            "publicKey": node_id,
            "displayName": "raw",
            "capabilities": {
                "hardware": {
                    "chipFamily": "m2",
                    "chipName": "M2",
                    "totalRAMGB": 8.0,
                    "gpuCoreCount": 8,
                    "memoryBandwidthGBs": 100.0,
                    "tier": 3,
                },
                "loadedModels": ["m"],
                "maxModelSizeGB": 5.0,
                "isAvailable": True,
            },
            "signature": key.sign(node_id.encode()).hex(),
        },
    )
    network.send_raw(raw, "discover", {"requestingNodeID": node_id})
    network.run(30.0)
    assert worker.closed is None
    to_nodes = [json.dumps(each).encode() for each in raw.inbox]
    return [each.encode() for each in network.carried], to_nodes


def framed(messages: Iterable[bytes]) -> bytes:
    """Return messages as they go over TCP."""
    return b"".join(LENGTH.pack(len(each)) + each for each in messages)
