"""Operators' requests to a complete coordinator."""

import asyncio
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import ClientSession

from gateway.serving import KEY, WAIT_MAX, Pool, eventually
from peers.scripted_peers import ScriptedPeerSession, offer
from shoal import __version__
from shoal.app.server import run_coordinator
from shoal.config import ServeConfig
from shoal.coordinator.admission import WorkerAdmission, load_join_tokens
from shoal.domain.vocabulary import LoadChanged, OffersChanged
from shoal.domain.worker import Hardware, WorkerLoad
from shoal.peers.connections import PeerConnections
from shoal.protocols.seam.peer_session import (
    PeerDescribed,
    PeerJoined,
    PeerMessage,
)
from shoal.protocols.seam.session import PeerProfile
from shoal.transports.clock import LoopClock
from transports.memory_links import MemoryLink

pytestmark = pytest.mark.shared_pool

BODY = {"model": "m1", "messages": [{"role": "user", "content": "the secret"}]}
HEALTHY = {"status": "ok", "shoal": __version__, "direct": {}}


async def get(pool: Pool, path: str, status: int = 200) -> Any:
    async with pool.session.get(pool.url + path, headers=pool.headers()) as response:
        assert response.status == status
        return await response.json()


async def chat(pool: Pool) -> tuple[int, Any]:
    async with pool.session.post(
        f"{pool.url}/v1/chat/completions", json=BODY, headers=pool.headers()
    ) as response:
        return response.status, await response.json()


async def delete(pool: Pool, job: str) -> tuple[int, Any]:
    async with pool.session.delete(
        f"{pool.url}/admin/jobs/{job}", headers=pool.headers()
    ) as response:
        return response.status, await response.json()


async def test_the_status_shows_workers_jobs_and_models(pool: Pool) -> None:
    async with pool.node(slots="2") as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        asked = [tasks.create_task(chat(pool)) for _ in range(3)]
        await eventually(lambda: pool.hub.pool.queued == 1)

        status = await get(pool, "/admin/status")
        for number in range(3):
            await node.answer("a", number=number)

    assert all(answer.result()[0] == 200 for answer in asked)
    assert status["version"]
    assert status["ready"] is True
    assert status["models"] == ["m1"]
    assert status["jobs"] == {"queued": 1, "running": 2}
    (connected_at,) = (each.pop("connected_at") for each in status["workers"])
    assert 0.0 <= time.time() - connected_at < WAIT_MAX
    assert status["workers"] == [
        {
            "id": "grandsage:n1/m1",
            "models": ["m1"],
            "slots": 2,
            "busy": 2,
            "draining": "",
            "suspension": None,
            "remark": "",
            "kinds": ["chat"],
            "features": [],
            "context": 0,
            "only_for": [],
            "privacy": None,
            "tokens_per_second": None,
            "cancels": True,
            "tasks": [],
            "device": None,
            "public_key": None,
            "proven": False,
            "price": "",
            "points": 0,
            "cpu": None,
            "memory": None,
            "unfit": "",
            "queued": 0,
            "speed": 1.0,
            "temperature": None,
            "thermal": "nominal",
            "throttle": 100,
            "neighbour": False,
            "peer": None,
            "peer_name": "",
            "protection": None,
            "engine": "",
        }
    ]


