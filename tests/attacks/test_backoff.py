"""Coordinators that disconnect repeatedly, in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random

import pytest

from attacks.test_servers import Echo
from shoal.domain.worker import ServedModel
from shoal.protocols.grandsage.worker import GrandSageNodeDialer
from shoal.protocols.seam.context import WorkerProfile
from shoal.transports.clock import LoopClock
from shoal.transports.link import LinkClosed
from shoal.worker.agent import Agent, WorkerEvent
from shoal.worker.jobs import EngineSlots, only_model
from simulation import virtual
from transports.memory_links import MemoryLink

HOUR = 3600.0
Opened = AbstractAsyncContextManager[tuple[MemoryLink, Mapping[str, str]]]


def refused() -> MemoryLink:
    raise LinkClosed("connection refused")


def closed_at_once() -> MemoryLink:
    link = MemoryLink()
    link.cut()
    return link


def closed_as_if_replaced() -> MemoryLink:
    link = MemoryLink()
    link.cut(LinkClosed("closed by peer: 4000 Bye", 4000, "Bye"))
    return link


def closed_after_a_task() -> MemoryLink:
    link = MemoryLink()
    link.deliver('{"id":1,"messages":[]}', '{"id":1,"stop":true}')
    link.cut()
    return link


@pytest.mark.parametrize(
    "open_link", [refused, closed_at_once, closed_as_if_replaced, closed_after_a_task]
)
def test_reconnect_backoff_grows(
    open_link: Callable[[], MemoryLink],
) -> None:
    dialled: list[float] = []
    reports: list[WorkerEvent] = []

    @asynccontextmanager
    async def dial(
        url: str, headers: Mapping[str, str], message_max: int
    ) -> AsyncIterator[tuple[MemoryLink, Mapping[str, str]]]:
        dialled.append(asyncio.get_running_loop().time())
        yield open_link(), {}

    async def scenario() -> None:
        dialer = GrandSageNodeDialer(
            "ws://coordinator", WorkerProfile("n", ServedModel("m"), 1)
        )
        agent = Agent(
            dialer,
            dial,
            only_model(Echo(), EngineSlots(1)),
            LoopClock(),
            Random(1),
            reports.append,
        )
        running = asyncio.create_task(agent.run())
        await asyncio.sleep(HOUR)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    virtual.run(scenario())

    # At most every 15 seconds in the long run, and at least every 30.
    assert HOUR / 31 < len(dialled) < HOUR / 15 + 10
    # Once, however often it is tried.
    assert [each.kind for each in reports].count("waiting") == 1
