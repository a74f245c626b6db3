"""A node of our own kind, as a test plays it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gateway.serving import TOKEN, Node, Pool

EVERYTHING = (
    "shoal, chat, completion, embedding, continue, options, stop, tools, schema, "
    "logprobs, choices, images, context=4096"
)


@dataclass
class Capable:
    """A node of ours, as a test plays it."""

    node: Node

    async def say(self, task_id: int, **word: Any) -> None:
        await self.node.send(json.dumps({"id": task_id, **word}))

    async def delta(self, task_id: int, **delta: Any) -> None:
        await self.say(task_id, delta=delta)


@asynccontextmanager
async def capable(
    pool: Pool, extensions: str = EVERYTHING, name: str = "n1"
) -> AsyncIterator[Capable]:
    socket = await pool.session.ws_connect(
        f"{pool.url}/ws?name={name}&model=m1&token={TOKEN}&max_concurrency=8",
        headers={"Shoal-Extensions": extensions},
    )
    node = Node(socket)
    reading = asyncio.create_task(node.read())
    await pool.joined()
    try:
        yield Capable(node)
    finally:
        await socket.close()
        await reading
