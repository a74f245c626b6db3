"""Services that come and go on the local network, in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from peers.dialled_peers import DialledPeers, target
from shoal.peers import outbound
from shoal.peers.outbound import RETRY_MAX, DiscoveredPeers
from shoal.protocols.seam.endpoints import (
    DiscoveredService,
    OutgoingConnection,
    ServiceBrowser,
)
from simulation import virtual

HOUR = 3600.0


def seen(
    name: str = "studio", *addresses: str, port: int = 1, text: str = ""
) -> DiscoveredService:
    return DiscoveredService(name, addresses or ("10.0.0.1",), port, {"n": text})


def target_of(sighting: DiscoveredService, now: float) -> OutgoingConnection | None:
    if sighting.text["n"] == "ourselves":
        return None
    return target(f"tcp://{sighting.addresses[0]}:{sighting.port}")


@asynccontextmanager
async def run_discovery(
    peers: DialledPeers,
    target_of: Callable[
        [DiscoveredService, float], OutgoingConnection | None
    ] = target_of,
) -> AsyncIterator[DiscoveredPeers]:
    calls = peers.connections()
    async with asyncio.TaskGroup() as tasks:
        made = DiscoveredPeers(
            "wire", ServiceBrowser("_x._tcp", target_of), calls, tasks
        )
        yield made
        calls.stop()
        for each in made.connections:
            each.cancel()


def in_virtual_time(
    test: Callable[[], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    def run() -> None:
        virtual.run(test())

    run.__name__ = test.__name__
    return run


@in_virtual_time
async def test_service_is_dialled_once_while_present() -> None:
    peers = DialledPeers(lambda: HOUR)
    async with run_discovery(peers) as made:
        for _ in range(3):
            made.on_found(seen())
            made.on_found(seen("other", "10.0.0.2"))
            await asyncio.sleep(5.0)

        assert sorted(url for _, url in peers.calls) == [
            "tcp://10.0.0.1:1",
            "tcp://10.0.0.2:1",
        ]


@in_virtual_time
async def test_service_is_dialled_again_after_its_connection_ends() -> None:
    peers = DialledPeers(lambda: 60.0)
    async with run_discovery(peers) as made:
        made.on_found(seen())
        await asyncio.sleep(100.0)

        assert len(peers.calls) == 2


@in_virtual_time
async def test_withdrawn_service_is_not_dialled_until_it_returns() -> None:
    peers = DialledPeers(lambda: 1.0)
    async with run_discovery(peers) as made:
        made.on_found(seen())
        await asyncio.sleep(0.5)
        made.on_lost("studio")
        made.on_lost("never seen")
        await asyncio.sleep(100.0)
        assert len(peers.calls) == 1
        assert not made.connections

        made.on_found(seen(port=2))
        await asyncio.sleep(0.5)
        assert peers.calls[1][1] == "tcp://10.0.0.1:2"


@in_virtual_time
async def test_connection_outlives_the_withdrawal_of_its_service() -> None:
    peers = DialledPeers(lambda: HOUR)
    async with run_discovery(peers) as made:
        made.on_found(seen())
        await asyncio.sleep(1.0)
        made.on_all_lost()
        await asyncio.sleep(60.0)

        assert peers.open == 1
        made.on_found(seen())
        await asyncio.sleep(60.0)
        assert len(peers.calls) == 1


@in_virtual_time
async def test_all_addresses_are_tried_in_turn() -> None:
    peers = DialledPeers()
    async with run_discovery(peers) as made:
        made.on_found(seen("studio", "10.0.0.1", "10.0.0.2", "10.0.0.3"))
        await asyncio.sleep(20.0)

        hosts = [url[6:14] for _, url in peers.calls[:4]]
        assert hosts == ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.1"]


@in_virtual_time
async def test_changed_service_is_dialled_soon_but_not_per_change() -> None:
    peers = DialledPeers()
    async with run_discovery(peers) as made:
        made.on_found(seen())
        await asyncio.sleep(10 * RETRY_MAX)
        before = len(peers.calls)
        made.on_found(seen(port=2))
        await asyncio.sleep(1.0)
        assert peers.calls[before][1].endswith(":2")

        before = len(peers.calls)
        for number in range(1000):
            made.on_found(seen(text=str(number)))
            await asyncio.sleep(0.01)
        assert len(peers.calls) - before <= 80


@in_virtual_time
async def test_declined_service_is_considered_again_later() -> None:
    answers = iter([None, None, target("tcp://10.0.0.1:1")])
    peers = DialledPeers(lambda: HOUR)
    async with run_discovery(peers, lambda sighting, now: next(answers)) as made:
        made.on_found(seen())
        await asyncio.sleep(5.0)

        assert len(peers.calls) == 1


@in_virtual_time
async def test_own_service_is_not_dialled() -> None:
    peers = DialledPeers()
    async with run_discovery(peers) as made:
        made.on_found(seen(text="ourselves"))
        made.on_found(DiscoveredService("nowhere", (), 1, {"n": ""}))
        await asyncio.sleep(HOUR)

        assert peers.calls == []


def test_invented_services_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "DISCOVERED_MAX", 4)

    async def test() -> None:
        peers = DialledPeers()
        async with run_discovery(peers) as made:
            for number in range(100):
                made.on_found(seen(f"s{number}"))
                await asyncio.sleep(0.0)
            assert len(made.connections) == 4

    virtual.run(test())
