"""HTTP clients that cost next to nothing: prepared requests, and only the end is read.

Each client keeps its connection, as OpenAI's does, and asks one thing at a time.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from engine import CHUNKS, TEXT

READ_MAX = 1 << 18  # bytes of one read
OPENING_AT_ONCE = 100  # streams that are begun together when many are held
PATIENCE = 120.0  # seconds for all answers together

T = TypeVar("T")

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MARK = TEXT.encode()


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds from a request to its first text, and to its end."""

    first: float
    whole: float


@dataclass(frozen=True, slots=True)
class Client:
    """A connection to a server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def begin(self, request: bytes) -> bytes:
        """Send a request; return what came up to the first text.

        Raises RuntimeError if the server refuses.
        """
        self.writer.write(request)
        answer = b""
        while _MARK not in answer:
            answer += await self._read(answer)
        return answer

    async def ask(self, request: bytes) -> Took:
        """Send a request and read all of the answer.

        Raises RuntimeError if it is not whole.
        """
        began = time.perf_counter()
        answer = await self.begin(request)
        first = time.perf_counter() - began
        parts, tail = [answer], answer
        head, _, body = answer.partition(b"\r\n\r\n")
        if length := _LENGTH.search(head):
            missing = int(length[1]) - len(body)
            parts.append(await self.reader.readexactly(missing))
        else:
            while not tail.endswith(b"\r\n0\r\n\r\n"):
                data = await self._read(answer)
                parts.append(data)
                tail = tail[-6:] + data
        answer = b"".join(parts)
        if answer.count(_MARK) != CHUNKS:
            raise RuntimeError(f"not the whole answer: {answer[-400:]!r}")
        return Took(first, time.perf_counter() - began)

    async def _read(self, before: bytes) -> bytes:
        data = await self.reader.read(READ_MAX)
        if not data:
            raise RuntimeError(f"the server hung up after {before[-400:]!r}")
        if not before and not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server refused: {data[:400]!r}")
        return data


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def request(question: str, *, key: str, stream: bool, **options: object) -> bytes:
    """Return a chat request; see ``engine.py`` for the questions there are."""
    body: dict[str, object] = {
        "model": "m",
        "messages": [{"role": "user", "content": question}],
        **options,
    }
    if stream:
        usage = {"include_usage": True}
        body |= {"stream": True, "stream_options": usage}
    return post("/v1/chat/completions", json.dumps(body).encode(), key)


def post(path: str, data: bytes, key: str) -> bytes:
    """Return a request of JSON."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    ).encode() + data


async def ask_all(port: int, request: bytes, clients: int, answers: int) -> list[Took]:
    """Have ``answers`` requests answered, ``clients`` of them at a time."""
    took: list[Took] = []
    todo = iter(range(answers))
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(_client(port, request, todo, took))
    return took


async def _client(
    port: int, request: bytes, todo: Iterator[int], took: list[Took]
) -> None:
    async with connected(port) as client:
        for _ in todo:
            took.append(await client.ask(request))


@asynccontextmanager
async def holding(port: int, request: bytes, streams: int) -> AsyncIterator[None]:
    """Hold ``streams`` answers open, of which the first text has come."""
    few = asyncio.Semaphore(OPENING_AT_ONCE)
    release = asyncio.Event()
    begun = asyncio.Semaphore(0)

    async def hold() -> None:
        async with connected(port) as client:
            async with few:
                await client.begin(request)
            begun.release()
            await release.wait()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(hold())
        async with asyncio.timeout(PATIENCE):
            for _ in range(streams):
                await begun.acquire()
        yield
        release.set()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the fastest loop there is."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
