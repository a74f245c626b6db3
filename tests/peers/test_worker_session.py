"""One worker's connection, from its beginning to its end."""

import logging
from collections.abc import Sequence

import pytest

from coordinator.hubs import Coordinator, coordinator, moment
from shoal.domain.vocabulary import Joined, RunJob
from shoal.domain.work import JobKind
from shoal.domain.worker import Offer
from shoal.peers.worker_session import serve_worker
from shoal.protocols.seam.session import Data, Send
from shoal.transports.clock import LoopClock
from shoal.transports.link import LinkClosed
from simulation import virtual
from transports.memory_links import MemoryLink, ScriptedSession

JOINED = Joined("w", Offer(frozenset({JobKind.CHAT}), frozenset({"m"})))


class TellingSession(ScriptedSession):
    """Tells the peer in plain words what it is asked for."""

    def send(self, message: object, now: float) -> Sequence[Send]:
        return [Send(type(message).__name__)]


def stumble(data: Data) -> Sequence[object]:
    raise ZeroDivisionError("a bug")


async def serve(its: Coordinator, session: ScriptedSession, link: MemoryLink) -> None:
    await serve_worker(its.hub, LoopClock(), "wire", session, link)


def test_worker_is_in_the_pool_for_as_long_as_its_connection_lasts() -> None:
    async def scenario() -> None:
        async with coordinator() as its:
            link = MemoryLink()
            session = TellingSession(opening=[JOINED])
            serving = its.task.get_loop().create_task(serve(its, session, link))
            await moment()
            assert list(its.hub.pool.workers) == ["wire:w"]
            await its.ask()
            assert link.sent == [RunJob.__name__]

            link.cut(LinkClosed("closed by peer: 1000", 1000))
            await serving
            await moment()

            assert not its.hub.pool.workers

    virtual.run(scenario())


def test_bug_in_a_session_ends_its_connection_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with coordinator() as its:
            link = MemoryLink()
            session = TellingSession(stumble, opening=[JOINED])
            serving = its.task.get_loop().create_task(serve(its, session, link))
            other = await its.join("other")
            link.arrive("boom")

            await serving
            await moment()

            assert list(its.hub.pool.workers) == ["wire:other"]
            assert link.closed == [(1011, "internal error")]
            await its.ask()
            assert len(other.runs) == 1

    with caplog.at_level(logging.INFO, "shoal.serving"):
        virtual.run(scenario())

    said = [record.getMessage().split()[0] for record in caplog.records]
    assert said == ["connected", "broken", "disconnected"]
