"""Discovery with real multicast on the loopback interface."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

import pytest

from harness.speed import PATIENCE
from peers.dialled_peers import DialledPeers
from shoal.app import network
from shoal.app.network import AnnouncedService, LocalDiscovery
from shoal.peers.outbound import DiscoveredPeers
from shoal.protocols.seam.endpoints import (
    DiscoveredService,
    OutgoingConnection,
    ServiceBrowser,
    ServiceRecord,
)
from shoal.transports.acceptor import BoundAddress

HERE = ("127.0.0.1",)
kinds = (f"_near{number}x{id(object()) % 9999}._tcp" for number in count())


class Finder:
    """Records discovered services, and dials none."""

    def __init__(self) -> None:
        self.found: dict[str, DiscoveredService] = {}
        self.told = asyncio.Event()

    def meet(
        self, sighting: DiscoveredService, now: float
    ) -> OutgoingConnection | None:
        self.found[sighting.name] = sighting
        self.told.set()
        return None

    async def finds(self, name: str, address: str = HERE[0]) -> DiscoveredService:
        async with asyncio.timeout(PATIENCE):
            while name not in self.found or self.found[name].addresses != (address,):
                self.told.clear()
                await self.told.wait()
        return self.found[name]


@asynccontextmanager
async def discovering(
    kind: str,
    finder: Finder,
    announced: tuple[AnnouncedService, ...] = (),
    addresses: Callable[[str], tuple[str, ...]] = lambda host: HERE,
    *,
    shy: bool = False,
) -> AsyncIterator[asyncio.Task[None]]:
    """Announce and browse within the block."""
    async with asyncio.TaskGroup() as tasks:
        calls = DialledPeers().connections()
        browser = ServiceBrowser(kind, finder.meet, shy)
        meetings = [DiscoveredPeers("wire", browser, calls, tasks)]
        around = LocalDiscovery(announced, meetings, addresses)
        task = tasks.create_task(around.run())
        yield task
        task.cancel()
        calls.stop()
        for each in meetings[0].connections:
            each.cancel()


def announced(kind: str, name: str, port: int) -> AnnouncedService:
    return AnnouncedService(
        "wire", ServiceRecord(kind, name, {}), BoundAddress("0.0.0.0", port)
    )


async def test_two_machines_find_each_other() -> None:
    kind, one, other = next(kinds), Finder(), Finder()
    async with (
        discovering(kind, one, (announced(kind, "one", 1),)),
        discovering(kind, other, (announced(kind, "other", 2),)),
    ):
        assert (await one.finds("other")).port == 2
        assert (await other.finds("one")).port == 1


async def test_service_follows_its_machine_across_networks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(network, "RETRY_AFTER", 0.01)
    kind, finder, mover = next(kinds), Finder(), Finder()
    place: tuple[str, ...] = ()
    async with (
        discovering(kind, finder),
        discovering(kind, mover, (announced(kind, "mover", 3),), lambda host: place),
    ):
        for address in ("127.0.0.2", "127.0.0.1"):
            place = (address,)
            await finder.finds("mover", address)


async def test_missing_multicast_is_explained_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "RETRY_AFTER", 0.0)
    asked = asyncio.Event()
    answers = count()

    def nowhere(host: str) -> tuple[str, ...]:
        if next(answers) > 20:
            asked.set()
        return ()

    with caplog.at_level(logging.WARNING):
        async with discovering(next(kinds), Finder(), addresses=nowhere) as task:
            await asked.wait()
            assert not task.done()

    (told,) = caplog.records
    assert "use --wire-peers HOST:PORT" in told.getMessage()
    assert "no address on a network with multicast" in told.getMessage()


async def test_loopback_listener_is_not_announced() -> None:
    kind = next(kinds)
    here = AnnouncedService(
        "wire", ServiceRecord(kind, "here", {}), BoundAddress("127.0.0.1", 1)
    )
    around = LocalDiscovery([here], [], lambda host: ())

    async with asyncio.timeout(PATIENCE):
        await around.run()  # there is nothing to do


async def test_loopback_listener_can_browse() -> None:
    kind, finder, looker = next(kinds), Finder(), Finder()
    hidden = AnnouncedService(
        "wire", ServiceRecord(kind, "hidden", {}), BoundAddress("127.0.0.1", 1)
    )

    def addresses(host: str) -> tuple[str, ...]:
        return () if host == "127.0.0.1" else HERE

    async with (
        discovering(kind, looker, (hidden,), addresses),
        discovering(kind, finder, (announced(kind, "seen", 2),)),
    ):
        await looker.finds("seen")
        await finder.finds("seen")  # each sees itself; the protocol ignores that

    assert "hidden" not in finder.found


async def test_unannounced_browser_uses_its_own_networks_only() -> None:
    kind, finder = next(kinds), Finder()
    hidden = AnnouncedService(
        "wire", ServiceRecord(kind, "own", {}), BoundAddress("127.0.0.1", 5)
    )
    async with discovering(kind, finder, (hidden,), lambda host: (), shy=True) as alone:
        await alone  # because there is nothing to do

    async with (
        discovering(kind, Finder(), (announced(kind, "other", 4),)),
        discovering(kind, finder, (announced(kind, "own", 5),), shy=True),
    ):
        assert (await finder.finds("other")).port == 4
