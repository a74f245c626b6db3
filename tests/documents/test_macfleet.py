"""Nodes of an open pool written from MacFleet's document alone."""

import asyncio

import pytest

from documents.macfleet import Node
from documents.serving import get, until
from live.programs import KEY, PATIENCE, TESTS, Pool, Programs
from shoal import AsyncPool

TASKS = TESTS / "tasks" / "demo_tasks.py"
OPEN = (
    *("--macfleet-open", "--name", "boss"),
    *("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0"),
)


def transport_of(pool: Pool) -> int:
    port: int = pool.ready["ports"]["macfleet_transport"]
    return port


def heartbeat_of(pool: Pool) -> int:
    port: int = pool.ready["ports"]["macfleet_heartbeat"]
    return port


def double(number: int) -> int:
    return 2 * number


@pytest.mark.short
async def test_a_node_joins_and_runs_tasks(programs: Programs) -> None:
    pool = programs.serve(*OPEN)
    node = Node("mac-1", {"jobs.double": double}, keepalive=0.2)

    async with (
        asyncio.timeout(PATIENCE),
        node.connected(transport_of(pool)) as link,
        AsyncPool(pool.url, api_key=KEY) as calls,
    ):
        assert await node.ping(heartbeat_of(pool)) == "boss"
        assert link.peer == b"boss"
        assert await calls.call("jobs.double", 21) == 42
        assert await calls.call("jobs.double", number=[1]) == [1, 1]
        assert not link.ended.is_set()


async def test_the_error_of_a_task_is_the_callers(programs: Programs) -> None:
    pool = programs.serve(*OPEN)
    node = Node("mac-1", {"jobs.double": double})

    async with (
        asyncio.timeout(PATIENCE),
        node.connected(transport_of(pool)),
        AsyncPool(pool.url, api_key=KEY) as calls,
    ):
        with pytest.raises(Exception, match="takes 1 positional argument"):
            await calls.call("jobs.double", 1, 2)
        assert await calls.call("jobs.double", 21) == 42


async def test_a_node_that_listens_is_dialled(programs: Programs) -> None:
    node = Node("mac-1", {"jobs.double": double})

    async with asyncio.timeout(PATIENCE), node.listening() as (port, _):
        pool = programs.serve(*OPEN, "--macfleet-peers", f"127.0.0.1:{port}")
        async with AsyncPool(pool.url, api_key=KEY) as calls:
            assert await calls.call("jobs.double", 21) == 42
        nodes = (await get(pool, "/admin/nodes"))["data"]

    assert "boss" in node.pings
    assert {each["name"] for each in nodes} == {"boss", "mac-1"}


@pytest.mark.parametrize("size", [0, 10])
async def test_a_node_dispatches_tasks_to_the_pool(
    programs: Programs, size: int
) -> None:
    pool = programs.serve(*OPEN)
    pool.joined("one", "--tasks", str(TASKS))
    node = Node("mac-2")

    async with asyncio.timeout(PATIENCE), node.connected(transport_of(pool)) as link:
        results = await asyncio.gather(
            *(link.submit("demo.add", n, y=1.5, size=size) for n in range(3))
        )
        unknown = await link.submit("jobs.juggle")

    assert [each["ok"] for each in results] == [True] * 3
    assert [each["value"] for each in results] == [1.5, 2.5, 3.5]
    assert unknown["ok"] is False
    assert isinstance(unknown["error"], str)


@pytest.mark.parametrize("which", [0, 1])
async def test_a_worker_serves_a_dispatcher(programs: Programs, which: int) -> None:
    node = Node("mac-2", keepalive=0.2)

    async with asyncio.timeout(PATIENCE), node.listening() as ports:
        worker = programs.run(
            *("join", f"tcp://127.0.0.1:{ports[which]}", "--wire", "macfleet"),
            *("--json", "--name", "one", "--tasks", str(TASKS)),
        )
        await until(lambda: node.links)
        (link,) = node.links
        added = await link.submit("demo.add", 40, 2)
        chunked = await link.submit("demo.add", 1, 2, size=16)
        unknown = await link.submit("jobs.juggle")
        assert worker.process.poll() is None

    assert link.peer == b"one"
    assert (added["ok"], added["value"], added["error"]) == (True, 42, None)
    assert chunked["value"] == 3
    assert unknown["ok"] is False


async def test_a_worker_that_listens_serves_a_dispatcher(programs: Programs) -> None:
    worker = programs.run(
        *("join", "--listen", "--listen-host", "127.0.0.1", "--json"),
        *(*OPEN, "--name", "one", "--tasks", str(TASKS)),
    )
    ports = (await asyncio.to_thread(worker.event, "listening"))["ports"]
    node = Node("mac-2")

    async with (
        asyncio.timeout(PATIENCE),
        node.connected(ports["transport"]) as link,
    ):
        assert await node.ping(ports["heartbeat"]) == "one"
        added = await link.submit("demo.add", 40, 2)

    assert added["value"] == 42
