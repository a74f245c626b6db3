"""Listeners, dialers and discovery, with real sockets and real multicast."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from harness.speed import PATIENCE
from shoal.app import network as module
from shoal.app.network import NetworkContext, open_network
from shoal.coordinator.admission import WorkerAdmission, load_join_tokens
from shoal.coordinator.auth_throttle import BLOCK_AFTER
from shoal.domain.errors import ConfigError
from shoal.protocols.seam.endpoints import (
    DiscoveredService,
    Listener,
    ListenerTls,
    OutgoingConnection,
    ServiceBrowser,
    ServiceRecord,
)
from shoal.protocols.seam.peer_session import PeerSession
from shoal.protocols.seam.protocol import Endpoint
from shoal.protocols.seam.session import Send
from shoal.transports.clock import LoopClock
from shoal.transports.dialer import connect_tcp
from shoal.transports.driver import ConnectionEnd, Driver
from shoal.transports.link import Link, LinkClosed
from store.in_memory import memory_store
from transports.certificates import issue
from transports.links import ended
from transports.memory_links import ScriptedSession

kinds = (f"_reach{number}x{id(object()) % 9999}._tcp" for number in count())


@dataclass
class Host:
    """Serves connections, and can disconnect them all."""

    drivers: list[Driver[Any, Any]] = field(default_factory=list)
    opened: "asyncio.Queue[str]" = field(default_factory=asyncio.Queue)

    async def serve(self, wire: str, session: PeerSession, link: Link) -> ConnectionEnd:
        driver = Driver[Any, Any](session, link, LoopClock(), lambda heard: None)
        self.drivers.append(driver)
        self.opened.put_nowait(wire)
        try:
            return await driver.run()
        finally:
            self.drivers.remove(driver)

    def hang_up(self) -> None:
        for driver in self.drivers:
            driver.disconnect("stopping")


def greeting(now: float) -> Any:
    return ScriptedSession(opening=[Send(b"hello")])


def echoing(address: str, now: float) -> Any:
    return ScriptedSession(lambda data: [Send(data)])


def cursing(address: str, now: float) -> Any:
    raise AssertionError("nobody barred gets as far as this")


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with asyncio.timeout(PATIENCE):
        yield Host()


async def means(host: Host) -> NetworkContext:
    clock = LoopClock()
    async with memory_store() as store:  # the test writes nothing to it
        admission = WorkerAdmission(
            await load_join_tokens(store.keys), store.keys, clock
        )
    return NetworkContext(host.serve, admission, clock, Random(1), "127.0.0.1")


@asynccontextmanager
async def echo(host: Host, port: int = 0) -> AsyncIterator[int]:
    async with open_network(
        [("wire", Listener(port, echoing))], await means(host)
    ) as ports:
        yield ports["wire"]["tcp"]
        host.hang_up()


async def test_listener_serves_connections_and_reports_its_port(host: Host) -> None:
    async with echo(host) as port, connect_tcp(f"tcp://127.0.0.1:{port}") as link:
        assert await host.opened.get() == "wire"
        await link.send(b"hello")
        assert await link.receive() == [b"hello"]


async def test_port_that_is_taken_names_the_flag(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"used by .* choose another --wire-port"):
            async with echo(host, port):
                pass


async def test_tls_listener_requires_a_certificate(host: Host, tmp_path: Path) -> None:
    certificate = issue(tmp_path)
    endpoints = [
        ("wire", Listener(0, echoing)),
        ("wire", Listener(0, echoing, security=ListenerTls.COORDINATOR)),
    ]
    plain = await means(host)
    async with open_network(endpoints, plain) as ports:
        assert ports["wire"].keys() == {"tcp"}
    async with open_network(
        endpoints, replace(plain, tls=certificate.presented)
    ) as ports:
        url = f"tls://127.0.0.1:{ports['wire']['tls']}"
        async with connect_tcp(url, fingerprint=certificate.fingerprint) as link:
            await link.send(b"hello")
            assert await link.receive() == [b"hello"]
            host.hang_up()


async def test_guessing_address_is_disconnected(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shoal.coordinator.auth_throttle.is_loopback", lambda address: False
    )
    given = await means(host)
    for _ in range(BLOCK_AFTER):
        given.throttle.failed("127.0.0.1")
    async with (
        open_network([("wire", Listener(0, cursing))], given) as ports,
        connect_tcp(f"tcp://127.0.0.1:{ports['wire']['tcp']}") as link,
    ):
        with pytest.raises(LinkClosed):
            await link.receive()

    assert host.opened.empty()


async def test_peer_is_dialled_again_after_an_absence(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shoal.peers.outbound.RETRY_FIRST", 0.01)
    async with echo(host) as port:
        pass
    ours = Host()
    call = OutgoingConnection(f"tcp://127.0.0.1:{port}", greeting)
    with caplog.at_level(logging.WARNING):
        async with open_network([("wire", call)], await means(ours)) as ports:
            assert ports == {}
            for _ in range(2):
                async with echo(host, port):
                    assert await ours.opened.get() == "wire"
                    assert await host.opened.get() == "wire"
            ours.hang_up()

    assert caplog.text.count("connection refused") <= 3


async def test_discovered_peer_is_dialled(host: Host) -> None:
    kind, ours = next(kinds), Host()

    def meet(sighting: DiscoveredService, now: float) -> OutgoingConnection | None:
        assert sighting.text == {"id": "1"}
        return OutgoingConnection(
            f"tcp://{sighting.addresses[0]}:{sighting.port}", greeting
        )

    here = replace(await means(host), addresses=lambda host: ("127.0.0.1",))
    away = replace(here, serve=ours.serve)
    service = ServiceRecord(kind, "studio", {"id": "1"})
    async with (
        open_network([("wire", Listener(0, echoing, service))], here),
        open_network([("wire", ServiceBrowser(kind, meet))], away),
    ):
        assert await ours.opened.get() == "wire"
        assert await host.opened.get() == "wire"
        ours.hang_up()
        host.hang_up()


async def test_open_connections_are_closed_at_the_end(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT", 0.0)
    monkeypatch.setattr("shoal.transports.tcp_server.CLOSE_GRACE", 0.0)
    ours = Host()
    async with open_network(
        [("wire", Listener(0, echoing))], await means(host)
    ) as ports:
        url = f"tcp://127.0.0.1:{ports['wire']['tcp']}"
        async with open_network(
            [("wire", OutgoingConnection(url, greeting))], await means(ours)
        ):
            await ours.opened.get()
            await host.opened.get()

    assert ours.drivers == host.drivers == []


async def test_failed_start_leaves_no_open_port(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        endpoints = [
            ("one", Listener(0, echoing)),
            ("other", Listener(port, echoing)),
        ]
        refused = pytest.RaisesExc(ConfigError, match="--other-port")
        with pytest.RaisesGroup(refused):
            async with open_network(endpoints, await means(host)):
                pass


@dataclass
class ScriptedPolicy:
    """Decides as scripted, and records failed connections."""

    seconds: float | None
    failures: list[str] = field(default_factory=list)

    def delay(self, address: str, now: float) -> float | None:
        return self.seconds

    def failed(self, address: str, now: float) -> None:
        self.failures.append(address)


async def test_each_listener_has_a_certificate_of_its_own(
    host: Host,
) -> None:
    endpoints = [
        ("wire", Listener(0, echoing, security=ListenerTls.SELF_SIGNED, label=label))
        for label in ("heartbeat", "transport")
    ]
    seen = []
    async with open_network(endpoints, await means(host)) as ports:
        assert ports["wire"].keys() == {"heartbeat", "transport"}
        for port in ports["wire"].values():
            async with connect_tcp(f"tls-any://127.0.0.1:{port}") as link:
                await link.send(b"hello")
                assert await link.receive() == [b"hello"]
                tls = link.transport.get_extra_info("ssl_object")
                seen.append(tls.getpeercert(binary_form=True))
        host.hang_up()

    assert len({*seen}) == 2


async def test_policy_delays_a_connection_before_reading(
    host: Host,
) -> None:
    listener = Listener(
        0, echoing, gate=ScriptedPolicy(0.2), security=ListenerTls.SELF_SIGNED
    )
    async with open_network([("wire", listener)], await means(host)) as ports:
        url = f"tls-any://127.0.0.1:{ports['wire']['own tls']}"
        before = asyncio.get_running_loop().time()
        async with connect_tcp(url) as link:
            assert asyncio.get_running_loop().time() - before >= 0.2
            await link.send(b"hello")
            assert await link.receive() == [b"hello"]
            host.hang_up()


async def test_policy_rejects_a_connection_before_its_handshake(
    host: Host,
) -> None:
    gate = ScriptedPolicy(None)
    listener = Listener(0, cursing, gate=gate, security=ListenerTls.SELF_SIGNED)
    async with open_network([("wire", listener)], await means(host)) as ports:
        with pytest.raises(LinkClosed):
            async with connect_tcp(f"tls-any://127.0.0.1:{ports['wire']['own tls']}"):
                pass

    assert host.opened.empty()
    assert gate.failures == []  # it was not accepted, so it did not fail either


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b""])
async def test_policy_learns_of_failed_handshakes(host: Host, said: bytes) -> None:
    gate = ScriptedPolicy(0.0)
    listener = Listener(
        0, cursing, gate=gate, security=ListenerTls.SELF_SIGNED, tls_timeout=0.2
    )
    async with (
        open_network([("wire", listener)], await means(host)) as ports,
        connect_tcp(f"tcp://127.0.0.1:{ports['wire']['own tls']}") as link,
    ):
        if said:
            await link.send(said)
        await ended(link)

    assert gate.failures == ["127.0.0.1"]


async def test_fallback_port_is_used_if_the_default_is_taken(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []
    caplog.set_level(logging.INFO, "shoal")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listener = Listener(port, echoing, falls_back=True, on_bound=told.append)
        async with open_network([("wire", listener)], await means(host)) as ports:
            assert ports["wire"]["tcp"] == told[0] != port

    assert caplog.messages == [
        f"ports are in use, listening on others: {told[0]} for {port}"
    ]


async def test_port_that_is_taken_names_the_flag_that_sets_it(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listener = Listener(taken.getsockname()[1], echoing, flag="--wire-some-port")
        with pytest.raises(ConfigError, match="choose another --wire-some-port"):
            async with open_network([("wire", listener)], await means(host)):
                pass


async def test_host_that_cannot_be_bound_is_not_blamed_on_the_port_alone(
    host: Host,
) -> None:
    elsewhere = replace(await means(host), host="192.0.2.1")
    with pytest.raises(ConfigError, match="or host to listen on"):
        async with open_network([("wire", Listener(0, echoing))], elsewhere):
            pass


async def test_hidden_listener_neither_announces_nor_browses(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.app.network.local_network", cursing)
    given = replace(await means(host), addresses=lambda host: ("127.0.0.1",))
    endpoints: list[tuple[str, Endpoint]] = [
        ("wire", Listener(0, echoing, ServiceRecord("_hidden._tcp", "studio", {}))),
        ("wire", ServiceBrowser("_hidden._tcp", lambda sighting, now: None)),
    ]
    async with open_network(endpoints, replace(given, hidden=True)) as ports:
        async with connect_tcp(f"tcp://127.0.0.1:{ports['wire']['tcp']}") as link:
            await link.send(b"hello")
            assert await link.receive() == [b"hello"]
        host.hang_up()
