"""Conversations in all dialects go on at the worker that has read their beginning."""

import asyncio
from typing import Any

import pytest

from gateway.serving import KEY, Pool
from gateway.shoal_worker import ShoalWorker, shoal_worker

pytestmark = pytest.mark.shared_pool

LONG = "Read this. " * 200
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
TURNS = 4


def turns(number: int) -> list[dict[str, str]]:
    """Return the messages of a conversation in which the user asks again."""
    said = [{"role": "user", "content": LONG}]
    for _ in range(number):
        said += [
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "and?"},
        ]
    return said


def body_of(path: str, number: int, previous: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m1", "stream": False}
    if path != "/v1/responses":
        return {**body, "messages": turns(number), "max_tokens": 9}
    if not number:
        return {**body, "input": LONG}
    return {**body, "input": "and?", "previous_response_id": previous}


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/ollama/api/chat"],
)
async def test_conversation_stays_at_its_worker(pool: Pool, path: str) -> None:
    async with (
        shoal_worker(pool) as one,
        shoal_worker(pool, name="n2") as two,
    ):
        answering = [asyncio.create_task(_answer_all(each)) for each in (one, two)]
        workers, reasons, previous = [], [], ""
        for number in range(TURNS):
            body = body_of(path, number, previous)
            async with pool.session.post(
                f"{pool.url}{path}", json=body, headers=AUTHORIZED
            ) as got:
                assert got.status == 200, await got.text()
                previous = (await got.json()).get("id", "")
                workers.append(got.headers["x-shoal-worker"])
                job = got.headers["x-shoal-job"]
            async with pool.session.get(
                f"{pool.url}/admin/jobs/{job}/explain", headers=AUTHORIZED
            ) as got:
                reasons.append(await got.text())
        for each in answering:
            each.cancel()

    assert len(set(workers)) == 1
    assert "has the beginning of the conversation (about 550 tokens)" in reasons[1]


async def _answer_all(worker: ShoalWorker) -> None:
    for number in range(TURNS):
        await worker.answer("yes", number=number)
