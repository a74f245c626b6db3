"""The choice among coordinators of the local network."""

import asyncio
import os

import pytest

from shoal.cli.worker import lan_discovery
from shoal.cli.worker.lan_discovery import find_lan_coordinator, only_coordinator
from shoal.domain.errors import ConfigError
from shoal.protocols.seam.endpoints import DiscoveredService, ServiceRecord
from shoal.transports import mdns

KIND = f"_shoal-{os.getpid()}._tcp"  # of this process alone
OURS = {"shoal": "0.2"}
GONE = "connection refused"


def sighting(
    name: str, *addresses: str, text: dict[str, str] = OURS
) -> DiscoveredService:
    return DiscoveredService(name, addresses or ("192.0.2.7",), 4011, text)


@pytest.mark.parametrize(
    ("addresses", "url"),
    [
        (("192.0.2.7",), "http://192.0.2.7:4011"),
        (("2001:db8::1", "192.0.2.7"), "http://192.0.2.7:4011"),
        (("2001:db8::1",), "http://[2001:db8::1]:4011"),
        (("fe80::1%eth0",), "http://[fe80::1%25eth0]:4011"),
    ],
    ids=["IPv4", "both versions", "IPv6", "with a zone"],
)
def test_addresses_are_formatted_as_join_urls(
    addresses: tuple[str, ...], url: str
) -> None:
    seen = [sighting("one", *addresses), sighting("two", "192.0.2.9")]

    with pytest.raises(ConfigError) as caught:
        only_coordinator(seen, secure=False, local_error=GONE)

    assert f"  shoal join {url}  # one" in str(caught.value).splitlines()


@pytest.mark.parametrize("secure", [False, True])
def test_only_coordinator_is_selected(secure: bool) -> None:
    tls = sighting("tls", text={**OURS, "tls": "1"})
    plain = sighting("plain", "192.0.2.8")
    seen = [tls, plain] if secure else [plain]

    assert only_coordinator(seen, secure=secure, local_error=GONE) is seen[0]


def test_token_with_a_fingerprint_is_not_sent_without_tls() -> None:
    with pytest.raises(ConfigError, match="with a certificate") as caught:
        only_coordinator([sighting("one")], secure=True, local_error=GONE)

    assert "shoal join http://192.0.2.7:4011  # one" in str(caught.value)


def test_several_coordinators_are_an_error_that_lists_them() -> None:
    seen = [sighting("two", "192.0.2.8"), sighting("o\x1bne")]

    with pytest.raises(ConfigError) as caught:
        only_coordinator(seen, secure=False, local_error=GONE)

    assert str(caught.value).splitlines()[1:] == [
        "  shoal join http://192.0.2.7:4011  # o\\x1bne",
        "  shoal join http://192.0.2.8:4011  # two",
    ]


def test_error_without_a_coordinator_has_a_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        only_coordinator([], secure=False, local_error=GONE)

    for said in (GONE, "within 10 s", "shoal serve", "shoal join http"):
        assert said in str(caught.value)


async def test_missing_network_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lan_discovery, "addresses_of", lambda host: ())

    with pytest.raises(ConfigError, match="no address on a network with multicast"):
        await find_lan_coordinator(KIND, secure=False, local_error=GONE)


async def test_announced_coordinator_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lan_discovery, "BROWSE_TIME", 0.1)
    monkeypatch.setattr(lan_discovery, "addresses_of", lambda host: ("127.0.0.1",))
    async with (
        mdns.local_network(["127.0.0.1"]) as network,
        await asyncio.start_server(_hang_up, "127.0.0.1", 0) as server,
    ):
        port: int = server.sockets[0].getsockname()[1]
        await network.announce(ServiceRecord(KIND, "one", OURS), port)

        url = await find_lan_coordinator(KIND, secure=False, local_error=GONE)

    assert url == f"http://127.0.0.1:{port}"


def _hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def test_reachable_address_is_joined() -> None:
    async with await asyncio.start_server(_hang_up, "127.0.0.3", 0) as server:
        port: int = server.sockets[0].getsockname()[1]
        one = DiscoveredService("one", ("::1", "127.0.0.2", "127.0.0.3"), port, OURS)

        assert await lan_discovery._reachable_url(one) == f"http://127.0.0.3:{port}"

    with pytest.raises(ConfigError, match="firewall") as caught:
        await lan_discovery._reachable_url(one)
    assert f"http://127.0.0.2:{port}" in str(caught.value)
