"""Hosted providers: who may use them, who pays, and what is said of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from gateway.batches.uploads import chat_line, create, ended
from gateway.keys import CHAT, client, make_key, request
from gateway.serving import KEY, Pool
from gateway.shoal_worker import EVERYTHING, ShoalWorker, shoal_worker
from shoal.domain.money import Micros
from shoal.domain.outcome import Usage
from shoal.domain.work import JobKind
from shoal.domain.worker import TokenPrices

pytestmark = pytest.mark.shared_pool

CLOUD = replace(
    EVERYTHING,
    kinds=frozenset({JobKind.CHAT}),
    models=frozenset({"gpt", "m1"}),
    last_resort=TokenPrices(Micros(1_000_000), Micros(2_000_000)),
)
ASKED: dict[str, Any] = {**CHAT, "model": "gpt"}
USED = Usage(100, 7)
COST = 114  # micro-dollars
CLOUDS = "shoal:cloud/gpt,m1"  # the name of the worker
LONG = 3600  # seconds: no test waits so long


@pytest_asyncio.fixture(loop_scope="module")
async def cloud(pool: Pool) -> AsyncIterator[ShoalWorker]:
    """A hosted provider that answers everything."""
    async with shoal_worker(pool, CLOUD, name="cloud") as worker:
        answering = asyncio.create_task(_answer_all(worker))
        yield worker
        answering.cancel()


async def _answer_all(worker: ShoalWorker) -> None:
    number = 0
    while True:
        job = await worker.job(number)
        worker.write(job, "yes")
        worker.end(job, usage=USED)
        number += 1


async def ask(
    pool: Pool, key: str, body: Any = ASKED, **headers: str
) -> tuple[int, Any, Any]:
    async with pool.session.post(
        f"{pool.url}/v1/chat/completions",
        json=body,
        headers={**pool.headers(key), **headers},
    ) as got:
        return got.status, got.headers, await got.json()


async def account(pool: Pool, name: str) -> Any:
    _, shown = await request(pool, "GET", f"/admin/accounts/{name}")
    return shown


async def test_key_pays_a_provider_by_the_tokens(
    pool: Pool, cloud: ShoalWorker
) -> None:
    key = await make_key(pool, "payer", hosted_after=0)

    status, headers, answer = await ask(pool, key)

    assert status == 200, answer
    job = headers["x-shoal-job"]
    assert headers["x-shoal-worker"] == CLOUDS
    payer = await account(pool, "payer")
    assert payer["balance"] == -COST
    _, why = await request(pool, "GET", f"/admin/jobs/{job}/explain")
    said = "a hosted provider does, for $1.000 and $2.000 for a million tokens"
    assert said in str(why)
    _, receipt = await request(pool, "GET", f"/v1/receipts/{job}", key=key)
    assert json.loads(receipt["receipt"])["price"] == COST
    _, balances = await request(pool, "GET", "/admin/accounts")
    held = {each["name"]: each["balance"] for each in balances["data"]}
    assert held.get("pool:held", 0) == 0
    assert held[f"worker:{CLOUDS}"] == COST  # all of it: the pool takes no fee
    _, listed = await request(pool, "GET", "/admin/keys/payer")
    assert (listed["prompt_tokens"], listed["completion_tokens"]) == (100, 7)


async def test_key_without_permission_is_refused(
    pool: Pool, cloud: ShoalWorker
) -> None:
    key = await make_key(pool, "frugal")

    status, _, answer = await ask(pool, key)

    assert status == 404, answer
    assert cloud.jobs == []


async def test_machine_of_the_pool_goes_first(pool: Pool, cloud: ShoalWorker) -> None:
    key = await make_key(pool, "patient", hosted_after=0)
    async with shoal_worker(pool, name="ours") as ours:
        answering = asyncio.create_task(ours.answer("ours"))
        status, headers, answer = await ask(pool, key, CHAT)
        await answering

    assert status == 200, answer
    assert headers["x-shoal-worker"] == "shoal:ours/m1"
    assert cloud.jobs == []


async def test_busy_machine_is_waited_for_as_long_as_the_key_says(
    pool: Pool, cloud: ShoalWorker
) -> None:
    one = replace(EVERYTHING, slots=1)
    patient = await make_key(pool, "waits", hosted_after=LONG)
    hasty = await make_key(pool, "hastes", hosted_after=0)
    async with (
        shoal_worker(pool, one, name="ours") as ours,
        asyncio.TaskGroup() as all_,
    ):
        first = all_.create_task(ask(pool, KEY, CHAT))
        job = await ours.job()
        second = all_.create_task(ask(pool, patient, CHAT))
        _, headers, _ = await ask(pool, hasty, CHAT)
        assert headers["x-shoal-worker"] == CLOUDS
        assert len(cloud.jobs) == 1
        ours.end(job)
        await first
        await ours.answer("ours", number=1)
        _, headers, _ = await second

    assert headers["x-shoal-worker"] == "shoal:ours/m1"


async def test_account_without_money_left_waits_for_a_machine(
    pool: Pool, cloud: ShoalWorker
) -> None:
    key = await make_key(pool, "poor", hosted_after=0)
    await request(pool, "PUT", "/admin/accounts/poor/budget", {"budget": 20_000})
    long = {**ASKED, "max_tokens": 100_000}

    status, _, answer = await ask(pool, key, long, **{"x-shoal-queue-seconds": "0.05"})

    assert status == 503, answer
    said = answer["error"]["message"]
    assert "not given to a hosted provider: user:poor has $0.010 left to spend" in said
    assert cloud.jobs == []
    assert (await account(pool, "poor"))["balance"] == 0


@pytest.mark.parametrize("kind", ["task", "job"])
async def test_only_chats_that_a_client_waits_for_leave_the_pool(
    pool: Pool, cloud: ShoalWorker, kind: str
) -> None:
    key = await make_key(pool, f"other-{kind}", hosted_after=0)
    work = {"job_type": "LLM_INFER", "model": "gpt", "prompt": "hi"}
    body: dict[str, Any] = {"user_id": "u1", "job_type": "LLM_INFER", "payload": work}
    if kind == "task":
        body |= {"job_type": "TASK", "payload": {"job_type": "TASK", "task_type": "t"}}
    await request(pool, "POST", "/v1/jobs/commit/fast", body, key)

    assert cloud.jobs == []


async def test_line_of_a_batch_never_leaves_the_pool(
    pool: Pool, cloud: ShoalWorker
) -> None:
    key = await make_key(pool, "batches", hosted_after=0)
    one = replace(EVERYTHING, slots=1)
    async with (
        client(pool, key) as openai,
        shoal_worker(pool, one, name="ours") as ours,
    ):
        batch = await create(openai, [chat_line(n) for n in range(3)])
        for number in range(3):
            await ours.answer("ours", number=number)
        done = await ended(openai, batch.id)

    assert done.status == "completed"
    assert cloud.jobs == []


async def test_models_of_providers_are_listed_for_those_who_may_use_them(
    pool: Pool, cloud: ShoalWorker
) -> None:
    allowed = await make_key(pool, "lists", hosted_after=0)
    other = await make_key(pool, "lists-less")
    found = []
    for key in (allowed, other):
        _, listed = await request(pool, "GET", "/v1/models", key=key)
        status, shown = await request(pool, "GET", "/v1/models/gpt", key=key)
        found.append(({each["id"] for each in listed["data"]}, status))

    assert found == [({"gpt", "m1"}, 200), (set(), 404)]
    _, shown = await request(pool, "GET", "/v1/models/gpt", key=allowed)
    assert (shown["state"], shown["workers"]) == ("hosted", 1)


async def test_alias_falls_back_to_a_provider(pool: Pool, cloud: ShoalWorker) -> None:
    key = await make_key(pool, "falls-back", hosted_after=0)
    path = "/admin/aliases/best"
    status, made = await request(pool, "PUT", path, {"models": ["qwen3", "gpt"]})
    assert status == 200, made

    status, headers, answer = await ask(pool, key, {**CHAT, "model": "best"})
    await request(pool, "DELETE", path)

    assert status == 200, answer
    assert headers["x-shoal-model"] == "gpt"
    assert headers["x-shoal-worker"] == CLOUDS


async def test_permission_is_shown_with_the_key(pool: Pool) -> None:
    await make_key(pool, "shown", hosted_after=7.5)
    await make_key(pool, "plain")

    _, shown = await request(pool, "GET", "/admin/keys/shown")
    _, plain = await request(pool, "GET", "/admin/keys/plain")

    assert (shown["hosted_after"], plain["hosted_after"]) == (7.5, None)
    for wrong in (-1, 86_401, "soon"):
        body = {"name": "wrong", "hosted_after": wrong}
        status, _ = await request(pool, "POST", "/admin/keys", body)
        assert status == 400
