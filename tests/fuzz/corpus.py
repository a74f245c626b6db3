"""Good input to begin with: what real peers wrote, and what ours say to each other."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from protocols.tealenet.network import Network
from protocols.tealenet.network import coordinator_side as node_side
from protocols.tealenet.peers import (
    OFFER,
    RUN,
    PeerPair,
    coordinator_side,
    signer,
    worker_side,
)
from shoal.domain.ids import JobId
from shoal.domain.model_messages import ModelAnswer, ModelChunk, ModelDone, ModelQuery
from shoal.domain.outcome import Delta, Usage
from shoal.domain.receipts import SignedReceipt
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
from shoal.protocols.seam.admission import require_token
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
            if (said := case.get(name)) is not None:
                text = said if isinstance(said, str) else json.dumps(said)
                found.append(text.encode(errors="surrogatepass"))
    return found


def said_between(*, extended: bool) -> tuple[list[bytes], list[bytes]]:
    """Return what a worker and its coordinator say to each other on a LAN.

    Without ``extended`` they are two coordinators, who do not know the other's jobs.
    """
    one = worker_side("w", "t") if extended else coordinator_side("b", offers=(OFFER,))
    two = PeerPair(
        one, coordinator_side("a", admission=require_token("t"), open=not extended)
    )
    two.settle()
    asker, doer = two.acceptor, two.dialler
    for number in range(4):
        asker.take(asker.conversation.send(_numbered(number), 1.0))
        two.settle()
        run: RunJob = doer.of(RunJob)[-1]
        job = (run.job_id, run.lease)
        tool = Delta(0, {"tool_calls": [{"index": 0, "id": "x"}]})
        doer.take(doer.conversation.send(AnswerChunk(*job, ["a", tool]), 1.0))
        ends = (
            Completed(*job, usage=Usage(3, 4), receipt=SignedReceipt(b"{}", b"s")),
            Rejected(*job, "busy"),
            Failed(*job, "broken"),
            Completed(*job, "length"),
        )
        doer.take(doer.conversation.send(ends[number], 1.0))
        two.settle()
    for end in (asker, doer):
        for about in (
            OffersChanged((OFFER,)),
            LoadChanged(WorkerLoad("hot", 3, 0.5)),
            ModelQuery("m"),
            ModelAnswer("m", True, 5),
            ModelChunk("550E8400-E29B-41D4-A716-446655440000", "a.bin", 0, b"12345"),
            ModelDone("550E8400-E29B-41D4-A716-446655440000", "m"),
            Draining("soon"),
        ):
            end.take(end.conversation.send(about, 3.0))
    two.until(6.0)
    return doer.sent, asker.sent


def _numbered(number: int) -> RunJob:
    return replace(RUN, job_id=JobId(f"job{number}"))


def said_on_relay() -> tuple[list[bytes], list[bytes]]:
    """Return what nodes say to a relay of ours, and it to them, without secrets."""
    network = Network()
    host = network.attach(node_side())
    network.tell(host, ALL_PEERS, OffersChanged((OFFER,)))
    worker = network.attach(worker_side("w"))
    raw = network.attach_raw()
    key = signer("raw")
    own = key.public_key.hex()
    network.say(
        raw,
        "register",
        {
            "nodeID": own,
            "publicKey": own,
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
            "signature": key.sign(own.encode()).hex(),
        },
    )
    network.say(raw, "discover", {"requestingNodeID": own})
    network.run(30.0)
    assert worker.closed is None
    to_nodes = [json.dumps(each).encode() for each in raw.inbox]
    return [each.encode() for each in network.carried], to_nodes


def framed(messages: Iterable[bytes]) -> bytes:
    """Return messages as they go over TCP."""
    return b"".join(LENGTH.pack(len(each)) + each for each in messages)
