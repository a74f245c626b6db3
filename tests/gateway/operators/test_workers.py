"""Operators approve, pause, drain, remove and resume workers over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.keys import CHAT, make_key, request
from gateway.providers import provider
from gateway.serving import Pool, eventually, serving
from gateway.shoal_worker import shoal_worker
from protocols.dispatch.recorded import SIGNERS
from shoal.protocols.dispatch import Config

N1 = "/admin/workers/grandsage%3An1%2Fm1"
KEY = SIGNERS["A"].public_key.hex()
PROVIDER = f"dispatch:{KEY}"


async def order(pool: Pool, action: str, path: str = N1) -> dict[str, Any]:
    status, shown = await request(pool, "POST", f"{path}/{action}")
    assert status == 200, shown
    answer: dict[str, Any] = shown
    return answer


async def chat(pool: Pool) -> tuple[int, Any]:
    return await request(pool, "POST", "/v1/chat/completions", CHAT)


async def test_paused_worker_finishes_its_job_and_is_resumed(pool: Pool) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        first = tasks.create_task(chat(pool))
        await node.task()

        paused = await order(pool, "pause")
        second = tasks.create_task(chat(pool))
        await eventually(lambda: pool.hub.pool.queued == 1)
        await node.answer("a")
        await first
        assert (await request(pool, "GET", N1))[1] == paused | {"running": 0}
        resumed = await order(pool, "resume")
        await node.answer("b", number=1)
        await second

    assert paused.pop("since") > 0
    assert paused == {
        "name": "grandsage:n1/m1",
        "state": "paused",
        "by": "default",
        "workers": ["grandsage:n1/m1"],
        "running": 1,
        "approved": [],
    }
    assert (resumed["state"], resumed["by"], resumed["since"]) == ("active", "", None)


async def test_status_shows_orders_and_suspended_workers(pool: Pool) -> None:
    async with pool.node():
        await pool.wait_joined()
        await order(pool, "pause")
        away = await order(pool, "remove", "/admin/workers/dispatch%3Aab")

        _, status = await request(pool, "GET", "/admin/status")
        async with pool.session.get(
            f"{pool.url}/metrics", headers=pool.headers()
        ) as response:
            metrics = await response.text()

    assert [each["suspension"] for each in status["workers"]] == ["paused"]
    assert [each["name"] for each in status["orders"]] == [
        "grandsage:n1/m1",
        "dispatch:ab",
    ]
    assert status["orders"][1] == away
    assert away["workers"] == []
    assert 'shoal_workers{state="suspended"} 1.0' in metrics
    assert 'shoal_workers{state="unfit"} 0.0' in metrics


async def test_drained_node_stays_and_is_resumed(pool: Pool) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        asked = tasks.create_task(chat(pool))
        await node.task()
        draining = await order(pool, "drain")
        assert (draining["state"], draining["running"]) == ("draining", 1)
        await node.answer("a")
        await asked

        _, drained = await request(pool, "GET", N1)
        _, status = await request(pool, "GET", "/admin/status")
        assert (drained["state"], drained["running"]) == ("drained", 0)
        assert drained["workers"] == ["grandsage:n1/m1"]
        assert [each["suspension"] for each in status["workers"]] == ["drained"]
        await order(pool, "resume")
        asked = tasks.create_task(chat(pool))
        await node.answer("b", number=1)
        answered, _ = await asked
        assert (answered, node.closed) == (200, None)


async def test_removed_node_is_disconnected_and_refused(pool: Pool) -> None:
    async with pool.node() as node:
        await pool.wait_joined()
        await order(pool, "remove")
        await eventually(lambda: node.closed is not None)

    assert node.closed is not None
    code, text = node.closed
    assert code == 4000
    assert text.startswith("removed by an operator; `shoal nodes resume")
    async with pool.node() as again:
        await eventually(lambda: again.closed is not None)
        assert again.closed == node.closed
    await order(pool, "resume")
    async with pool.node():
        await pool.wait_joined()


async def test_jobs_of_a_removed_machine_go_to_another(pool: Pool) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        asked = tasks.create_task(chat(pool))
        await node.task()
        async with pool.node("n2") as other:
            await pool.wait_joined(2)

            await order(pool, "remove", "/admin/workers/grandsage%3An1")

            await other.answer("b")
            status, answer = await asked
            await pool.wait_joined(1)
        assert node.stopped == [(await node.task())["id"]]

    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "b"


async def test_drain_with_a_limit_hands_jobs_over(pool: Pool) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        asked = tasks.create_task(chat(pool))
        await node.task()
        async with pool.node("n2") as other:
            await pool.wait_joined(2)

            status, _ = await request(pool, "POST", f"{N1}/drain?within=0.01")

            await other.answer("b")
            await asked
    assert status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", N1, 404, "no worker grandsage:n1/m1 is connected"),
        ("POST", f"{N1}/resume", 404, "not paused, drained or removed"),
        ("POST", "/admin/workers/beagle/pause", 400, "WIRE:NAME"),
        ("POST", f"{N1}/drain?within=-1", 400, "within"),
        ("POST", f"{N1}/drain?soon=1", 400, "soon"),
    ],
)
async def test_invalid_request_is_refused(
    pool: Pool, method: str, path: str, status: int, said: str
) -> None:
    answered, body = await request(pool, method, path)

    assert answered == status
    assert said in body["error"]["message"]


async def test_name_without_its_wire_is_refused_with_the_complete_one(
    pool: Pool,
) -> None:
    async with pool.node():
        await pool.wait_joined()
        status, body = await request(pool, "POST", "/admin/workers/n1/pause")

    assert status == 400
    assert "the pool has grandsage:n1, grandsage:n1/m1" in body["error"]["message"]


async def test_worker_of_a_paused_machine_is_resumed_with_it(pool: Pool) -> None:
    await order(pool, "pause", "/admin/workers/grandsage%3An1")

    status, body = await request(pool, "POST", f"{N1}/resume")

    assert status == 400
    assert "resume grandsage:n1" in body["error"]["message"]


async def test_orders_take_the_scope_admin(pool: Pool) -> None:
    key = await make_key(pool, scope="use")

    for action in ("approve", "pause", "resume", "drain", "remove"):
        status, _ = await request(pool, "POST", f"{N1}/{action}", key=key)
        assert status == 403


@pytest.fixture
async def strict_pool(tmp_path: Path) -> AsyncIterator[Pool]:
    """A pool that anyone may join, and whose operator approves machines."""
    wires = {"dispatch": Config(open=True)}
    async with serving(tmp_path, wires=wires, approve_nodes=True) as running:
        yield running


async def suspensions(pool: Pool) -> list[str | None]:
    _, status = await request(pool, "GET", "/admin/status")
    return [each["suspension"] for each in status["workers"]]


async def test_new_machine_gets_jobs_after_its_approval(strict_pool: Pool) -> None:
    pool = strict_pool
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        asked = tasks.create_task(chat(pool))
        await eventually(lambda: pool.hub.pool.queued == 1)
        _, shown = await request(pool, "GET", N1)
        assert (shown["state"], shown["approved"]) == ("pending", [])
        assert await suspensions(pool) == ["pending"]
        metrics_url = f"{pool.url}/metrics"
        async with pool.session.get(metrics_url, headers=pool.headers()) as response:
            metrics = await response.text()
        status, body = await request(pool, "POST", f"{N1}/resume")
        assert status == 404
        assert "it waits for an approval" in body["error"]["message"]

        approved = await order(pool, "approve", "/admin/workers/grandsage%3An1")

        await node.answer("a")
        assert (await asked)[0] == 200
    assert approved.pop("running") in (0, 1)
    assert 'shoal_workers{state="pending"} 1.0' in metrics
    assert 'shoal_workers{state="suspended"} 0.0' in metrics
    assert 'shoal_workers{state="unfit"} 0.0' in metrics
    assert approved == {
        "name": "grandsage:n1",
        "state": "active",
        "by": "",
        "since": None,
        "workers": ["grandsage:n1/m1"],
        "approved": ["grandsage:n1"],
    }


async def test_history_of_a_job_names_the_pending_machine(strict_pool: Pool) -> None:
    pool = strict_pool
    await order(pool, "approve", "/admin/workers/grandsage%3An2")
    async with pool.node(), pool.node("n2") as approved:
        await pool.wait_joined(2)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(chat(pool))
            await approved.answer("a")
        assert asked.result()[0] == 200

        _, told = await request(pool, "GET", "/admin/jobs/job1/explain")

    reason = "passed over: grandsage:n1/m1: not approved by an operator yet"
    assert any(line.endswith(reason) for line in told["lines"])


async def test_stranger_with_the_key_of_another_is_not_approved(
    strict_pool: Pool,
) -> None:
    pool = strict_pool
    async with shoal_worker(pool, signer=SIGNERS["A"]):
        assert await suspensions(pool) == ["pending"]
        approved = await order(pool, "approve", "/admin/workers/shoal:n1")
        assert await suspensions(pool) == [None]
    await pool.wait_joined(0)

    async with provider(pool, SIGNERS["A"]):
        assert await suspensions(pool) == ["pending"]
    await pool.wait_joined(0)
    async with shoal_worker(pool, signer=SIGNERS["B"]):
        assert await suspensions(pool) == ["pending"]
    await pool.wait_joined(0)
    async with shoal_worker(pool, name="n2", signer=SIGNERS["A"]):
        assert await suspensions(pool) == [None]
    assert approved["approved"] == [KEY]


async def test_approval_waits_for_the_machine(strict_pool: Pool) -> None:
    pool = strict_pool
    approved = await order(pool, "approve")
    assert await order(pool, "approve") == approved
    assert (approved["state"], approved["workers"]) == ("active", [])
    assert approved["approved"] == ["grandsage:n1/m1"]
    assert (await request(pool, "GET", N1))[1] == approved

    async with pool.node():
        await pool.wait_joined()
        assert await suspensions(pool) == [None]


async def test_removed_machine_has_to_be_approved_again(strict_pool: Pool) -> None:
    pool = strict_pool
    await order(pool, "approve")
    removed = await order(pool, "remove")
    approved = await order(pool, "approve")
    await order(pool, "remove")
    await order(pool, "resume")

    async with pool.node():
        await pool.wait_joined()
        assert await suspensions(pool) == ["pending"]
    assert (removed["state"], removed["approved"]) == ("removed", [])
    assert (approved["state"], approved["approved"]) == (
        "removed",
        ["grandsage:n1/m1"],
    )
