"""Ten times as many requests as the workers of a pool can serve.

The time of an answer is that of the worker, which sleeps, so that a busy machine hardly
changes it; how long a refusal takes is what the coordinator itself logs.  A slow
machine is given fewer requests a second, by workers that take longer.
"""

import asyncio
import re
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import psutil
from aiohttp import ClientSession, WSMsgType

from harness.speed import scaled
from live.programs import KEY, TOKEN, Programs, eventually

SLOTS = 4
WORK = scaled(0.5)  # seconds that an answer takes
CAPACITY = SLOTS / WORK  # answers a second
TIMES = 10
LOADED = scaled(3.0)  # seconds of load
REQUESTS = int(TIMES * CAPACITY * LOADED)
AFTERWARDS = 5.0  # seconds after which it is over
NOISE = scaled(5.0)  # seconds; an answer behind all others would take thirty
MIB = 1 << 20

AUTH = {"Authorization": f"Bearer {KEY}"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
LOGGED = re.compile(r"path='/v1/chat/completions' status=(\d+) ms=([0-9.]+)")


@dataclass(slots=True)
class Answers:
    """Responses: the seconds of those with 200; status and Retry-After of others."""

    accepted: list[float] = field(default_factory=list)
    refused: list[tuple[int, str | None]] = field(default_factory=list)


@asynccontextmanager
async def node(url: str) -> AsyncIterator[None]:
    """Answer as a GrandSage node that takes ``WORK`` seconds for each task."""
    target = f"{url}/ws?token={TOKEN}&model=m&max_concurrency={SLOTS}&name=n"
    async with ClientSession() as session, session.ws_connect(target) as socket:

        async def work(task: int) -> None:
            await asyncio.sleep(WORK)
            await socket.send_bytes(task.to_bytes(4) + b"done")
            await socket.send_bytes(task.to_bytes(4))

        async def listen() -> None:
            async with asyncio.TaskGroup() as working:
                async for message in socket:
                    if message.type is WSMsgType.TEXT and message.data:
                        task = message.json()
                        if "stop" not in task:
                            working.create_task(work(task["id"]))

        listening = asyncio.create_task(listen())
        yield
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def ask(session: ClientSession, url: str, answers: Answers) -> None:
    """Send a chat, and record what becomes of it."""
    began = time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", json=CHAT) as response:
        await response.read()
        took = time.perf_counter() - began
        if response.status == 200:
            answers.accepted.append(took)
        else:
            wait = response.headers.get("Retry-After")
            answers.refused.append((response.status, wait))


async def poll_health(url: str, took: list[float]) -> None:
    async with ClientSession() as session:
        while True:
            began = time.perf_counter()
            async with session.get(f"{url}/healthz") as response:
                assert response.status == 200
            took.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)


async def overload(session: ClientSession, url: str) -> Answers:
    """Ask ``TIMES`` as often as the node can answer, whatever becomes of it."""
    answers = Answers()
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(REQUESTS):
            due = began + number * LOADED / REQUESTS
            await asyncio.sleep(due - time.perf_counter())
            tasks.create_task(ask(session, url, answers))
    return answers


def refusals_in(log: str) -> list[float]:
    """Return how long each refusal of a request took the coordinator, in seconds."""
    return [float(ms) / 1000 for status, ms in LOGGED.findall(log) if status == "429"]


async def test_ten_times_the_capacity_delays_no_accepted_request(
    programs: Programs,
) -> None:
    flags = ("--queue-wait", f"{WORK}", "--log-level", "info")
    pool = await asyncio.to_thread(programs.serve, *flags)
    process = psutil.Process(pool.program.process.pid)
    health: list[float] = []
    async with node(pool.url), ClientSession(headers=AUTH) as session:
        await asyncio.to_thread(eventually, pool.workers, "the node has joined")
        control = Answers()
        for _ in range(3):
            await asyncio.gather(
                *(ask(session, pool.url, control) for _ in range(SLOTS))
            )
        before = process.memory_info().rss
        polling = asyncio.create_task(poll_health(pool.url, health))
        load = await overload(session, pool.url)
        polling.cancel()
        grown = process.memory_info().rss - before
        await asyncio.sleep(AFTERWARDS)
        after = Answers()
        await ask(session, pool.url, after)

    normal = max(control.accepted)
    assert len(load.accepted) + len(load.refused) == REQUESTS
    assert max(load.accepted) < 2 * normal + NOISE
    assert len(load.accepted) > 0.5 * LOADED * CAPACITY
    assert {status for status, _ in load.refused} <= {429, 503}
    assert all(int(wait or 0) > 0 for _, wait in load.refused)
    # Those that could just not be served have waited.
    refusals = refusals_in(pool.program.errors)
    assert len(refusals) > 0.9 * len(load.refused)
    assert statistics.median(refusals) < scaled(0.1)
    assert statistics.median(health) < scaled(0.25)
    assert grown < 32 * MIB
    assert after.accepted[0] < normal + NOISE
