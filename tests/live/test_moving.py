"""Users of GrandSage, Dispatch and MacFleet move to Shoal, as the pages describe.

The programs that stay are imitated; what is Shoal's is real.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType, web

from harness.slow_imports import openai
from live.programs import KEY, PATIENCE, TINY, TOKEN, Pool, Programs
from models.tiny_answers import ANSWERS
from originals.dispatch import OriginalCoordinator, OriginalWorker, sdk_reports
from originals.grandsage import OriginalServer, VllmNode
from originals.macfleet import PeerTransport, TaskDispatcher, TaskWorker
from shoal import AsyncPool
from shoal.ledger.keys import Signer

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.WebSocketResponse]]

STORY = "Tell me a story."
SEED = bytes([0x33] * 32)
ANSWER = "One two three."
FLEET_TOKEN = "of the fleet"


@asynccontextmanager
async def grandsage_node(
    session: ClientSession, pool: Pool, token: str
) -> AsyncIterator[VllmNode]:
    """Connect a vLLM node, as its command line would with the pool's address."""
    node = VllmNode(ANSWER)
    query = f"token={token}&model=vicuna-7b&max_concurrency=4&name=gpu1"

    async def work(socket: ClientWebSocketResponse) -> None:
        await socket.send_str("")
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                node.receive(message.data)
                for frame in node.finish():
                    await socket.send_bytes(frame)

    async with session.ws_connect(f"{pool.url}/ws?{query}") as socket:
        working = asyncio.create_task(work(socket))
        try:
            yield node
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


@asynccontextmanager
async def dispatch_worker(
    session: ClientSession, pool: Pool
) -> AsyncIterator[OriginalWorker]:
    """Connect a desktop worker, as with the pool's URL in ``COORDINATOR_URL``."""
    worker = OriginalWorker()
    registered = asyncio.Event()

    async def work(socket: ClientWebSocketResponse) -> None:
        await socket.send_str(worker.register())
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                for text in worker.receive(message.data):
                    await socket.send_str(text)
                registered.set()

    async with session.ws_connect(f"{pool.url}/") as socket:
        working = asyncio.create_task(work(socket))
        try:
            await registered.wait()
            yield worker
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Serve WebSocket connections at any path; yield the host and port."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def post(
    session: ClientSession, pool: Pool, path: str, body: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    async with session.post(f"{pool.url}{path}", json=body) as response:
        answer: dict[str, Any] = await response.json()
        return response.status, answer


async def test_grandsages_nodes_and_clients_change_their_address_only(
    programs: Programs,
) -> None:
    pool = programs.serve("--grandsage-token", "their-token")
    body = {
        "model": "vicuna-7b",
        "messages": [{"role": "user", "content": "hi"}],
        "max_new_tokens": 4096,
    }
    headers = {"Authorization": f"Bearer {KEY}"}

    async with (
        asyncio.timeout(PATIENCE),
        ClientSession(headers=headers) as session,
        grandsage_node(session, pool, "their-token"),
        session.post(f"{pool.url}/api/chat", json=body) as response,
    ):
        lines = [json.loads(line) for line in (await response.text()).splitlines()]

    assert "".join(line.get("o", "") for line in lines) == ANSWER
    assert lines[-1] == {"done": True}


async def test_a_grandsage_node_may_present_the_join_token(programs: Programs) -> None:
    pool = programs.serve()

    async with (
        asyncio.timeout(PATIENCE),
        ClientSession() as session,
        grandsage_node(session, pool, TOKEN) as node,
    ):
        client = openai.AsyncOpenAI(
            base_url=f"{pool.url}/v1", api_key=KEY, max_retries=0
        )
        async with client:
            answer = await client.chat.completions.create(
                model="vicuna-7b",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=4096,
            )

    assert answer.choices[0].message.content == ANSWER
    assert node.dropped == []


async def test_a_worker_replaces_a_node_of_a_grandsage_server(
    programs: Programs,
) -> None:
    server = OriginalServer()
    ended = asyncio.Event()

    async def handle(request: web.Request) -> web.WebSocketResponse:
        assert request.query["token"] == "their-token"
        assert request.query["model"] == "tiny"
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for text in ("x " * 20_000, STORY):  # the first is too long for the model
            question = [{"role": "user", "content": text}]
            task, assigned = server.submit(question, 400, system="")
            await socket.send_str(assigned)
            while not task.done:
                server.receive((await socket.receive()).data)
        ended.set()
        return socket

    async with serving(handle) as address, asyncio.timeout(PATIENCE):
        flags = ("--token", "their-token", "--json", "--name", "gpu1")
        model = ("--model", f"tiny={TINY}")
        programs.run("join", f"ws://{address}/ws", *flags, *model)
        await ended.wait()

    too_long, answered = server.tasks.values()
    assert too_long.text == "\n[The conversation is too long for this model.]"
    assert answered.text == ANSWERS[STORY]


