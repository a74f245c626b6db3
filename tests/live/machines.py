"""Machines of their own for a test: network namespaces of Linux, joined by a cable."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from harness.fork_server import enter_network

NAMESPACES = Path("/run/netns")
MISSING = (
    "tests with machines of their own need Linux, root and iproute2: run `make test` "
    "as root, in a container for example"
)


class Machine:
    """A network namespace, which has an interface and an address once it is plugged in.

    Processes, threads and sockets that are made ``inside`` are on that machine; else it
    is like this one.  ``peer_address`` is the address at the cable's other end.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.cable = ""
        self.address = ""
        self.peer_address = ""

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Move this thread to the machine within the block."""
        with Path("/proc/thread-self/ns/net").open() as home:
            _enter(NAMESPACES / self.name)
            try:
                yield
            finally:
                enter_network(home.fileno())

    def ip(self, *arguments: str) -> None:
        """Change the machine's network."""
        run("-n", self.name, *arguments)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Yield two machines on a cable of their own.

    Fails the test where that cannot be.
    """
    with _machines("ab") as (one, other):
        _plug(one, other, "10.77.0")
        yield one, other


@contextmanager
def two_networks() -> Iterator[tuple[Machine, Machine, Machine]]:
    """Yield two machines, and between them one on a cable to each.

    It passes nothing on: the outer two have no way to each other.  Its own address is
    that on the first one's cable; to the last one it is that one's ``peer_address``.

    Fails the test where that cannot be.
    """
    with _machines("abc") as (one, middle, other):
        _plug(other, middle, "10.77.2")
        _plug(one, middle, "10.77.1")
        yield one, middle, other


@contextmanager
def _machines(letters: str) -> Iterator[list[Machine]]:
    if sys.platform != "linux" or os.geteuid() or shutil.which("ip") is None:
        pytest.fail(MISSING)
    number = os.getpid() % 100_000
    machines = [Machine(f"shoal{number}{letter}") for letter in letters]
    try:
        for machine in machines:
            run("netns", "add", machine.name)
            machine.ip("link", "set", "lo", "up")
        yield machines
    finally:
        for machine in machines:
            with suppress(AssertionError):  # it was not made
                run("netns", "del", machine.name)


def _plug(one: Machine, other: Machine, network: str) -> None:
    """Join two machines by a cable, on a network of its own."""
    names = [f"{one.name}-{other.name[-1]}", f"{other.name}-{one.name[-1]}"]
    run(
        *("link", "add", names[0], "netns", one.name, "type", "veth"),
        *("peer", "name", names[1], "netns", other.name),
    )
    for place, machine in enumerate((one, other), start=1):
        machine.cable = names[place - 1]
        machine.address = f"{network}.{place}"
        machine.peer_address = f"{network}.{3 - place}"
        machine.ip("link", "set", machine.cable, "up")
        machine.ip("addr", "add", f"{machine.address}/24", "dev", machine.cable)


def run(*arguments: str) -> None:
    """Run ``ip``."""
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}{MISSING}"


def _enter(namespace: Path) -> None:
    with namespace.open() as file:
        enter_network(file.fileno())