async def test_status_shows_peers_and_plaintext_readers(
    pool: Pool,
) -> None:
    assert pool.gateway is not None
    keys = pool.gateway.store.keys
    clock = LoopClock()
    crowds = PeerConnections(
        pool.hub,
        clock,
        WorkerAdmission(await load_join_tokens(keys), keys, clock),
        directory=pool.gateway.directory,
    )
    studio = Hardware("Apple M2 Pro", "m2Pro", 32.0, tier=2)
    opening = [
        PeerMessage("1", PeerJoined("mac/1")),
        PeerMessage("1", PeerDescribed(PeerProfile("Studio", studio))),
        PeerMessage("1", OffersChanged((offer(neighbour=True),))),
        PeerMessage("1", LoadChanged(WorkerLoad("is too hot", 2, 0.5))),
    ]
    link = MemoryLink()
    serving = asyncio.create_task(
        crowds.serve("wire", ScriptedPeerSession([], opening), link)
    )
    await eventually(lambda: any(w.load.unfit for w in pool.hub.pool.workers.values()))
    # The pool changes before the store, and other requests see it later.
    await eventually(lambda: all(map(pool.hub.peer_route_of, pool.hub.pool.workers)))

    status = await get(pool, "/admin/status")
    (shown,) = status["workers"]
    account = "/admin/accounts/user:wire:mac%252F1"
    async with pool.session.post(
        f"{pool.url}{account}/credit", json={"amount": 5}, headers=pool.headers()
    ) as response:
        credited = await response.json()
    async with pool.session.get(
        f"{pool.url}/metrics", headers=pool.headers()
    ) as response:
        metrics = await response.text()
    link.cut()
    await serving

    assert shown["id"] == "wire:mac%2F1/m"
    assert (shown["peer"], shown["protection"]) == ("mac/1", "plain")
    assert shown["peer_name"] == "Studio"
    (peer,) = status["peers"]
    assert (peer["id"], peer["name"]) == ("wire:mac%2F1", "Studio")
    assert peer["hardware"]["chip"] == "Apple M2 Pro"
    assert (peer["hardware"]["memory_gb"], peer["hardware"]["tier"]) == (32.0, 2)
    assert (credited["name"], credited["peer"]) == ("user:wire:mac%2F1", "Studio")
    assert (shown["unfit"], shown["queued"], shown["speed"]) == ("is too hot", 2, 0.5)
    assert shown["neighbour"]
    assert 'shoal_workers{state="unfit"} 1.0' in metrics
    assert 'shoal_workers{state="serving"} 0.0' in metrics


@pytest.mark.own_pool
async def test_job_is_found_by_id_or_idempotency_key(pool: Pool) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        asked = tasks.create_task(chat(pool))
        await node.answer("the answer")

    _, answer = asked.result()
    assert answer["id"] == "chatcmpl-job1"
    shown = await get(pool, f"/admin/jobs/{answer['id']}")
    assert shown == await get(pool, "/admin/jobs/job1")
    assert shown["id"] == "job1"
    assert shown["state"] == "done"
    assert shown["model"] == "m1"
    assert shown["owner"] == "default"
    assert shown["attempts"] == 1
    assert shown["submitted_at"] <= shown["ended_at"]
    assert shown["outcome"]["text"] == "the answer"
    assert shown["error"] is None


@pytest.mark.own_pool
async def test_explanation_has_no_prompt_and_no_answer(pool: Pool) -> None:
    async with pool.node("n1") as one, pool.node("n2") as two:
        await pool.wait_joined(2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(chat(pool))
            await eventually(lambda: bool(one.tasks or two.tasks))
            victim, heir = (one, two) if one.tasks else (two, one)
            first, second = ("n1", "n2") if one.tasks else ("n2", "n1")
            victim.abort()
            await heir.answer("the answer")

    told = await get(pool, "/admin/jobs/job1/explain")
    assert told["job"] == "job1"
    story = [line[25:] for line in told["lines"]]
    assert story[0] == "submitted by default for m1"
    assert story[1].startswith(f"given to grandsage:{first}/m1, attempt 1: ")
    assert story[2].startswith(
        f"  passed over: grandsage:{second}/m1: another worker was "
    )
    assert any(line.startswith("back in the queue") for line in story)
    given = f"given to grandsage:{second}/m1, attempt 2: "
    assert any(line.startswith(given) for line in story)
    assert story[-1] == "done by attempt 2: finish reason stop"
    assert not any("the secret" in line or "the answer" in line for line in story)


@pytest.mark.own_pool
async def test_a_job_can_be_cancelled_once(pool: Pool) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        asked = tasks.create_task(chat(pool))
        task = await node.task()

        first = await delete(pool, "chatcmpl-job1")
        await node.wait_stopped(task["id"])
        await eventually(lambda: not pool.hub.pool.jobs)
        second = await delete(pool, "job1")

    assert first == (200, {"id": "job1", "cancelled": True})
    assert second[0] == 400
    assert second[1]["error"]["message"] == "job job1 has ended: cancelled"
    assert asked.result()[0] == 499


async def test_unknown_jobs_are_not_found(pool: Pool) -> None:
    for path in ("/admin/jobs/x", "/admin/jobs/x/explain"):
        error = (await get(pool, path, 404))["error"]
        assert "no job x" in error["message"]
    assert (await delete(pool, "x"))[0] == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/status"),
        ("GET", "/admin/jobs/x"),
        ("GET", "/admin/jobs/x/explain"),
        ("DELETE", "/admin/jobs/x"),
    ],
)
async def test_anonymous_requests_are_rejected(
    pool: Pool, method: str, path: str
) -> None:
    async with pool.session.request(method, pool.url + path) as response:
        assert response.status == 401