async def test_a_worker_replaces_that_of_a_dispatch_coordinator_and_keeps_its_key(
    programs: Programs,
) -> None:
    coordinator = OriginalCoordinator()
    public_key = Signer.from_seed(SEED).public_key
    pair = {"publicKey": [*public_key], "secretKey": [*(SEED + public_key)]}
    key_file = programs.folder / "key.json"
    key_file.write_text(json.dumps(pair))
    key_file.chmod(0o600)
    ended = asyncio.Event()

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        registration = (await socket.receive()).data
        for text in coordinator.receive(registration):
            await socket.send_str(text)
        payload = {"job_type": "LLM_INFER", "prompt": STORY}
        await socket.send_str(coordinator.assign("j1", "LLM_INFER", payload))
        while "j1" not in coordinator.done:
            for text in coordinator.receive((await socket.receive()).data):
                await socket.send_str(text)
        ended.set()
        return socket

    async with serving(handle) as address, asyncio.timeout(PATIENCE):
        flags = ("--wire", "dispatch", "--json", "--identity", str(key_file))
        model = ("--model", f"tiny={TINY}")
        programs.run("join", f"http://{address}", *flags, *model)
        await ended.wait()

    output, verified = coordinator.done["j1"]
    assert output == {"text": ANSWERS[STORY], "model": "tiny"}
    assert verified
    assert coordinator.key == public_key.hex()


async def test_dispatchs_workers_and_clients_change_their_address_only(
    programs: Programs,
) -> None:
    pool = programs.serve("--dispatch-open", "--dispatch-trust-unproven")
    job = {
        "job_type": "LLM_INFER",
        "payload": {"job_type": "LLM_INFER", "prompt": "hi"},
        "user_id": "ada",
        "privacy_class": "PRIVATE",
    }

    async with (
        asyncio.timeout(PATIENCE),
        ClientSession() as session,
        dispatch_worker(session, pool) as worker,
    ):
        _, made = await post(session, pool, "/v1/trust/create", {"user_id": "ada"})
        claim = {"pairing_code": made["pairing_code"], "provider_pubkey": worker.key}
        assert (await post(session, pool, "/v1/trust/claim", claim))[0] == 200
        status, committed = await post(session, pool, "/v1/jobs/commit/fast", job)
        assert status == 201
        path = f"{pool.url}/v1/jobs/{committed['job_id']}?wait=30"
        async with session.get(path) as response:
            done = await response.json()

    assert done["status"] == "completed"
    assert done["result"]["text"] == "[stub] 2 characters"
    assert done["receipt"]["verified"] is True
    assert worker.limits == [256]


async def test_a_dispatch_worker_is_not_paired_in_vain(programs: Programs) -> None:
    pool = programs.serve("--dispatch-open")
    job = {"job_type": "TASK", "payload": {"task_type": "classify"}, "user_id": "ada"}

    async with (
        asyncio.timeout(PATIENCE),
        ClientSession() as session,
        dispatch_worker(session, pool) as worker,
    ):
        _, made = await post(session, pool, "/v1/trust/create", {"user_id": "ada"})
        claim = {"pairing_code": made["pairing_code"], "provider_pubkey": worker.key}
        status, refused = await post(session, pool, "/v1/trust/claim", claim)
        private = job | {"privacy_class": "PRIVATE"}
        committed = await post(session, pool, "/v1/jobs/commit/cheap", private)

    assert status == 400
    assert "--dispatch-trust-unproven" in refused["error"]
    assert "--dispatch-trust-unproven" in sdk_reports(*committed)


async def test_a_macfleet_fleet_moves_with_its_token_and_ids(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MACFLEET_TOKEN", FLEET_TOKEN)
    data = ("--data-dir", str(programs.data))
    pairing = programs.run("fleet", "pair", "--theirs", "--json", *data)
    assert await asyncio.to_thread(pairing.wait) == 0
    ports = ("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0")
    pool = programs.serve("--name", "boss-1234abcd", *ports)
    port = pool.ready["ports"]["macfleet_transport"]

    # Worker and dispatcher know the id of the dispatcher that they had, or of a worker.
    worker_end = PeerTransport("mac-1", FLEET_TOKEN)
    worker = TaskWorker(
        await worker_end.connect("boss-1234abcd", port),
        {"jobs.double": lambda n: 2 * n},
    )
    dispatcher_end = PeerTransport("mac-2", FLEET_TOKEN)
    dispatcher = TaskDispatcher([await dispatcher_end.connect("boss-1234abcd", port)])
    async with asyncio.timeout(PATIENCE), worker.running(), dispatcher.running():
        async with AsyncPool(pool.url, api_key=KEY) as calls:
            assert await calls.call("jobs.double", 21) == 42
        assert await dispatcher.map("jobs.double", [1, 2, 3]) == [2, 4, 6]
    await worker_end.disconnect()
    await dispatcher_end.disconnect()
