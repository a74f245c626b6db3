"""A machine that sleeps is woken by a neighbour, over a network of its own."""

import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from live.machines import two_machines
from live.programs import PATIENCE, TINY, eventually
from live.sites import Site
from models.tiny_answers import ANSWERS
from shoal.worker.magic_packets import PORT, magic_packet

EVERYWHERE = ("--host", "0.0.0.0", "--no-discovery")


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Site, Site]]:
    with two_machines() as machines:
        one, other = (Site(machine, tmp_path) for machine in machines)
        try:
            yield one, other
        finally:
            one.programs.close()
            other.programs.close()


def hardware_address(place: Site) -> str:
    """Return the address of a machine's cable."""
    show = ["ip", "-n", place.machine.name, "-br", "link", "show", place.machine.cable]
    return subprocess.run(show, capture_output=True, text=True).stdout.split()[2]


def test_a_request_wakes_the_machine_that_has_its_model(
    places: tuple[Site, Site],
) -> None:
    one, other = places
    pool = one.serve(*EVERYWHERE)
    one.join(pool.url, "--name", "awake", "--wake", "--model", f"here={TINY}").event(
        "joined"
    )
    flags = (pool.url, "--name", "asleep", "--wake", "--model", f"tiny={TINY}")
    sleeper = other.join(*flags)
    sleeper.event("joined")
    eventually(lambda: "tiny" in one.models(pool), "its model is known")
    with other.machine.inside():
        card = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        card.bind(("", PORT))
        card.settimeout(PATIENCE)

    with card, ThreadPoolExecutor(1) as asking:
        sleeper.kill()  # it says nothing, as a machine that falls asleep
        eventually(lambda: "tiny" not in one.models(pool), "it is away")
        answer = asking.submit(one.ask, pool, "ping", "tiny")
        packet = card.recv(1024)
        assert packet == magic_packet(hardware_address(other))
        other.join(*flags)

        assert answer.result(PATIENCE) == ANSWERS["ping"]
