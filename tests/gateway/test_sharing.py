"""Fair sharing and early rejection, over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.keys import CHAT, make_key, request
from gateway.serving import KEY, Node, Pool, eventually, serving
from shoal.domain.errors import StoreError

PATH = "/v1/chat/completions"


async def post(
    pool: Pool, prompt: str, key: str = KEY, **headers: str
) -> tuple[int, dict[str, str], Any]:
    body = CHAT | {"messages": [{"role": "user", "content": prompt}]}
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    async with pool.session.post(
        pool.url + PATH, json=body, headers=pool.headers(key) | given
    ) as response:
        return response.status, dict(response.headers), await response.json()


@pytest.fixture
async def busy(pool: Pool) -> AsyncIterator[Node]:
    """A node whose only slot is busy with the first task."""
    async with pool.node(slots="1") as node:
        await pool.wait_joined()
        asking = asyncio.create_task(post(pool, "first"))
        await node.task()
        yield node
        await asking


async def queued(pool: Pool, prompt: str, key: str = KEY, **headers: str) -> Any:
    waiting = pool.hub.pool.queued
    asking = asyncio.create_task(post(pool, prompt, key, **headers))
    await eventually(lambda: pool.hub.pool.queued == waiting + 1)
    return asking


async def served(node: Node, count: int) -> list[str]:
    """Answer the tasks in order; return their prompts."""
    for number in range(count):
        await node.answer("a", number=number)
    return [task["messages"][0]["content"] for task in node.tasks]


async def test_higher_priorities_go_first(pool: Pool, busy: Node) -> None:
    asking = [
        await queued(pool, "low", x_shoal_priority="low"),
        await queued(pool, "normal"),
        await queued(pool, "high", x_shoal_priority="high"),
    ]

    assert await served(busy, 4) == ["first", "high", "normal", "low"]
    assert [(await each)[0] for each in asking] == [200, 200, 200]


async def test_flood_of_one_key_does_not_block_others(pool: Pool, busy: Node) -> None:
    alice, bob = await make_key(pool, "alice"), await make_key(pool, "bob")
    asking = [await queued(pool, f"alice {n}", alice) for n in range(6)]
    asking += [await queued(pool, f"bob {n}", bob) for n in range(2)]

    order = await served(busy, 9)

    assert order.index("bob 1") <= 4
    assert [each for each in order if "alice" in each] == [
        f"alice {n}" for n in range(6)
    ]
    assert {(await each)[0] for each in asking} == {200}


async def test_hopeless_request_is_rejected_at_once(pool: Pool, busy: Node) -> None:
    # As if earlier jobs had taken that long.
    pool.hub.pool.speeds.job_seconds["m1"] = 60.0
    waiting = await queued(pool, "second")

    status, headers, answer = await post(pool, "third", x_shoal_queue_seconds="5")

    assert (status, answer["error"]["code"]) == (429, "queue_full")
    assert 0 < int(headers["Retry-After"]) <= 60
    assert "more than the 5 s that this job may wait" in answer["error"]["message"]
    await served(busy, 2)
    assert (await waiting)[0] == 200


async def test_full_disk_prevents_new_keys_only(tmp_path: Path) -> None:
    async with serving(tmp_path) as pool, pool.node() as node:
        await pool.wait_joined()
        assert pool.gateway is not None
        store: Any = pool.gateway.store
        pages = await store.database.transact(
            lambda sql: sql.execute("PRAGMA page_count").fetchone()[0]
        )
        await store.database.transact(
            lambda sql: sql.execute(f"PRAGMA max_page_count = {pages}").fetchone()
        )
        with pytest.raises(StoreError):
            await _fill(pool)
        kept = list(pool.access.keyring.cache)
        await store.database.transact(
            lambda sql: sql.execute("PRAGMA max_page_count = 100000").fetchone()
        )

        _, listed = await request(pool, "GET", "/admin/keys")
        stored = await pool.gateway.store.keys.keys.all()
        others = [each for each in listed["data"] if each["name"] != "default"]
        assert len(others) == len(kept) == len(stored)
        await make_key(pool, "after")
        asking = asyncio.create_task(post(pool, "hi"))
        await node.answer("a")
        assert (await asking)[0] == 200


async def _fill(pool: Pool) -> None:
    """Create keys until the disk is full; check the error."""
    for number in range(1000):
        body = {"name": f"n{number}"}
        status, answer = await request(pool, "POST", "/admin/keys", body)
        if status != 200:
            assert (status, answer["error"]["code"]) == (503, "store_failed")
            raise StoreError(answer["error"]["message"])
