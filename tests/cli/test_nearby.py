"""Which coordinator of the local network is meant."""

import asyncio

import pytest

from shoal.cli import nearby
from shoal.cli.nearby import the_one, the_one_nearby
from shoal.domain.errors import ConfigError
from shoal.protocols.crowd import Service, Sighting
from shoal.transports import bonjour

KIND = "_shoal-test._tcp"
OURS = {"shoal": "0.2"}
GONE = "connection refused"


def sighting(name: str, *addresses: str, text: dict[str, str] = OURS) -> Sighting:
    return Sighting(name, addresses or ("192.0.2.7",), 4011, text)


@pytest.mark.parametrize(
    ("addresses", "url"),
    [
        (("192.0.2.7",), "tcp://192.0.2.7:4011"),
        (("2001:db8::1", "192.0.2.7"), "tcp://192.0.2.7:4011"),
        (("2001:db8::1",), "tcp://[2001:db8::1]:4011"),
        (("fe80::1%eth0",), "tcp://[fe80::1%25eth0]:4011"),
    ],
    ids=["IPv4", "both versions", "IPv6", "with a zone"],
)
def test_an_address_is_written_as_it_is_joined(
    addresses: tuple[str, ...], url: str
) -> None:
    seen = [sighting("one", *addresses), sighting("two", "192.0.2.9")]

    with pytest.raises(ConfigError) as caught:
        the_one(seen, secure=False, why_not_here=GONE)

    assert f"  shoal join {url}  # one" in str(caught.value).splitlines()


def test_the_only_coordinator_is_meant() -> None:
    mac, one = sighting("a Mac", text={"deviceID": "X"}), sighting("one", "192.0.2.8")

    assert the_one([mac, one], secure=False, why_not_here=GONE) is one


def test_a_token_that_names_a_certificate_goes_to_nobody_who_has_none() -> None:
    with pytest.raises(ConfigError, match="has a certificate") as caught:
        the_one([sighting("one")], secure=True, why_not_here=GONE)

    assert "shoal join https://192.0.2.7:PORT  # one" in str(caught.value)


def test_of_several_coordinators_none_is_meant_and_all_are_named() -> None:
    seen = [sighting("two", "192.0.2.8"), sighting("o\x1bne")]

    with pytest.raises(ConfigError) as caught:
        the_one(seen, secure=False, why_not_here=GONE)

    assert str(caught.value).splitlines()[1:] == [
        "  shoal join tcp://192.0.2.7:4011  # o\\x1bne",
        "  shoal join tcp://192.0.2.8:4011  # two",
    ]


def test_where_there_is_none_it_is_said_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        the_one([], secure=False, why_not_here=GONE)

    for said in (GONE, "within 3 s", "shoal serve", "shoal join http"):
        assert said in str(caught.value)


async def test_without_a_network_it_is_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nearby, "addresses_of", lambda host: ())

    with pytest.raises(ConfigError, match="no address on a network with multicast"):
        await the_one_nearby(KIND, secure=False, why_not_here=GONE)


async def test_a_coordinator_that_is_announced_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nearby, "LOOK_FOR", 2.0)
    monkeypatch.setattr(nearby, "addresses_of", lambda host: ("127.0.0.1",))
    async with (
        bonjour.local_network(["127.0.0.1"]) as network,
        await asyncio.start_server(_hang_up, "127.0.0.1", 0) as server,
    ):
        port: int = server.sockets[0].getsockname()[1]
        await network.announce(Service(KIND, "one", OURS), port)

        url = await the_one_nearby(KIND, secure=False, why_not_here=GONE)

    assert url == f"tcp://127.0.0.1:{port}"


def _hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def test_of_a_coordinators_addresses_one_that_answers_is_joined() -> None:
    async with await asyncio.start_server(_hang_up, "127.0.0.3", 0) as server:
        port: int = server.sockets[0].getsockname()[1]
        one = Sighting("one", ("::1", "127.0.0.2", "127.0.0.3"), port, OURS)

        assert await nearby._answering(one) == f"tcp://127.0.0.3:{port}"

    with pytest.raises(ConfigError, match="firewall") as caught:
        await nearby._answering(one)
    assert f"tcp://127.0.0.2:{port}" in str(caught.value)
