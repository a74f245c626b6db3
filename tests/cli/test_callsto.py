"""For whom functions are called, by which wire."""

from pathlib import Path

import pytest

from cli.coordinators import ORIGINAL, Sites
from shoal.cli import whereto
from shoal.cli.callsto import target_of_calls
from shoal.cli.fleet_files import keep_fleet
from shoal.cli.whereto import direct_now
from shoal.domain.errors import ConfigError
from shoal.protocols import discover

PORTS = {"direct": {"macfleet": {"transport": 50052, "heartbeat": 50051}}}
HEALTH = {"status": "ok", "shoal": "0.2", **PORTS}


@pytest.mark.parametrize("token", ["", "a-long-token"])
@pytest.mark.parametrize(
    ("label", "scheme"), [("transport", "tls-any"), ("transport:tcp", "tcp")]
)
async def test_coordinator_of_ours_is_joined_at_its_port_for_functions(
    sites: Sites, tmp_path: Path, token: str, label: str, scheme: str
) -> None:
    ports = {"direct": {"macfleet": {label: 50052, "heartbeat": 50051}}}
    url = await sites({"/healthz": {**HEALTH, **ports}})

    there = await target_of_calls(url, "auto", token, tmp_path)

    assert (there.url, there.token) == (url, token)
    assert there.protocol.name == "macfleet"
    assert there.direct == f"{scheme}://127.0.0.1:50052"


async def test_coordinator_that_is_away_is_asked_when_it_is_back(
    sites: Sites, tmp_path: Path
) -> None:
    there = await target_of_calls("http://127.0.0.1:1", "auto", "", tmp_path)

    assert there.protocol.name == "macfleet"
    assert there.direct == "tcp://127.0.0.1:4010"


async def test_any_peer_is_joined_by_a_wire_that_is_named(tmp_path: Path) -> None:
    there = await target_of_calls("192.0.2.7:50051", "macfleet", "secret", tmp_path)

    assert (there.url, there.token) == ("192.0.2.7:50051", "secret")
    assert there.direct == ""


@pytest.mark.parametrize(
    ("url", "name", "dialled", "token"),
    [
        ("192.0.2.7:1", "", "192.0.2.7:1", "kept token"),
        ("192.0.2.7:1", "lab 7", "192.0.2.7:1?fleet=lab+7", "kept token"),
        ("tls-any://h:1?fleet=lab", "lab", "tls-any://h:1?fleet=lab", "kept token"),
        ("192.0.2.7:1?fleet=other", "lab", "192.0.2.7:1?fleet=other", ""),
        ("tcp://192.0.2.7:1", "lab", "tcp://192.0.2.7:1", ""),
    ],
)
async def test_peer_is_joined_with_the_fleet_that_this_machine_was_let_into(
    tmp_path: Path, url: str, name: str, dialled: str, token: str
) -> None:
    fleets = discover()["macfleet"].fleets
    assert fleets is not None
    keep_fleet(tmp_path, fleets, "kept token", name)

    there = await target_of_calls(url, "macfleet", "", tmp_path)
    assert (there.url, there.token) == (dialled, token)

    given = await target_of_calls(url, "macfleet", "another token", tmp_path)
    assert (given.url, given.token) == (url, "another token")


async def test_peer_without_a_wire_is_an_error_that_names_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="for a peer with --wire macfleet"):
        await target_of_calls("tcp://192.0.2.7:4011", "auto", "", tmp_path)


async def test_coordinator_without_such_a_port_is_an_error(
    sites: Sites, tmp_path: Path
) -> None:
    url = await sites({"/healthz": {**HEALTH, "direct": {}}})

    with pytest.raises(ConfigError, match="has no port for those that call functions"):
        await target_of_calls(url, "auto", "", tmp_path)


async def test_coordinator_of_another_kind_calls_no_functions(
    sites: Sites, tmp_path: Path
) -> None:
    url = await sites({"/v1/health": ORIGINAL})

    with pytest.raises(ConfigError, match="calls no functions; leave out --tasks"):
        await target_of_calls(url, "auto", "", tmp_path)


async def test_coordinator_that_is_only_seen_nearby_has_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nearby(kind: str, *, secure: bool, why_not_here: str) -> str:
        return "tcp://192.0.2.7:4011"

    monkeypatch.setattr(whereto, "the_one_nearby", nearby)
    monkeypatch.setattr(whereto, "url_here", lambda folder: "http://127.0.0.1:1")

    with pytest.raises(ConfigError, match="give its address: shoal join http://HOST"):
        await target_of_calls("", "auto", "", tmp_path)


async def test_port_that_has_changed_is_asked_for(sites: Sites, tmp_path: Path) -> None:
    url = await sites({"/healthz": HEALTH})
    there = await target_of_calls(url, "auto", "", tmp_path)

    assert await direct_now(there) == "tls-any://127.0.0.1:50052"
