"""Coordinators of one fleet discover each other, and detect a loss."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.speed import scaled
from live.machines import two_machines
from live.programs import Pool, Programs, eventually
from live.sites import Site

FLEET = ("--macfleet-token", "5d0e93b7a1c84f26d9e1")
PORTS = ("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0")
PATIENCE = scaled(90.0)  # seconds: a node that has failed is asked every 30


@pytest.fixture
def other_programs(tmp_path: Path) -> Iterator[Programs]:
    running = Programs(tmp_path / "other")
    yield running
    running.close()


def nodes(pool: Pool) -> dict[str, dict[str, Any]]:
    """Return a coordinator's view of its fleet, by name."""
    return {each["name"]: each for each in pool.admin("nodes")["data"]}


def state(pool: Pool, name: str) -> str | None:
    found = nodes(pool).get(name)
    return None if found is None else found["state"]


def heartbeats(pool: Pool) -> str:
    port: int = pool.ready["ports"]["macfleet_heartbeat"]
    return f"127.0.0.1:{port}"


@pytest.mark.parametrize("flags", [FLEET, ("--macfleet-open",)], ids=["secure", "open"])
def test_coordinators_discover_each_other_and_detect_departures(
    programs: Programs, other_programs: Programs, flags: tuple[str, ...]
) -> None:
    one = programs.serve("--name", "one", *PORTS, *flags)
    place = heartbeats(one)
    other = other_programs.serve(
        *("--name", "other", *PORTS, "--macfleet-peers", place, *flags)
    )
    eventually(lambda: state(other, "one") == "alive", "it is found")

    found = nodes(other)
    assert found["one"]["address"] == place
    assert found["other"]["state"] == "here"
    assert [each["coordinator"] for each in found.values()].count(True) == 1
    assert sorted(each["rank"] for each in found.values()) == [0, 1]

    one.program.kill()
    eventually(lambda: state(other, "one") == "failed", "it has gone", PATIENCE)
    assert nodes(other)["one"]["rank"] is None

    port = ("--macfleet-heartbeat-port", place.rpartition(":")[2])
    programs.serve("--name", "one", *PORTS, *port, *flags)
    eventually(lambda: state(other, "one") == "alive", "it is back", PATIENCE)


def test_node_with_another_token_is_excluded(
    programs: Programs, other_programs: Programs
) -> None:
    one = programs.serve("--name", "one", *PORTS, *FLEET)
    stranger = other_programs.serve(
        *("--name", "stranger", *PORTS, "--macfleet-peers", heartbeats(one)),
        *("--macfleet-token", "another token"),
    )
    eventually(lambda: state(stranger, "") == "no answer", "it is refused")

    assert "does it have this fleet's token?" in nodes(stranger)[""]["remark"]
    assert nodes(one) == {}


def test_machines_of_a_fleet_discover_each_other(tmp_path: Path) -> None:
    everywhere = ("--host", "0.0.0.0", *FLEET)
    with two_machines() as machines:
        one, other = (Site(machine, tmp_path) for machine in machines)
        try:
            pools = [place.serve(*everywhere) for place in (one, other)]
            check_found(one, pools[0], other)
            check_found(other, pools[1], one)
        finally:
            one.programs.close()
            other.programs.close()


def check_found(place: Site, pool: Pool, there: Site) -> None:
    """Check that a coordinator has found the one of another machine."""
    name = there.machine.name
    with place.machine.inside():
        eventually(lambda: state(pool, name) == "alive", "it is found")
        address = nodes(pool)[name]["address"]
        assert address == f"{there.machine.address}:50051"
