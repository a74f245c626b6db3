"""Multicast DNS, with real packets on the loopback interface."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from types import SimpleNamespace

import psutil
import pytest
from zeroconf import ServiceStateChange
from zeroconf.asyncio import AsyncServiceInfo

from harness.speed import PATIENCE
from shoal.domain.errors import Unavailable
from shoal.protocols.seam.endpoints import DiscoveredService, ServiceRecord
from shoal.transports import mdns
from shoal.transports.mdns import addresses_of, local_network

HERE = ("127.0.0.1",)
TEXT = {"deviceID": "8A1C", "chip": "é", "version": "1"}
kinds = (f"_shoal{number}x{id(object()) % 9999}._tcp" for number in count())


class Watcher:
    """Records the services of a browser."""

    def __init__(self) -> None:
        self.there: dict[str, DiscoveredService] = {}
        self.told = asyncio.Event()

    def seen(self, sighting: DiscoveredService) -> None:
        self.there[sighting.name] = sighting
        self.told.set()

    def lost(self, name: str) -> None:
        del self.there[name]
        self.told.set()

    async def sees(self, *names: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while set(self.there) != set(names):
                self.told.clear()
                await self.told.wait()


@asynccontextmanager
async def watching(kind: str) -> AsyncIterator[Watcher]:
    watcher = Watcher()
    async with (
        local_network(HERE) as network,
        network.browse(kind, watcher.seen, watcher.lost),
    ):
        yield watcher


async def test_announced_service_is_found_until_withdrawn() -> None:
    kind = next(kinds)
    async with watching(kind) as watcher:
        async with local_network(HERE) as network:
            name = await network.announce(ServiceRecord(kind, "studio", TEXT), 4321)
            assert name == "studio"
            await watcher.sees("studio")
            assert watcher.there["studio"] == DiscoveredService(
                "studio", HERE, 4321, TEXT
            )
        await watcher.sees()


async def test_duplicate_name_is_changed() -> None:
    kind = next(kinds)
    async with (
        watching(kind) as watcher,
        local_network(HERE) as one,
        local_network(HERE) as other,
    ):
        await one.announce(ServiceRecord(kind, "studio", {"n": "1"}), 1001)
        await watcher.sees("studio")
        name = await other.announce(ServiceRecord(kind, "studio", {"n": "2"}), 1002)

        assert name == "studio-2"
        await watcher.sees("studio", "studio-2")
        assert {each.port for each in watcher.there.values()} == {1001, 1002}


@pytest.mark.parametrize(
    ("name", "announced"),
    [
        ("box.lan", "box-lan"),
        ("Bäckerei\n", "Bäckerei-"),
        ("é" * 99, "é" * 29),
        ("", "shoal"),
        ("\udcff", "-"),
    ],
)
def test_any_host_name_becomes_a_valid_service_name(name: str, announced: str) -> None:
    assert mdns._instance_name(name) == announced


async def test_unusual_names_and_long_texts_are_announced() -> None:
    kind = next(kinds)
    async with watching(kind) as watcher, local_network(HERE) as network:
        service = ServiceRecord(kind, "Bäckerei 😀\n" + "é" * 99, {"chip": "é" * 400})
        name = await network.announce(service, 1)
        await watcher.sees(name)
        assert watcher.there[name].text["chip"].startswith("é" * 120)


async def test_flood_of_services_is_limited_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mdns, "SERVICES_MAX", 2)
    kind = next(kinds) + ".local."
    async with local_network(HERE) as network, asyncio.TaskGroup() as tasks:
        inner = network._zeroconf.zeroconf
        looks = mdns._ServiceResolver(inner, tasks, kind, ignore, ignore)
        for number in range(9):
            looks.on_change(inner, kind, f"{number}.{kind}", ServiceStateChange.Added)
        assert len(looks._resolving) == 2
        looks.stop()

    assert caplog.text.count("over 2 services of the kind") == 1


def ignore(told: object) -> None:
    """Ignore a service."""


async def test_change_of_a_service_is_seen() -> None:
    kind = next(kinds)
    async with watching(kind) as watcher:
        for text in ({"n": "1"}, {"n": "2"}):
            async with local_network(HERE) as network:
                await network.announce(ServiceRecord(kind, "studio", text), 1)
                await watcher.sees("studio")
                assert watcher.there["studio"].text == text
            await watcher.sees()


async def test_invalid_names_are_ignored() -> None:
    seen: list[DiscoveredService] = []
    async with local_network(HERE) as network, asyncio.TaskGroup() as tasks:
        inner = network._zeroconf.zeroconf
        kind = next(kinds) + ".local."
        looks = mdns._ServiceResolver(inner, tasks, kind, seen.append, ignore)
        for name in ("", ".", kind, "x" * 99 + "." + kind, "other._http._tcp.local."):
            looks.on_change(inner, kind, name, ServiceStateChange.Added)
            looks.on_change(inner, kind, name, ServiceStateChange.Removed)
        looks.stop()

    assert seen == []


def test_texts_and_addresses_are_bounded() -> None:
    kind = "_x._tcp.local."
    info = AsyncServiceInfo(
        kind,
        f"one.{kind}",
        7,
        properties={f"k{number}": b"\xff" for number in range(99)},
        parsed_addresses=["fe80::1", *(f"10.0.0.{number}" for number in range(1, 99))],
    )

    sighting = mdns.service_of(info, kind)

    assert sighting.name == "one"
    assert len(sighting.text) == 32
    assert sighting.text["k0"] == "\ufffd"
    assert len(sighting.addresses) == 8
    assert sighting.addresses[0].startswith("10.")


async def test_machine_without_an_address_is_an_error() -> None:
    with pytest.raises(Unavailable, match="no address on a network with multicast"):
        async with local_network(()):
            pass


def test_foreign_address_is_an_error() -> None:
    # In a separate process, because the library leaks sockets.
    ran = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        check=False,
        timeout=PATIENCE,
        capture_output=True,
        text=True,
    )
    assert "Unavailable: no multicast on this machine" in ran.stderr


ELSEWHERE = """
import asyncio
from shoal.transports.mdns import local_network
asyncio.run(local_network(["203.0.113.9"]).__aenter__())
"""


def machine(**interfaces: tuple[bool, str, list[str]]) -> tuple[object, object]:
    """Return interfaces as the system lists them: up, flags, addresses."""
    stats = {
        name: SimpleNamespace(isup=up, flags=flags)
        for name, (up, flags, _) in interfaces.items()
    }
    addresses = {
        name: [
            SimpleNamespace(family=0, address=each, netmask=None, ptp=None)
            for each in given
        ]
        for name, (_, _, given) in interfaces.items()
    }
    return (lambda: stats), (lambda: addresses)


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("0.0.0.0", ("10.0.0.2", "192.168.1.9")),
        ("::", ("fd00::2",)),
        ("127.0.0.1", ()),
        ("::1", ()),
        ("192.168.1.9", ("192.168.1.9",)),
        ("fe80::5%eth0", ("fe80::5",)),
    ],
)
def test_only_reachable_addresses_are_listed(
    monkeypatch: pytest.MonkeyPatch, host: str, found: tuple[str, ...]
) -> None:
    stats, addresses = machine(
        lo=(True, "up,loopback,running", ["127.0.0.1", "::1"]),
        eth0=(
            True,
            "up,broadcast,running,multicast",
            ["10.0.0.2", "fd00::2", "fe80::5%eth0", "02:42:ac:11:00:02"],
        ),
        wifi=(True, "", ["192.168.1.9"]),
        vpn=(True, "up,pointopoint,running", ["10.8.0.1"]),
        old=(False, "broadcast,multicast", ["172.16.0.1"]),
    )
    monkeypatch.setattr(psutil, "net_if_stats", stats)
    monkeypatch.setattr(psutil, "net_if_addrs", addresses)

    assert addresses_of(host) == found


def test_local_addresses_can_be_listed() -> None:
    assert all(":" not in address for address in addresses_of("0.0.0.0"))


def test_library_is_imported_lazily() -> None:
    script = "import sys, shoal.app.server; sys.exit('zeroconf' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], check=False, timeout=PATIENCE)
    assert ran.returncode == 0
