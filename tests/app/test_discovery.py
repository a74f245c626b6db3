"""Announcing and looking, with real multicast on the loopback interface."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

import pytest

from harness.speed import scaled
from peers.dialled_peers import DialledPeers
from shoal.app import discovery
from shoal.app.discovery import AnnouncedService, LocalDiscovery
from shoal.peers.discovered_peers import DiscoveredPeers
from shoal.protocols.seam.endpoints import (
    DiscoveredService,
    OutgoingConnection,
    ServiceBrowser,
    ServiceRecord,
)
from shoal.transports.tcp_server import BoundAddress

PATIENCE = scaled(20.0)  # seconds until what should happen is taken not to
HERE = ("127.0.0.1",)
kinds = (f"_near{number}x{id(object()) % 9999}._tcp" for number in count())


class Finder:
    """Notes what a browser sees, and calls nobody."""

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
async def looking(
    kind: str,
    finder: Finder,
    announced: tuple[AnnouncedService, ...] = (),
    addresses: Callable[[str], tuple[str, ...]] = lambda host: HERE,
    *,
    shy: bool = False,
) -> AsyncIterator[asyncio.Task[None]]:
    """Take part in the local network for the length of the block."""
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
        looking(kind, one, (announced(kind, "one", 1),)),
        looking(kind, other, (announced(kind, "other", 2),)),
    ):
        assert (await one.finds("other")).port == 2
        assert (await other.finds("one")).port == 1


async def test_service_follows_its_machine_to_another_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(discovery, "RETRY_AFTER", 0.01)
    kind, finder, mover = next(kinds), Finder(), Finder()
    place: tuple[str, ...] = ()
    async with (
        looking(kind, finder),
        looking(kind, mover, (announced(kind, "mover", 3),), lambda host: place),
    ):
        for address in ("127.0.0.2", "127.0.0.1"):
            place = (address,)
            await finder.finds("mover", address)


async def test_machine_without_multicast_is_told_what_to_do_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "RETRY_AFTER", 0.0)
    asked = asyncio.Event()
    answers = count()

    def nowhere(host: str) -> tuple[str, ...]:
        if next(answers) > 20:
            asked.set()
        return ()

    with caplog.at_level(logging.WARNING):
        async with looking(next(kinds), Finder(), addresses=nowhere) as task:
            await asked.wait()
            assert not task.done()

    (told,) = caplog.records
    assert "use --wire-peers HOST:PORT" in told.getMessage()
    assert "no address on a network with multicast" in told.getMessage()


async def test_what_listens_on_loopback_is_not_announced() -> None:
    kind = next(kinds)
    here = AnnouncedService(
        "wire", ServiceRecord(kind, "here", {}), BoundAddress("127.0.0.1", 1)
    )
    around = LocalDiscovery([here], [], lambda host: ())

    async with asyncio.timeout(PATIENCE):
        await around.run()  # there is nothing to do


async def test_who_listens_on_loopback_can_look_for_others() -> None:
    kind, finder, looker = next(kinds), Finder(), Finder()
    hidden = AnnouncedService(
        "wire", ServiceRecord(kind, "hidden", {}), BoundAddress("127.0.0.1", 1)
    )

    def addresses(host: str) -> tuple[str, ...]:
        return () if host == "127.0.0.1" else HERE

    async with (
        looking(kind, looker, (hidden,), addresses),
        looking(kind, finder, (announced(kind, "seen", 2),)),
    ):
        await looker.finds("seen")
        await finder.finds("seen")  # each sees itself; the protocol knows

    assert "hidden" not in finder.found


async def test_who_is_shy_looks_only_where_it_is_found_itself() -> None:
    kind, finder = next(kinds), Finder()
    hidden = AnnouncedService(
        "wire", ServiceRecord(kind, "own", {}), BoundAddress("127.0.0.1", 5)
    )
    async with looking(kind, finder, (hidden,), lambda host: (), shy=True) as alone:
        await alone  # for there is nothing to be done

    async with (
        looking(kind, Finder(), (announced(kind, "other", 4),)),
        looking(kind, finder, (announced(kind, "own", 5),), shy=True),
    ):
        assert (await finder.finds("other")).port == 4
