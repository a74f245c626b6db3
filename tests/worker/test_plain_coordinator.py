"""Our worker at a Dispatch coordinator without Shoal's extensions; all parts are real.

The coordinator's words are as recorded with the original one.
"""

import asyncio
import base64
import hashlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from aiohttp import WSMsgType, web

from gateway.serving import eventually
from harness.speed import PATIENCE
from models.tiny_answers import ANSWERS
from shoal.domain.worker import DeviceKind
from shoal.engines.llama_engine import LlamaEngine
from shoal.engines.text_tasks import TASK_NAMES, TaskRunner
from shoal.ledger.keys import verify
from shoal.protocols import discover
from shoal.protocols.seam.context import WorkerProfile
from shoal.transports import websocket
from shoal.transports.clock import LoopClock
from shoal.worker import agent as agents
from shoal.worker.agent import Agent, MachineProbe, WorkerEvent
from shoal.worker.health import HealthMeter
from shoal.worker.identity import load_identity
from shoal.worker.jobs import EngineSlots, only_model

MODEL = Path(__file__).parents[1] / "models" / "tiny.gguf"
PROTOCOL = discover()["dispatch"]

Serve: TypeAlias = Callable[["Peer"], Awaitable[None]]


class Peer:
    """The coordinator's end of one connection."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket

    async def registered(self) -> dict[str, Any]:
        """Wait for the worker to register; admit it."""
        message = await self.message("register")
        await self.send(type="register_ack", status="ok", worker_id="0b1c")
        return message

    async def message(self, wanted: str) -> dict[str, Any]:
        """Return the next message of a type; skip others."""
        while True:
            message = await self._socket.receive()
            assert message.type is WSMsgType.TEXT, f"gone before {wanted}"
            data: dict[str, Any] = json.loads(message.data)
            if data["type"] == wanted:
                return data
            if data["type"] == "heartbeat":
                await self.send(type="heartbeat_ack", status="ok")

    async def send(self, **message: object) -> None:
        await self._socket.send_str(json.dumps(message))

    async def assign(self, job_id: str, job_type: str, **payload: object) -> None:
        await self.send(
            type="job_assign",
            job_id=job_id,
            job_type=job_type,
            payload={"job_type": job_type, **payload},
            policy="FAST",
            privacy_class="PUBLIC",
            user_id="u1",
        )

    async def wait_closed(self) -> None:
        """Wait until the worker disconnects."""
        while (await self._socket.receive()).type is WSMsgType.TEXT:
            pass


class Server:
    """Passes each connection to the next handler."""

    def __init__(self, *connections: Serve) -> None:
        self._connections = list(connections)
        self.headers: list[dict[str, str]] = []
        self.served = asyncio.Event()

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        self.headers.append(dict(request.headers))
        socket = web.WebSocketResponse(timeout=1.0)
        await socket.prepare(request)
        if self._connections:
            await self._connections.pop(0)(Peer(socket))
        if not self._connections:
            self.served.set()
        await socket.close()
        return socket


@asynccontextmanager
async def worker_at(
    server: Server,
    folder: Path,
    reports: list[WorkerEvent],
    slots: EngineSlots | None = None,
) -> AsyncIterator[Agent]:
    """Run our worker against ``server`` within the block."""
    app = web.Application()
    app.router.add_get("/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = LlamaEngine("tiny", MODEL, slots=2)
    await engine.start()
    clock, signer = LoopClock(), load_identity(folder / "otter.json")
    member = WorkerProfile(
        "otter",
        engine.models[0],
        2,
        tasks=TASK_NAMES,
        device=DeviceKind.PHONE,
        identity=signer,
        epoch=clock.wall() - clock.now(),
    )
    agent = Agent(
        PROTOCOL.dial(f"http://127.0.0.1:{runner.addresses[0][1]}", member),
        websocket.connect_websocket,
        only_model(TaskRunner(engine, member.model), slots or EngineSlots(2)),
        clock,
        random.Random(0),
        reports.append,
        machine=MachineProbe(HealthMeter().measure),
    )
    running = asyncio.create_task(agent.run())
    try:
        async with asyncio.timeout(PATIENCE):
            yield agent
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.close()
        await runner.cleanup()


async def play(server: Server, folder: Path) -> list[WorkerEvent]:
    """Run the worker until the server has handled all connections."""
    reports: list[WorkerEvent] = []
    async with worker_at(server, folder, reports):
        await server.served.wait()
    return reports


def check_receipt(done: dict[str, Any], public_key: str) -> None:
    """Verify a bundled receipt as the original does: over the bytes of JavaScript.

    The keys are sorted, for those who read "canonical JSON" as that.
    """
    receipt = done["receipt"]
    canonical = json.dumps(receipt, separators=(",", ":"), ensure_ascii=False)
    output = json.dumps(done["output"], separators=(",", ":"), ensure_ascii=False)
    signature = base64.b64decode(done["receipt_signature"], validate=True)
    digest = hashlib.sha256(output.encode()).hexdigest()

    assert [*receipt] == [
        "completed_at",
        "job_id",
        "output_hash",
        "payment_ref",
        "provider_pubkey",
    ]
    assert receipt["job_id"] == done["job_id"]
    assert receipt["provider_pubkey"] == public_key
    assert receipt["output_hash"] == done["output_hash"] == f"sha256:{digest}"
    assert verify(bytes.fromhex(public_key), signature, canonical.encode())


async def test_chats_and_tasks_are_run_and_signed(tmp_path: Path) -> None:
    seen: dict[str, dict[str, Any]] = {}

    async def serve(peer: Peer) -> None:
        seen["register"] = await peer.registered()
        await peer.assign("c", "LLM_INFER", prompt="ping", max_tokens=50)
        seen["chat"] = await peer.message("job_complete")
        await peer.assign("t", "TASK", task_type="extract_json", input='a {"x":[1]}')
        seen["task"] = await peer.message("job_complete")
        await peer.assign("u", "TASK", task_type="translate", input="x")
        seen["unknown"] = await peer.message("job_complete")

    await play(Server(serve), tmp_path)

    register = seen["register"]
    key = register["provider_pubkey"]
    assert key == load_identity(tmp_path / "otter.json").public_key.hex()
    assert register["provider_type"] == "SEEKER"
    assert sorted(register["capabilities"]) == ["LLM_INFER", "TASK"]
    assert seen["chat"]["output"] == {"text": ANSWERS["ping"], "model": "tiny"}
    assert seen["task"]["output"] == {"extracted": [{"x": [1]}], "count": 1}
    assert "no task 'translate'" in seen["unknown"]["output"]["error"]
    for done in (seen["chat"], seen["task"], seen["unknown"]):
        check_receipt(done, key)


async def test_heartbeat_reports_the_machines_health(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    async def serve(peer: Peer) -> None:
        await peer.registered()
        seen.update(await peer.message("heartbeat"))

    await play(Server(serve), tmp_path)

    assert seen["metrics"].keys() == {"cpu_pct", "mem_pct", "active_jobs"}
    assert 0 <= seen["metrics"]["cpu_pct"] <= 100
    assert 0 < seen["metrics"]["mem_pct"] < 100
    assert seen["metrics"]["active_jobs"] == 0


async def test_running_jobs_are_presented_after_a_reconnect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "RETRY_FIRST", 0.01)
    question = "Tell me a story."
    seen: dict[str, Any] = {}

    async def first(peer: Peer) -> None:
        await peer.registered()
        await peer.assign("j", "LLM_INFER", prompt=question)
        await peer.send(type="heartbeat_ack", status="ok")

    async def second(peer: Peer) -> None:
        seen["register"] = await peer.registered()
        seen["done"] = await peer.message("job_complete")

    await play(Server(first, second), tmp_path)

    assert seen["done"]["output"]["text"] == ANSWERS[question]
    check_receipt(seen["done"], seen["register"]["provider_pubkey"])


async def test_leaving_worker_finishes_its_jobs(
    tmp_path: Path,
) -> None:
    questions = {"j": "Count to sixty.", "k": "Write a haiku."}
    seen: dict[str, Any] = {}
    slots = EngineSlots(2)

    async def serve(peer: Peer) -> None:
        await peer.registered()
        for job, question in questions.items():
            await peer.assign(job, "LLM_INFER", prompt=question)
        for _ in questions:
            done = await peer.message("job_complete")
            seen[done["job_id"]] = done["output"]
        await peer.wait_closed()

    reports: list[WorkerEvent] = []
    async with worker_at(server := Server(serve), tmp_path, reports, slots) as agent:
        await eventually(lambda: slots.jobs + len(seen) == len(questions))
        agent.leave()
        await server.served.wait()

    assert {job: output["text"] for job, output in seen.items()} == {
        job: ANSWERS[question] for job, question in questions.items()
    }


async def test_final_refusal_ends_the_worker(tmp_path: Path) -> None:
    async def serve(peer: Peer) -> None:
        await peer.message("register")
        await peer.send(type="register_ack", status="error", error="no more room")
        await peer.wait_closed()

    reports: list[WorkerEvent] = []
    async with worker_at(Server(serve), tmp_path, reports):
        await eventually(lambda: bool(reports))

    assert reports[-1].kind == "refused"
    assert "no more room" in reports[-1].reason
