"""Ten times as many requests as the workers of a pool can serve.

Time is counted in answers of the worker, each of which takes ``WORK`` seconds: for each
come ``TIMES`` requests, and what waits has taken as long as answers were given
meanwhile.  So a busy machine, which gives fewer answers, gets fewer requests.
"""

import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import psutil
from aiohttp import ClientSession, WSMsgType

from harness.speed import scaled
from live.programs import KEY, TOKEN, Pool, Programs, eventually

SLOTS = 4
WORK = scaled(0.5)  # seconds that an answer takes
TIMES = 10
ANSWERS = 6 * SLOTS  # of the worker under load
REQUESTS = TIMES * ANSWERS
NOISE = 6 * SLOTS  # answers; behind all other requests would be ten times as many
MIB = 1 << 20

AUTH = {"Authorization": f"Bearer {KEY}"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@dataclass(slots=True)
class Responses:
    """Of those with 200 how long they took; of others status, Retry-After and that."""

    accepted: list[int] = field(default_factory=list)
    refused: list[tuple[int, str | None, int]] = field(default_factory=list)


@dataclass(slots=True)
class Node:
    """A GrandSage node that takes ``WORK`` seconds for each task."""

    given: int = 0  # answers
    wanted: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    @asynccontextmanager
    async def joined(self, url: str) -> AsyncIterator[None]:
        target = f"{url}/ws?token={TOKEN}&model=m&max_concurrency={SLOTS}&name=n"
        async with ClientSession() as session, session.ws_connect(target) as socket:

            async def work(task: int) -> None:
                await asyncio.sleep(WORK)
                self.given += 1
                await socket.send_bytes(task.to_bytes(4) + b"done")
                await socket.send_bytes(task.to_bytes(4))
                self.wanted.release()

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


async def ask(session: ClientSession, url: str, node: Node, to: Responses) -> None:
    """Send a chat, and record what becomes of it."""
    before = node.given
    async with session.post(f"{url}/v1/chat/completions", json=CHAT) as response:
        await response.read()
        took = node.given - before
        if response.status == 200:
            to.accepted.append(took)
        else:
            wait = response.headers.get("Retry-After")
            to.refused.append((response.status, wait, took))


async def poll_health(url: str, node: Node, took: list[int]) -> None:
    async with ClientSession() as session:
        while True:
            before = node.given
            async with session.get(f"{url}/healthz") as response:
                assert response.status == 200
            took.append(node.given - before)
            await asyncio.sleep(0.05)


async def overload(session: ClientSession, url: str, node: Node) -> Responses:
    """Ask ``TIMES`` as often as the node answers, whatever becomes of it."""
    responses = Responses()
    node.wanted = asyncio.Semaphore(SLOTS)  # it has nothing to do yet
    async with asyncio.TaskGroup() as tasks:
        for _ in range(ANSWERS):
            await node.wanted.acquire()
            for _ in range(TIMES):
                tasks.create_task(ask(session, url, node, responses))
    return responses


def is_calm(pool: Pool) -> bool:
    return not any(pool.admin("status")["jobs"].values())


async def test_ten_times_the_capacity_delays_no_accepted_request(
    programs: Programs,
) -> None:
    pool = await asyncio.to_thread(programs.serve, "--queue-wait", f"{WORK}")
    process = psutil.Process(pool.program.process.pid)
    health: list[int] = []
    node = Node()
    async with node.joined(pool.url), ClientSession(headers=AUTH) as session:
        await asyncio.to_thread(eventually, pool.workers, "the node has joined")
        control = Responses()
        for _ in range(3):
            await asyncio.gather(
                *(ask(session, pool.url, node, control) for _ in range(SLOTS))
            )
        before = process.memory_info().rss
        polling = asyncio.create_task(poll_health(pool.url, node, health))
        load = await overload(session, pool.url, node)
        polling.cancel()
        grown = process.memory_info().rss - before
        await asyncio.to_thread(eventually, lambda: is_calm(pool), "it is over")
        after = Responses()
        await ask(session, pool.url, node, after)

    assert len(control.accepted) == 3 * SLOTS
    assert len(load.accepted) + len(load.refused) == REQUESTS
    assert max(load.accepted) < 2 * SLOTS + NOISE
    assert len(load.accepted) >= ANSWERS - SLOTS
    statuses = [status for status, _, _ in load.refused]
    assert {*statuses} <= {429, 503}
    assert all(int(wait or 0) > 0 for _, wait, _ in load.refused)
    # Those that could just not be served have waited.
    assert statuses.count(429) > 0.8 * len(statuses)
    assert statistics.median(took for _, _, took in load.refused) < SLOTS
    assert statistics.median(health) < SLOTS
    assert grown < 32 * MIB
    assert after.accepted == [1]
