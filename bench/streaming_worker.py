"""Workers that answer every chat with 200 chunks, over one wire each.

As a program: ``streaming_worker.py WAY HTTP_PORT TCP_PORT`` joins under the model name
WAY, prints a line when it is let in, and stays.  All but one are Shoal's own worker
before an engine that has its answers ready; ``relay`` is a node of another maker, which
writes prepared messages through the coordinator's relay in the open.

A chat whose question is ``burst`` gets its chunks at once; any other gets 50 a second,
each of which is the time at which it was made.
"""

import asyncio
import base64
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

from relayed import RelayNode, frame, message, registered, requests
from shoal.domain.outcome import Usage
from shoal.domain.work import Chat, JobKind, Work
from shoal.domain.worker import Offer, ServedModel
from shoal.engines.engine import Finished, Item
from shoal.ledger.keys import Signer
from shoal.protocols import discover
from shoal.protocols.seam.context import WorkerProfile
from shoal.transports import dialer
from shoal.transports.clock import LoopClock
from shoal.worker.agent import Agent, WorkerEvent
from shoal.worker.jobs import EngineSlots, only_model

CHUNKS = 200  # of an answer
PACE = 0.02  # seconds between the chunks of a paced answer
BURST = "burst"
TOKEN = " token"
SLOTS = 256  # the most that a peer may have open
TOKENS = Usage(9, CHUNKS)
WIRES = {"grandsage": "grandsage", "lan": "tealenet"}


async def texts(question: str) -> AsyncIterator[str]:
    """Return the chunks of an answer, as they come."""
    if question == BURST:
        for _ in range(CHUNKS):
            yield TOKEN
        return
    loop = asyncio.get_running_loop()
    due = loop.time()
    for _ in range(CHUNKS):
        yield f" {time.monotonic():.6f}"
        due += PACE
        await asyncio.sleep(due - loop.time())


class Ready:
    """An engine that costs nothing."""

    async def run(
        self, work: Work, continues: str = "", thoughts: str = ""
    ) -> AsyncIterator[Item]:
        assert isinstance(work, Chat)
        async for text in texts(str(work.messages[-1]["content"])):
            yield text
        yield Finished("stop", TOKENS)


async def join(way: str, http: int, tcp: int) -> None:
    """Serve over one of Shoal's wires, for good."""
    protocol = discover()[WIRES[way]]
    signer = Signer.from_seed(way.encode().ljust(32))
    clock = LoopClock()
    model = ServedModel(way)
    offers = (
        Offer(
            kinds=frozenset({JobKind.CHAT}),
            models=frozenset({way}),
            slots=SLOTS,
            public_key=signer.public_key.hex(),
        ),
    )
    member = WorkerProfile(
        name=way,
        model=model,
        slots=SLOTS,
        token="t",
        identity=signer,
        epoch=clock.wall() - clock.now(),
        offers=offers,
        random_bytes=secrets.token_bytes,
    )
    url = f"tcp://127.0.0.1:{tcp}" if way == "lan" else f"http://127.0.0.1:{http}"
    agent = Agent(
        protocol.dial(url, member),
        dialer.dial,
        only_model(Ready(), EngineSlots(SLOTS)),
        clock,
        Random(),
        _tell,
        offers=offers if protocol.joint else None,
    )
    await agent.run()


def _tell(happening: WorkerEvent) -> None:
    if happening.kind != "joined":
        raise RuntimeError(f"{happening.kind}: {happening.reason}")
    print(json.dumps({"joined": True}), flush=True)


async def serve_in_the_open(way: str, port: int) -> None:
    """Serve as a node of another maker does, for good."""
    seed = int.from_bytes(secrets.token_bytes(4))
    node = await registered(port, seed, way, slots=SLOTS)
    print(json.dumps({"joined": True}), flush=True)
    async with asyncio.TaskGroup() as tasks:
        async for ends, content in requests(node):
            tasks.create_task(_answer(node, ends, content))


async def _answer(node: RelayNode, ends: dict[str, str], asked: dict[str, Any]) -> None:
    request = {"requestID": asked["requestID"]}
    question = asked["request"]["messages"][-1]["content"]
    same: dict[str, bytes] = {}
    async for text in texts(question):
        if text not in same:
            chunk = _chunk({"delta": {"content": text}})
            same[text] = _carried(ends, inferenceChunk=request | {"chunk": chunk})
        node.writer.write(same[text])
    last = _chunk({"delta": {}, "finish_reason": "stop"})
    node.writer.write(_carried(ends, inferenceChunk=request | {"chunk": last}))
    node.writer.write(_carried(ends, inferenceComplete=request))


def _chunk(choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, **choice}],
    }


def _carried(ends: dict[str, str], **kinds: dict[str, Any]) -> bytes:
    content = {kind: {"_0": payload} for kind, payload in kinds.items()}
    text = json.dumps(content, separators=(",", ":")).encode()
    data = base64.b64encode(text).decode()
    return frame(message("relayData", **ends, data=data))


async def main() -> None:
    way, http, tcp = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if way in WIRES:
        await join(way, http, tcp)
    else:
        await serve_in_the_open(way, http)


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
