"""Copies of models between machines of one network, whose coordinator is elsewhere."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from live.machines import run, two_networks
from live.programs import TINY, TOKEN
from live.sites import Site

SIZE = 192 << 20  # bytes


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Site, Site]]:
    """A machine, and one on another network, between which a router passes packets."""
    with two_networks() as (one, middle, other):
        forward = "sysctl", "-qw", "net.ipv4.ip_forward=1"
        run("netns", "exec", middle.name, *forward)
        one.ip("route", "add", "default", "via", one.peer_address)
        other.ip("route", "add", "default", "via", other.peer_address)
        here, there = Site(one, tmp_path), Site(other, tmp_path)
        try:
            yield here, there
        finally:
            here.programs.close()
            there.programs.close()


def received(place: Site) -> int:
    """Return the bytes that a machine has received over its cable."""
    with place.machine.inside():
        # Of the thread's own network: /sys is that of where it was mounted.
        counts = Path("/proc/thread-self/net/dev").read_text()
    (line,) = [line for line in counts.splitlines() if place.machine.cable in line]
    return int(line.partition(":")[2].split()[0])


def test_a_model_of_a_neighbour_stays_on_its_network(
    places: tuple[Site, Site], tmp_path: Path
) -> None:
    here, there = places
    model = tmp_path / "anna" / "models" / "big"
    model.mkdir(parents=True)
    shutil.copy(TINY, model / "tiny.gguf")
    (model / "mmproj-tiny.gguf").write_bytes(os.urandom(SIZE))  # it is not loaded
    pool = there.serve("--host", "0.0.0.0", "--no-discovery")
    url = f"http://{there.machine.address}:{pool.port}"
    flags = ("--name", "anna", "--load", "local", "--data-dir", str(tmp_path / "anna"))
    here.join(url, *flags).event("joined")
    before = received(here)

    with here.machine.inside():
        copies = str(tmp_path / "copies")
        source = ("--from", url, "--token", TOKEN, "--to", copies)
        get = here.programs.run("models", "get", "big", *source)
        assert get.wait() == 0, get.errors

    copied = tmp_path / "copies" / "big" / "mmproj-tiny.gguf"
    assert copied.read_bytes() == (model / "mmproj-tiny.gguf").read_bytes()
    assert received(here) - before < SIZE // 4  # before it knew of its neighbour