@pytest.mark.own_pool
async def test_health_needs_no_key_and_readiness_has_a_reason(pool: Pool) -> None:
    async def ask(path: str) -> tuple[int, Any]:
        async with pool.session.get(pool.url + path) as response:
            return response.status, await response.json()

    assert await ask("/healthz") == (200, HEALTHY)
    assert await ask("/readyz") == (200, {"status": "ready"})
    status, refused = await ask("/health")
    assert status == 503
    assert refused["error"]["message"] == "no worker offers a model yet"

    async with pool.node():
        await pool.wait_joined()
        assert await ask("/health") == (200, {"status": "ok"})

    await pool.hub.drain()

    assert await ask("/healthz") == (200, HEALTHY)
    status, told = await ask("/readyz")
    assert status == 503
    assert told == {"status": "not ready", "reason": "stopping"}
    code, answer = await chat(pool)
    assert code == 503
    assert answer["error"]["code"] == "shutting_down"


async def test_coordinator_uses_this_gateway(
    tmp_path: Path,
) -> None:
    config = ServeConfig(port=0, data_dir=tmp_path, api_key=KEY, join_token="nt")
    async with (
        run_coordinator(config) as running,
        ClientSession() as session,
    ):
        pool = Pool(running.url, running.hub, session)
        async with pool.node() as node, asyncio.TaskGroup() as tasks:
            await pool.wait_joined()
            asked = tasks.create_task(chat(pool))
            await node.answer("a")

    status, answer = asked.result()
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "a"


@pytest.mark.own_pool
async def test_jobs_are_listed_newest_first(pool: Pool) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        for number in range(2):
            asked = tasks.create_task(chat(pool))
            await node.answer("a", number=number)
            await asked
        left = asyncio.create_task(chat(pool))
        await node.task(2)
        left.cancel()
        await eventually(lambda: not pool.hub.pool.jobs)

    listed = (await get(pool, "/admin/jobs"))["data"]
    done = (await get(pool, "/admin/jobs?state=done&limit=1"))["data"]
    nobodys = (await get(pool, "/admin/jobs?owner=nobody"))["data"]
    assert [(job["id"], job["state"]) for job in listed] == [
        ("job3", "cancelled"),
        ("job2", "done"),
        ("job1", "done"),
    ]
    assert [job["id"] for job in done] == ["job2"]
    assert nobodys == []
    assert "outcome" not in listed[0]
    assert [bool(job["worker"]) for job in listed] == [True, True, True]


@pytest.mark.own_pool
async def test_jobs_are_searched_by_id_model_and_key(pool: Pool) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        tasks.create_task(chat(pool))
        await node.answer("a")
    (listed,) = (await get(pool, "/admin/jobs"))["data"]

    for text in ("job1", " OB1 ", listed["model"][1:], listed["owner"].upper()):
        assert (await get(pool, f"/admin/jobs?search={quote(text)}"))["data"] == [
            listed
        ]
    assert (await get(pool, "/admin/jobs?search=nothing"))["data"] == []


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("state=asleep", "state"),
        ("limit=1&limit=2", "limit"),
        ("limits=1", None),
    ],
)
async def test_invalid_filter_is_rejected_by_name(
    pool: Pool, query: str, field: str | None
) -> None:
    async with pool.session.get(
        f"{pool.url}/admin/jobs?{query}", headers=pool.headers()
    ) as got:
        told = (await got.json())["error"]

    assert (got.status, told["param"]) == (400, field)


@pytest.mark.own_pool
async def test_the_status_shows_who_is_connected_and_not_admitted(pool: Pool) -> None:
    assert pool.gateway is not None
    directory = pool.gateway.directory
    directory.refuse("wire:ab", "relay nodes do not authenticate")
    directory.describe("wire:ab", PeerProfile("a node"))

    status = await get(pool, "/admin/status")

    assert status["workers"] == []
    assert status["refused"] == [
        {
            "id": "wire:ab",
            "name": "a node",
            "hardware": None,
            "owner": "",
            "organization": "",
            "protocol_version": None,
            "registered_at": None,
            "remark": "",
            "release": "",
            "reason": "relay nodes do not authenticate",
        }
    ]
