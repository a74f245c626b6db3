"""A scripted Shoal node, which supports extensions."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gateway.serving import TOKEN, Node, Pool

ALL_EXTENSIONS = (
    "shoal, chat, completion, embedding, continue, options, stop, tools, schema, "
    "logprobs, choices, echo, images, fields, context=4096"
)


@dataclass
class ExtendedNode:
    """A scripted node that supports Shoal's extensions."""

    node: Node

    async def send(self, task_id: int, **fields: Any) -> None:
        await self.node.send(json.dumps({"id": task_id, **fields}))

    async def delta(self, task_id: int, **delta: Any) -> None:
        await self.send(task_id, delta=delta)


@asynccontextmanager
async def extended_node(
    pool: Pool, extensions: str = ALL_EXTENSIONS, name: str = "n1"
) -> AsyncIterator[ExtendedNode]:
    socket = await pool.session.ws_connect(
        f"{pool.url}/ws?name={name}&model=m1&token={TOKEN}&max_concurrency=8",
        headers={"Shoal-Extensions": extensions},
    )
    node = Node(socket)
    reading = asyncio.create_task(node.read())
    await pool.wait_joined()
    try:
        yield ExtendedNode(node)
    finally:
        await socket.close()
        await reading
