"""Connections that are kept up, in virtual time."""

import asyncio
import logging
from itertools import pairwise

import pytest

from peers.dialled_peers import DialledPeers, target
from shoal.peers.outbound import (
    RETRY_FIRST,
    RETRY_MAX,
    STEADY_AFTER,
    FixedTarget,
    OutboundConnections,
)
from simulation import virtual

HOUR = 3600.0


async def keep_up(calls: OutboundConnections, aim: FixedTarget, seconds: float) -> None:
    """Keep one connection up for so long, and then stop."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(calls.maintain("wire", aim))
        await asyncio.sleep(seconds)
        calls.stop()


def pauses(peers: DialledPeers) -> list[float]:
    return [later - sooner for (sooner, _), (later, _) in pairwise(peers.calls)]


def test_peer_that_is_away_is_called_less_and_less_often_and_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peers = DialledPeers()

    async def test() -> None:
        with caplog.at_level(logging.INFO):
            await keep_up(peers.connections(), FixedTarget(target("tcp://far:1")), HOUR)

    virtual.run(test())

    assert RETRY_FIRST / 2 <= pauses(peers)[0] <= RETRY_FIRST + 0.1
    assert all(RETRY_MAX / 2 <= each <= RETRY_MAX + 0.1 for each in pauses(peers)[8:])
    assert len(peers.calls) < 4 + HOUR / (RETRY_MAX / 2)
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert "tcp://far:1: connection refused" in told.getMessage()


def test_peer_that_hangs_up_at_once_is_called_less_and_less_often() -> None:
    peers = DialledPeers(lambda: 0.0)
    virtual.run(_kept(peers, HOUR))

    assert all(each >= RETRY_MAX / 2 for each in pauses(peers)[8:])


def test_connection_that_lasted_is_made_again_at_once() -> None:
    peers = DialledPeers(lambda: 2 * STEADY_AFTER)
    virtual.run(_kept(peers, HOUR))

    assert all(each <= 2 * STEADY_AFTER + RETRY_FIRST + 0.1 for each in pauses(peers))


def test_coming_back_and_going_again_is_told_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lasting = iter([-1.0, -1.0, 1.0, -1.0, -1.0, HOUR])
    virtual.run(_kept(DialledPeers(lambda: next(lasting)), 30.0))

    assert caplog.text.count("connection refused") == 2


async def _kept(peers: DialledPeers, seconds: float) -> None:
    aim = FixedTarget(target("tcp://far:1"))
    async with asyncio.TaskGroup() as tasks:
        calls = peers.connections()
        keeping = tasks.create_task(calls.maintain("wire", aim))
        await asyncio.sleep(seconds)
        calls.stop()
        keeping.cancel()


def test_stopping_leaves_a_connection_to_end_by_itself() -> None:
    peers = DialledPeers(lambda: 60.0)

    async def test() -> float:
        await keep_up(peers.connections(), FixedTarget(target("tcp://far:1")), 1.0)
        return asyncio.get_running_loop().time()

    assert virtual.run(test()) == pytest.approx(60.0, abs=1.0)
    assert peers.served == 1


def test_stopping_ends_a_wait_at_once() -> None:
    peers = DialledPeers()

    async def test() -> float:
        await keep_up(peers.connections(), FixedTarget(target("tcp://far:1")), 100.0)
        return asyncio.get_running_loop().time()

    assert virtual.run(test()) == pytest.approx(100.0, abs=0.1)


def test_certificate_that_is_asked_for_is_passed_on() -> None:
    peers = DialledPeers(lambda: HOUR)
    pinned = FixedTarget(target("tls://far:1", bytes(32)))

    async def test() -> None:
        calls = peers.connections()
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(calls.maintain("wire", pinned))
            await asyncio.sleep(1.0)
            keeping.cancel()

    virtual.run(test())

    assert peers.fingerprints == [bytes(32)]
