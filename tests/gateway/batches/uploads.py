"""Input files of batches, and clients that wait for their results."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from gateway.serving import WAIT_MAX, Node, Pool
from harness.slow_imports import openai as sdk

CHAT_PATH: Final = "/v1/chat/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}


def chat_line(
    number: int, model: str = "m1", question: str = "", **more: Any
) -> dict[str, Any]:
    """Return a line with a question, by default its number."""
    messages = [{"role": "user", "content": question or f"q{number}"}]
    return {
        "custom_id": f"c{number}",
        "method": "POST",
        "url": CHAT_PATH,
        "body": {"model": model, "messages": messages},
    } | more


def jsonl(lines: list[Any]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


async def upload(openai: "sdk.AsyncOpenAI", lines: list[Any]) -> str:
    """Upload an input file; return its id."""
    file = await openai.files.create(
        file=("input.jsonl", jsonl(lines)), purpose="batch"
    )
    return file.id


async def create(
    openai: "sdk.AsyncOpenAI", lines: list[Any], **more: Any
) -> "sdk.types.Batch":
    """Create a batch of chats."""
    return await openai.batches.create(
        input_file_id=await upload(openai, lines),
        endpoint=CHAT_PATH,
        completion_window="24h",
        **more,
    )


async def ended(openai: "sdk.AsyncOpenAI", batch_id: str) -> "sdk.types.Batch":
    """Wait until a batch has ended."""
    async with asyncio.timeout(WAIT_MAX):
        while True:
            batch = await openai.batches.retrieve(batch_id)
            if batch.status in ENDED:
                return batch
            await asyncio.sleep(0.01)


async def read_lines(
    openai: "sdk.AsyncOpenAI", file_id: str | None
) -> list[dict[str, Any]]:
    """Return the lines of a file of results."""
    assert file_id is not None
    content = await openai.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


async def answer_all(node: Node, seen: list[str]) -> None:
    """Answer every task with its question, which is added to ``seen``."""
    number = 0
    while True:
        task = await node.task(number)
        question = task["messages"][-1]["content"]
        seen.append(question)
        await node.write(task["id"], f"answer to {question}")
        await node.end(task["id"])
        number += 1


@asynccontextmanager
async def answering(pool: Pool, slots: str = "4") -> AsyncIterator[list[str]]:
    """Answer all chats within the block; yields the questions so far."""
    seen: list[str] = []
    async with pool.node(slots=slots) as node:
        await pool.wait_joined()
        worker = asyncio.create_task(answer_all(node, seen))
        try:
            yield seen
        finally:
            worker.cancel()
            await asyncio.wait([worker])
