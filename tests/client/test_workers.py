"""``pool.workers`` at a complete coordinator."""

import asyncio
from pathlib import Path

import pytest

from gateway.serving import KEY, serving
from shoal import AsyncPool, Pool
from shoal.domain.errors import ConfigError, NotFound

NAME = "grandsage:n 1%2F/m1"
QUERY = "/ws?name=n%201%2F&model=m1&token=nt&max_concurrency=2"


async def test_worker_is_paused_drained_and_resumed(tmp_path: Path) -> None:
    async with serving(tmp_path) as running, running.node(path=QUERY) as node:
        await running.wait_joined()
        async with AsyncPool(running.url, KEY) as pool:
            workers = pool.workers
            (before,) = await workers.connected()
            paused = await workers.pause(NAME)
            (after,) = await workers.connected()
            resumed = await workers.resume(NAME)
            shown = await workers.show(NAME)
            drained = await workers.drain(NAME, within=60.0)
            removed = await workers.remove(NAME)
            await running.wait_joined(0)
        assert node.closed is not None

    assert (before.id, before.models, before.slots) == (NAME, ("m1",), 2)
    assert (before.suspension, after.suspension) == (None, "paused")
    assert (paused.state, paused.by, paused.workers) == ("paused", "default", (NAME,))
    assert resumed == shown
    assert (drained.state, removed.state) == ("drained", "removed")


async def test_blocking_pool_has_the_same_methods(tmp_path: Path) -> None:
    def operate(url: str) -> list[str]:
        with Pool(url, KEY) as pool:
            workers = pool.workers
            assert [each.id for each in workers.connected()] == [NAME]
            orders = [workers.pause(NAME), workers.resume(NAME), workers.show(NAME)]
            orders += [workers.drain(NAME, 0.5), workers.remove(NAME)]
            return [each.state for each in orders]

    async with serving(tmp_path) as running, running.node(path=QUERY):
        await running.wait_joined()
        states = await asyncio.to_thread(operate, running.url)

    assert states == ["paused", "active", "active", "drained", "removed"]


async def test_worker_is_approved(tmp_path: Path) -> None:
    def approve(url: str) -> tuple[str, ...]:
        with Pool(url, KEY) as pool:
            return pool.workers.approve(NAME).approved

    async with (
        serving(tmp_path, approve_nodes=True) as running,
        running.node(path=QUERY),
        AsyncPool(running.url, KEY) as pool,
    ):
        await running.wait_joined()
        (before,) = await pool.workers.connected()
        pending = await pool.workers.show(NAME)
        approved = await pool.workers.approve(NAME)
        (after,) = await pool.workers.connected()
        assert await asyncio.to_thread(approve, running.url) == (NAME,)

    assert (before.suspension, after.suspension) == ("pending", None)
    assert (pending.state, pending.approved) == ("pending", ())
    assert (approved.state, approved.approved) == ("active", (NAME,))


async def test_unknown_worker_is_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path) as running, AsyncPool(running.url, KEY) as pool:
        with pytest.raises(NotFound, match="no worker grandsage:none is connected"):
            await pool.workers.show("grandsage:none")
        with pytest.raises(NotFound):
            await pool.workers.resume("grandsage:none")


async def test_pool_must_be_open() -> None:
    pool = AsyncPool("http://127.0.0.1:1", KEY)

    with pytest.raises(RuntimeError, match="not open"):
        await pool.workers.connected()
    with pytest.raises(ConfigError):
        Pool("ftp://host", KEY)
