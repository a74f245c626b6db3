"""Takeover of answers, through the gateway."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.serving import Node, Pool, eventually, serving
from shoal.domain.job import TimeLimits

pytestmark = pytest.mark.shared_pool

PIECES = ["one ", "twö ", "日", "本 ", "five", "", "seven ", "\n", "nine", "."] * 2
PIECES = [piece for piece in PIECES if piece]
BODY = {
    "model": "m1",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,  # any worker can repeat the answer
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.mark.parametrize("at", range(len(PIECES) + 1))
async def test_text_is_complete_after_a_worker_dies_anywhere(
    pool: Pool, at: int
) -> None:
    async with pool.node("n1") as one, pool.node("n2") as two:
        await pool.wait_joined(2)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(_stream(pool))
            victim, heir = await _holder(one, two)
            await victim.write(victim.tasks[0]["id"], *PIECES[:at])
            if at:
                await _wait_text(pool)
            victim.abort()
            await heir.answer(*PIECES)

    events = _events(asked.result())
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    usage = chunks.pop()["usage"]
    choices = [chunk["choices"][0] for chunk in chunks]
    deltas = [choice["delta"] for choice in choices]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == "".join(PIECES)
    assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert usage["completion_tokens"] == -(-len(text.encode()) // 4)


async def test_comment_names_the_worker_that_takes_over(pool: Pool) -> None:
    async with pool.node("n1") as one, pool.node("n2") as two:
        await pool.wait_joined(2)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(_stream(pool))
            victim, heir = await _holder(one, two)
            await victim.write(victim.tasks[0]["id"], "one ")
            await _wait_text(pool)
            victim.abort()
            await heir.answer("one ", "two")

    before, _, after = asked.result().partition(": x-shoal-worker: ")
    worker, attempts, *_ = after.splitlines()
    assert '"content":"one "' in before
    assert '"content":"two"' in after
    assert worker.endswith("n2/m1" if heir is two else "n1/m1")
    assert attempts == ": x-shoal-attempts: 2"


async def test_stream_without_another_worker_ends_with_an_error(
    tmp_path: Path,
) -> None:
    async with (
        serving(tmp_path, limits=TimeLimits(queue=0.05)) as pool,
        pool.node() as node,
    ):
        await pool.wait_joined()
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(_stream(pool))
            task = await node.task()
            await node.write(task["id"], "a")
            await _wait_text(pool)
            node.abort()

    *_, last = _events(asked.result())
    assert json.loads(last)["error"]["code"] == "no_worker"
    assert '"content":"a"' in asked.result()
    assert "[DONE]" not in asked.result()


async def test_different_text_after_a_takeover_is_an_error(pool: Pool) -> None:
    async with pool.node("n1") as one, pool.node("n2") as two:
        await pool.wait_joined(2)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(_stream(pool))
            victim, heir = await _holder(one, two)
            await victim.write(victim.tasks[0]["id"], "a b c")
            await _wait_text(pool)
            victim.abort()
            task = await heir.task()
            await heir.write(task["id"], "a x")
            await heir.wait_stopped(task["id"])

    *_, last = _events(asked.result())
    error = json.loads(last)["error"]
    assert error["code"] == "worker_lost"
    assert "took over differs" in error["message"]


async def _stream(pool: Pool) -> str:
    async with pool.session.post(
        f"{pool.url}/v1/chat/completions", json=BODY, headers=pool.headers()
    ) as response:
        assert response.status == 200
        return await response.text()


async def _holder(one: Node, two: Node) -> tuple[Node, Node]:
    """Wait until one of them has the task; return that one first."""
    await eventually(lambda: bool(one.tasks or two.tasks))
    return (one, two) if one.tasks else (two, one)


async def _wait_text(pool: Pool) -> None:
    """Wait until the only job has output."""
    (job,) = pool.hub.pool.jobs.values()
    await eventually(lambda: job.started)


def _events(text: str) -> list[Any]:
    """Return the data of the events, without the comments."""
    return [
        event.removeprefix("data: ")
        for event in text.split("\n\n")
        if event.strip() and not event.startswith(":")
    ]
