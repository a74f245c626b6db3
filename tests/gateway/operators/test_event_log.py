"""The event log over HTTP: of the pool, of a job, of a worker, and page by page."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.keys import CHAT, make_key, request
from gateway.serving import Pool, eventually, serving
from shoal.gateway.operators import event_log

N1, N2 = "grandsage:n1/m1", "grandsage:n2/m1"


async def events(pool: Pool, query: str = "") -> Any:
    status, shown = await request(pool, "GET", f"/admin/events{query}")
    assert status == 200, shown
    return shown


def brief(shown: Any) -> list[tuple[str, str | None]]:
    return [(each["fact"], each["worker"]) for each in shown["data"]]


async def every_page(pool: Pool, query: str) -> list[Any]:
    """Return all events, two at a time."""
    found, page = [], await events(pool, f"?limit=2{query}")
    while True:
        found += page["data"]
        if page["next"] is None:
            return found
        page = await events(pool, f"?limit=2{query}&before={page['next']}")


async def answered(pool: Pool, name: str) -> None:
    """Have a worker answer a chat, and leave."""
    async with pool.node(name) as node:
        await pool.wait_joined()
        asking = request(pool, "POST", "/v1/chat/completions", CHAT)
        task = asyncio.create_task(asking)
        await node.answer("hello")
        assert (await task)[0] == 200
    await pool.wait_joined(0)


async def eventually_logged(pool: Pool, count: int) -> None:
    """Wait for events: facts are listed shortly after they are stored."""
    assert pool.log is not None
    log = pool.log
    await eventually(lambda: len(log.latest(count)) == count)


def course(worker: str) -> list[tuple[str, str | None]]:
    """The events of `answered`, the newest first.

    The job ends so soon that its beginning is no event; its history has it.
    """
    return [
        ("WorkerLost", worker),
        ("JobCompleted", worker),
        ("JobLeased", worker),
        ("JobSubmitted", None),
        ("WorkerJoined", worker),
    ]


async def test_events_are_listed_newest_first(pool: Pool) -> None:
    await answered(pool, "n1")
    await answered(pool, "n2")
    await eventually_logged(pool, 10)

    shown = await events(pool)

    assert brief(shown) == course(N2) + course(N1)
    assert shown["next"] is None
    numbers = [each["number"] for each in shown["data"]]
    assert numbers == sorted(set(numbers), reverse=True)
    assert shown["data"][2]["text"].startswith(f"given to {N2}, attempt 1: ")
    assert await every_page(pool, "") == shown["data"]


@pytest.mark.parametrize("name", ["grandsage:n1", N1])
async def test_events_of_a_worker_or_its_machine(pool: Pool, name: str) -> None:
    await answered(pool, "n1")
    await answered(pool, "n2")
    await eventually_logged(pool, 10)

    shown = await every_page(pool, f"&worker={name}")

    assert {each["worker"] for each in shown} == {N1}
    assert len(shown) == 4


async def test_events_of_a_job_are_its_history(pool: Pool) -> None:
    await answered(pool, "n1")

    shown = await events(pool, "?job=job1")

    assert brief(shown) == [
        ("JobCompleted", N1),
        ("JobStarted", N1),
        ("JobLeased", N1),
        ("JobSubmitted", None),
    ]
    assert [each["number"] for each in shown["data"]] == [4, 3, 2, 1]
    assert await every_page(pool, "&job=job1") == shown["data"]
    _, explained = await request(pool, "GET", "/admin/jobs/job1/explain")
    for fact, event in zip(explained["events"], reversed(shown["data"]), strict=True):
        assert fact | {"lease": None} == {
            key: event[key] for key in ("at", "fact", "worker", "text")
        } | {"lease": None}
    assert [each["lease"] for each in explained["events"]] == [None, 1, 1, 1]
    assert (await events(pool, "?job=none")) == {"data": [], "next": None}


async def test_facts_about_workers_survive_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as pool:
        await answered(pool, "n1")
        status, _ = await request(
            pool, "POST", "/admin/accounts/alice/credit", {"amount": 5}
        )
        assert status == 200
    async with serving(tmp_path, restarted=True) as pool:
        await answered(pool, "n2")
        await eventually_logged(pool, 5)

        shown = await every_page(pool, "")

        earlier = [("AccountCredited", None), ("WorkerLost", N1), ("WorkerJoined", N1)]
        assert brief({"data": shown}) == course(N2) + earlier
        numbers = [each["number"] for each in shown]
        assert numbers == sorted(set(numbers), reverse=True)
        of_worker = await every_page(pool, f"&worker={N1}")
        assert brief({"data": of_worker}) == earlier[1:]


async def test_what_left_memory_is_read_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "EVENTS_MAX", 3)
    async with serving(tmp_path) as pool:
        for number in range(4):
            async with pool.node(f"n{number}"):
                await pool.wait_joined()
            await pool.wait_joined(0)
        log, last = pool.log, ("WorkerLost", "grandsage:n3/m1")
        assert log is not None
        await eventually(
            lambda: [(each.fact, each.worker) for each in log.latest(1)] == [last]
        )

        shown = await every_page(pool, "")

        assert brief({"data": shown}) == [
            (fact, f"grandsage:n{number}/m1")
            for number in (3, 2, 1, 0)
            for fact in ("WorkerLost", "WorkerJoined")
        ]


async def test_few_facts_are_tested_for_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "FACTS_EXAMINED_MAX", 2)
    async with serving(tmp_path) as pool:
        for name in ("n1", "n2", "n2", "n2"):
            async with pool.node(name):
                await pool.wait_joined()
            await pool.wait_joined(0)
    async with serving(tmp_path, restarted=True) as pool:
        first = await events(pool, f"?worker={N1}")

        assert first["data"] == []
        assert first["next"] is not None
        shown = await every_page(pool, f"&worker={N1}")
        assert brief({"data": shown}) == [("WorkerLost", N1), ("WorkerJoined", N1)]


@pytest.mark.parametrize(
    "query", ["?limit=0", "?limit=1001", "?before=-1", "?before=x", "?of=n1"]
)
async def test_invalid_query_is_refused(pool: Pool, query: str) -> None:
    assert (await request(pool, "GET", f"/admin/events{query}"))[0] == 400


async def test_owner_sees_no_keys_of_machines_in_the_history(pool: Pool) -> None:
    key = await make_key(pool)
    machine = "ab" * 32
    async with pool.node(machine) as node:
        await pool.wait_joined()
        asking = request(pool, "POST", "/v1/chat/completions", CHAT, key)
        task = asyncio.create_task(asking)
        await node.answer("hello")
        await task

    _, shown = await request(pool, "GET", "/admin/jobs/job1/explain", key=key)

    assert machine not in str(shown)
    assert shown["events"][1]["worker"] == "grandsage:abababab…/m1"
