"""What clients and operators see while the database cannot grow, and afterwards."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.keys import CHAT, make_key, request
from gateway.serving import KEY, Pool, eventually, serving
from shoal.store.sqlite.database import SqliteStore


def long_chat(size: int) -> dict[str, Any]:
    """Return a chat with that many characters, which compress to half."""
    text = Random(1).randbytes(size // 2).hex()
    return {**CHAT, "messages": [{"role": "user", "content": text}]}


LONG = long_chat(50_000)  # fits in no page, but in a row
LARGE = long_chat(1_000_000)  # is written before its job, in parts
FULL = "database or disk is full"
PATH = "/v1/chat/completions"


@pytest.fixture
async def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    monkeypatch.setattr("shoal.coordinator.store_health.RETRY_MIN", 0.05)
    async with serving(tmp_path) as running:
        yield running


async def limit_pages(pool: Pool, more: int) -> None:
    """Let the database have so many pages more than now."""

    def limit(sql: sqlite3.Connection) -> None:
        (pages,) = sql.execute("PRAGMA page_count").fetchone()
        sql.execute(f"PRAGMA max_page_count = {pages + more}").fetchone()

    assert pool.gateway is not None
    store = pool.gateway.store
    assert isinstance(store, SqliteStore)
    await store.database.transact(limit)


async def test_a_full_disk_refuses_work_until_there_is_space(
    pool: Pool, tmp_path: Path
) -> None:
    async with pool.node() as node:
        await pool.wait_joined()
        reader = await make_key(pool, "reader", scope="read")
        await limit_pages(pool, 0)

        async with pool.session.post(
            pool.url + PATH, json=LONG, headers=pool.headers()
        ) as answer:
            status, said = answer.status, await answer.json()
            assert int(answer.headers["Retry-After"]) <= 3  # the first pause is short
        assert (status, said["error"]["code"]) == (503, "store_failed")
        assert said["error"]["message"] == f"the coordinator's database: {FULL}"
        assert (await request(pool, "POST", PATH, CHAT))[0] == 503
        not_ready = {"status": "not ready", "reason": FULL}
        assert await request(pool, "GET", "/readyz") == (503, not_ready)
        assert (await request(pool, "GET", "/healthz"))[0] == 200
        assert await why_not(pool, KEY) == f"{tmp_path / 'shoal.db'}: {FULL}"
        assert await why_not(pool, reader) == FULL
        # What needs no space goes on.
        assert (await request(pool, "GET", "/v1/jobs"))[0] == 200

        await limit_pages(pool, 10_000)
        await eventually(lambda: pool.hub.unavailable_reason is None)

        await node.task()  # the long one, which is cancelled at once
        asking = asyncio.create_task(request(pool, "POST", PATH, CHAT))
        await node.answer("hello", number=1)
        status, said = await asking
        assert said["choices"][0]["message"]["content"] == "hello"
        assert (await request(pool, "GET", "/readyz"))[0] == 200


async def test_a_work_that_does_not_fit_is_refused_alone(pool: Pool) -> None:
    async with pool.node() as node, asyncio.TaskGroup() as tasks:
        await pool.wait_joined()
        await limit_pages(pool, 20)

        async with pool.session.post(
            pool.url + PATH, json=LARGE, headers=pool.headers()
        ) as answer:
            status, said = answer.status, await answer.json()
            assert int(answer.headers["Retry-After"]) == 30
        assert (status, said["error"]["code"]) == (503, "store_failed")
        assert said["error"]["message"] == f"the coordinator's database: {FULL}"

        # What fits goes on.
        tasks.create_task(node.answer("hello"))
        assert (await request(pool, "POST", PATH, CHAT))[0] == 200
        assert (await request(pool, "GET", "/readyz"))[0] == 200


async def test_a_deleted_database_is_no_longer_healthy(
    pool: Pool, tmp_path: Path
) -> None:
    async with pool.node():
        await pool.wait_joined()
        (tmp_path / "shoal.db").unlink()

        status, said = await request(pool, "POST", PATH, CHAT)

        reason = "was deleted or replaced while in use"
        assert status == 503
        assert said["error"]["message"] == f"the coordinator's database: {reason}"
        failed = {"status": "failed", "reason": reason}
        assert await request(pool, "GET", "/healthz") == (503, failed)
        assert (await request(pool, "GET", "/readyz"))[0] == 503


async def why_not(pool: Pool, key: str) -> Any:
    _, status = await request(pool, "GET", "/admin/status", key=key)
    return status["why_not"]


async def test_slow_commits_are_shown(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await request(pool, "GET", "/readyz") == (200, {"status": "ready"})
    monkeypatch.setattr("shoal.coordinator.store_health.SLOW", 1e-6)  # all are

    await make_key(pool, "one")
    async with pool.node():
        await pool.wait_joined()

        status, said = await request(pool, "GET", "/readyz")

    assert (status, said["status"]) == (200, "degraded")
    assert "its disk is busy or failing" in said["reason"]
    _, shown = await request(pool, "GET", "/admin/status")
    assert shown["ready"]
    assert "its disk is busy or failing" in shown["degraded"]
