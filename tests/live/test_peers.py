"""Peers that an operator names without their wire."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from live.programs import Pool, Programs, eventually

PORTS = ("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0")
FLEET = ("--macfleet-token", "a token for the fleet")
WILDLIFE = ("--tealenet-passcode", "wildlife")
FLAGS = (*PORTS, *FLEET, *WILDLIFE, "--no-discovery", "--log-level", "info")


@pytest.fixture
def other_programs(tmp_path: Path) -> Iterator[Programs]:
    running = Programs(tmp_path / "other")
    yield running
    running.close()


def peers_of(pool: Pool, wire: str) -> list[str]:
    """Return the log lines of peers that joined on a wire."""
    lines = pool.program.errors.splitlines()
    return [line for line in lines if f"met peer='{wire}:" in line]


def test_each_peer_uses_its_own_wire(
    programs: Programs, other_programs: Programs
) -> None:
    one = programs.serve("--name", "one", *FLAGS)
    ports = one.ready["ports"]
    peers = [
        flag
        for wire in ("macfleet_heartbeat", "tealenet")
        for flag in ("--peer", f"127.0.0.1:{ports[wire]}")
    ]

    other = other_programs.serve("--name", "other", *FLAGS, *peers)

    for pool in (one, other):
        for wire in ("macfleet", "tealenet"):
            eventually(partial(peers_of, pool, wire), f"{wire} is met")
    # Nobody said to a heartbeat port what it takes for a guess at its token.
    assert "too many" not in one.program.errors
    assert "announced" not in one.program.errors + other.program.errors


def test_invalid_peer_address_error_names_the_flag(
    programs: Programs,
) -> None:
    serve = programs.start("--peer", "nowhere")

    assert serve.wait() != 0
    assert "--peer 'nowhere': expected HOST:PORT" in serve.errors
