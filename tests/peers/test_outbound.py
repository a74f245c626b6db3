"""Outbound connections in virtual time."""

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
from shoal.protocols.seam.session import CloseCode
from shoal.transports.driver import ConnectionEnd
from simulation import virtual

HOUR = 3600.0


async def maintain(
    calls: OutboundConnections, aim: FixedTarget, seconds: float
) -> None:
    """Maintain one connection for ``seconds``, and then stop."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(calls.maintain("wire", aim))
        await asyncio.sleep(seconds)
        calls.stop()


def pauses(peers: DialledPeers) -> list[float]:
    return [later - sooner for (sooner, _), (later, _) in pairwise(peers.calls)]


def test_absent_peer_is_dialled_with_backoff_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peers = DialledPeers()

    async def test() -> None:
        with caplog.at_level(logging.INFO):
            await maintain(
                peers.connections(), FixedTarget(target("tcp://far:1")), HOUR
            )

    virtual.run(test())

    assert RETRY_FIRST / 2 <= pauses(peers)[0] <= RETRY_FIRST + 0.1
    assert all(RETRY_MAX / 2 <= each <= RETRY_MAX + 0.1 for each in pauses(peers)[8:])
    assert len(peers.calls) < 4 + HOUR / (RETRY_MAX / 2)
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert "tcp://far:1: connection refused" in told.getMessage()


def test_peer_that_disconnects_at_once_is_dialled_with_backoff() -> None:
    peers = DialledPeers(lambda: 0.0)
    virtual.run(_maintain(peers, HOUR))

    assert all(each >= RETRY_MAX / 2 for each in pauses(peers)[8:])


def test_long_connection_is_redialled_at_once() -> None:
    peers = DialledPeers(lambda: 2 * STEADY_AFTER)
    virtual.run(_maintain(peers, HOUR))

    assert all(each <= 2 * STEADY_AFTER + RETRY_FIRST + 0.1 for each in pauses(peers))


def test_return_and_loss_are_logged_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lasting = iter([-1.0, -1.0, 1.0, -1.0, -1.0, HOUR])
    virtual.run(_maintain(DialledPeers(lambda: next(lasting)), 30.0))

    assert caplog.text.count("connection refused") == 2


def test_peer_that_refuses_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """As a worker that listens does, whose token is another."""
    refused = ConnectionEnd("Invalid token", CloseCode.POLICY_VIOLATION)
    virtual.run(_maintain(DialledPeers(lambda: 0.0, end=refused), HOUR))

    (told,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "Invalid token" in told.getMessage()


async def _maintain(peers: DialledPeers, seconds: float) -> None:
    aim = FixedTarget(target("tcp://far:1"))
    async with asyncio.TaskGroup() as tasks:
        calls = peers.connections()
        keeping = tasks.create_task(calls.maintain("wire", aim))
        await asyncio.sleep(seconds)
        calls.stop()
        keeping.cancel()


def test_stop_lets_an_open_connection_end() -> None:
    peers = DialledPeers(lambda: 60.0)

    async def test() -> float:
        await maintain(peers.connections(), FixedTarget(target("tcp://far:1")), 1.0)
        return asyncio.get_running_loop().time()

    assert virtual.run(test()) == pytest.approx(60.0, abs=1.0)
    assert peers.served == 1


def test_stop_ends_a_backoff_at_once() -> None:
    peers = DialledPeers()

    async def test() -> float:
        await maintain(peers.connections(), FixedTarget(target("tcp://far:1")), 100.0)
        return asyncio.get_running_loop().time()

    assert virtual.run(test()) == pytest.approx(100.0, abs=0.1)


def test_fingerprint_is_passed_to_the_dialer() -> None:
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
