"""The promise of ``docs/promises.md`` on balances: none is spent twice."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any

import pytest
from aiohttp import ClientSession, TCPConnector

from harness.ports import free_port
from live import checker, laws
from live.clients import Clients, History
from live.programs import KEY, PRICES, Pool, Programs

SPENDERS = 100
PRICE = 1000  # micro-dollars of a task
KILLS = 6
PAUSE = (0.05, 0.6)  # seconds between kills, from and to
TRIES = 8  # jobs that each spender wants while the coordinator is killed
ALWAYS: Mapping[str, str] = {
    **laws.BALANCED,
    "nobody spends more than there is": """
        SELECT total(balance) FROM accounts
        WHERE name = 'user:default' OR name LIKE 'user:default/%'
        HAVING total(balance) < 0""",
}


def accounts(programs: Programs, pool: Pool, *arguments: str) -> dict[str, Any]:
    """Run ``shoal accounts``; return what it prints."""
    flags = ("--url", pool.url, "--api-key", KEY, "--json")
    line = programs.run("accounts", *arguments, *flags).line()
    assert line is not None
    shown: dict[str, Any] = json.loads(line)
    return shown


def credit(programs: Programs, pool: Pool, jobs: int) -> None:
    """Set the balance to the price of a number of jobs."""
    accounts(programs, pool, "budget", "default", "0")
    accounts(programs, pool, "credit", "default", str(jobs * PRICE / 1e6))


async def spend(clients: Clients, spender: int, number: int) -> str | None:
    """Submit a job twice at once; return its id if it was paid for."""
    key = f"{spender}-{number}"
    payload = {"task_type": "echo", "input": key, "key": key}
    job = {"job_type": "TASK", "user_id": f"s{spender}", "payload": payload}
    async with asyncio.TaskGroup() as tasks:
        once, again = (tasks.create_task(clients.commit(key, job)) for _ in range(2))
    assert once.result() == again.result()
    return once.result()


def spent(
    pool: Pool, history: History, meanwhile: Callable[[], Awaitable[None]], tries: int
) -> int:
    """Run all spenders; return the number of paid jobs."""

    async def run(clients: Clients, spender: int) -> list[str]:
        chance = Random(spender)
        paid = []
        for number in range(tries):
            if (job_id := await spend(clients, spender, number)) is not None:
                paid.append(job_id)
            await asyncio.sleep(chance.uniform(0, 0.3) if tries > 1 else 0)
        for job_id in paid:
            assert (await clients.ended(job_id))["status"] == "completed"
        return paid

    async def all_() -> int:
        connector = TCPConnector(limit=0)
        async with ClientSession(connector=connector) as session:
            clients = Clients(session, pool.url, KEY, "spenders", history)
            async with asyncio.TaskGroup() as tasks:
                spending = [
                    tasks.create_task(run(clients, spender))
                    for spender in range(SPENDERS)
                ]
                await meanwhile()
        return sum(len(each.result()) for each in spending)

    return asyncio.run(all_())


@pytest.mark.parametrize("jobs", [1, 37])
def test_hundred_concurrent_jobs_cannot_overspend(
    programs: Programs, jobs: int
) -> None:
    pool = programs.serve(*PRICES)
    credit(programs, pool, jobs)
    pool.signing("honest", "--mood", "honest").event("joined")

    async def nothing() -> None:
        pass

    assert spent(pool, History(), nothing, tries=1) == jobs
    assert accounts(programs, pool, "show", "default")["standing"] == 0
    listed = accounts(programs, pool, "ls")
    assert listed["total"] == 0
    balances = {each["name"]: each["balance"] for each in listed["data"]}
    assert "pool:held" not in balances  # where there is nothing
    assert balances["world"] == -jobs * PRICE


def test_retries_do_not_spend_twice(programs: Programs) -> None:
    jobs = SPENDERS * TRIES // 2
    chance, port = Random(7), free_port()
    pool = programs.serve(*PRICES, port=port)
    credit(programs, pool, jobs)
    for name in ("one", "two", "three", "four", "five", "six"):
        pool.signing(name, "--mood", "honest").event("joined")
    found: list[str] = []
    looked_at = 0

    async def kill() -> None:
        nonlocal pool, looked_at
        for _ in range(KILLS):
            await asyncio.sleep(chance.uniform(*PAUSE))
            pool.program.kill()
            commits, wrong = await asyncio.to_thread(
                checker.inspect, programs.data, {}, ALWAYS
            )
            looked_at += commits
            found.extend(wrong)
            pool = await asyncio.to_thread(programs.serve, *PRICES, port=port)

    history = History()

    assert spent(pool, history, kill, TRIES) == jobs
    assert found == []
    assert looked_at > KILLS
    assert history.broken  # the same was asked again
    assert accounts(programs, pool, "show", "default")["standing"] == 0
    pool.program.kill()
    assert checker.inspect(programs.data, {}, ALWAYS)[1] == []
