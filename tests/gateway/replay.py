"""Replays recorded conversations of clients, nodes and a server."""

import asyncio
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

from aiohttp import ClientResponse

from gateway.serving import Node, Pool, eventually

Step: TypeAlias = Mapping[str, Any]  # as recorded; the fields depend on the step

BODY = (
    '{"model":"m1","messages":[{"role":"user","content":"hi"}],'
    '"temperature":0.5,"max_new_tokens":10}'
)
STRAY = 0x7FFFFFFF  # a task id that the coordinator never assigns
KEYS = {"alice": "ut-alice", "bob": "ut-bob"}

_PLACEHOLDER = re.compile(r"\{\{(id\w*)\}\}")


@dataclass(slots=True)
class Chat:
    """A client's request and its response so far."""

    text: str = ""
    ended: bool = False
    response: ClientResponse | None = None
    asking: asyncio.Task[None] | None = None

    async def ask(self, pool: Pool, body: str | bytes, key: str) -> None:
        async with pool.session.post(
            pool.url + "/api/chat", data=body, headers=pool.headers(key)
        ) as response:
            self.response = response
            received = b""
            async for data in response.content.iter_any():
                received += data
                self.text = received.decode(errors="ignore")
            self.ended = True


@dataclass(slots=True)
class Replay:
    """Replays steps in order, and waits for the expected effects of each.

    Node names and ``{{id0}}`` are as recorded; ids are bound as the tasks come.
    """

    pool: Pool
    stack: AsyncExitStack
    chats: dict[str, Chat] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    _leaving: set[str] = field(default_factory=set)  # nodes that left
    _identities: dict[str, str] = field(default_factory=dict)  # of nodes
    _texts: Counter[str] = field(default_factory=Counter)  # checked, by node
    _lines: defaultdict[str, str] = field(  # expected, by chat
        default_factory=lambda: defaultdict(str)
    )

    async def play(self, step: Step) -> None:
        """Replay a step, and check what all clients and nodes received."""
        await self._act(step)
        for name, texts in step.get("node_received", {}).items():
            for text in texts:
                await self._expect_text(name, text)
        for name, new in step.get("http_new", {}).items():
            await self._expect_lines(name, new["text"], ended=new["ended"])
        for name, closed in step.get("node_closed", {}).items():
            await self._expect_close(name, closed["code"])

    async def check_silence(self) -> None:
        """Check that nothing unexpected was received."""
        # Messages to and from a node keep their order, so a response to a
        # stray frame comes after everything else.
        for name, node in self.nodes.items():
            if node.closed is None:
                await node.send(STRAY.to_bytes(4, "big") + b"?")
                await node.wait_stopped(STRAY)
                assert len(node.texts) == self._texts[name] + 1, name
        for name, chat in self.chats.items():
            assert chat.text == self._lines[name], name

    async def _expect_text(self, name: str, expected: str) -> None:
        node, count = self.nodes[name], self._texts[name]
        await eventually(lambda: len(node.texts) > count)
        text = node.texts[count]
        self._texts[name] += 1
        if (new := _PLACEHOLDER.search(expected)) and new[1] not in self.ids:
            self.ids[new[1]] = json.loads(text)["id"]
        for placeholder, task_id in self.ids.items():
            expected = expected.replace("{{" + placeholder + "}}", str(task_id))
        assert normalized(text) == normalized(expected.replace("{{now}}", "0"))

    async def _expect_lines(self, name: str, text: str, *, ended: bool) -> None:
        chat = self.chats[name]
        self._lines[name] += text
        expected = self._lines[name]
        await eventually(lambda: chat.text == expected and chat.ended == ended)

    async def _expect_close(self, name: str, code: int) -> None:
        node = self.nodes[name]
        await eventually(lambda: node.closed is not None)
        if name not in self._leaving:
            assert node.closed is not None
            assert node.closed[0] == code

    async def _act(self, step: Step) -> None:
        match step:
            case {"node": name}:
                query = {"name": name, "model": "m1", "token": "nt"}
                query |= {"max_concurrency": "8"} | step.get("q", {})
                given = "&".join(f"{key}={value}" for key, value in query.items())
                path = step.get("path", f"/ws?{given}")
                joining = self.pool.node(path=path)
                asked = parse_qs(path.partition("?")[2])
                identity = f"grandsage:{asked['name'][0]}/{asked['model'][0]}"
                self._identities[name] = identity
                self._leaving.discard(name)
                self.nodes[name] = await self.stack.enter_async_context(joining)
                await self._settled()
            case {"chat": name}:
                chat = self.chats[name] = Chat()
                key = KEYS["bob" if step.get("token") == "ut-bob" else "alice"]
                jobs = self.pool.hub.pool.jobs
                known = set(jobs)
                chat.asking = asyncio.create_task(
                    chat.ask(self.pool, step.get("body", BODY), key)
                )
                self.stack.push_async_callback(_end, chat.asking)
                await eventually(lambda: chat.ended or bool(jobs.keys() - known))
            case {"send": name, "hex": data}:
                await self.nodes[name].send(self.frame(data))
            case {"abort": name}:
                asking = self.chats[name].asking
                assert asking is not None
                await _end(asking)
            case {"terminate": name}:
                self._leaving.add(name)
                self.nodes[name].abort()
                await self._settled()
            case {"close": name}:
                self._leaving.add(name)
                await self.nodes[name].socket.close()
                await self._settled()
            case {"raw": data, "path": path}:
                expected = bytes.fromhex(step["server_bytes_hex"])
                assert await _raw(self.pool, path, bytes.fromhex(data)) == expected
                await self._settled()
            case _:
                raise AssertionError(f"unknown step: {step}")

    async def _settled(self) -> None:
        """Wait until the pool has exactly the connected nodes."""
        workers = self.pool.hub.pool.workers
        await eventually(
            lambda: (
                workers.keys()
                == {
                    self._identities[name]
                    for name, node in self.nodes.items()
                    if node.closed is None and name not in self._leaving
                }
            )
        )

    def frame(self, data: str) -> bytes:
        """Put the ids into a recorded frame."""
        for name, task_id in self.ids.items():
            data = data.replace("{{" + name + "}}", f"{task_id:08x}")
            data = data.replace("{{" + name + "+1}}", f"{task_id + 1:08x}")
        return bytes.fromhex(data)


def normalized(text: str) -> dict[str, Any]:
    """Return a message to a node without the time and the user.

    The original sends nodes the user's own record.
    """
    fields: dict[str, Any] = json.loads(text)
    return {k: v for k, v in fields.items() if k not in ("created_at", "user")}


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def _raw(pool: Pool, path: str, data: bytes) -> bytes:
    """Upgrade on a raw connection, write bytes, and return the whole response."""
    port = urlsplit(pool.url).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    writer.write(data)
    writer.write_eof()
    received = await reader.read(-1)
    writer.close()
    await writer.wait_closed()
    return received
