"""Machines of their own for a test: network namespaces of Linux, joined by a cable."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000  # linux/sched.h
NAMESPACES = Path("/run/netns")
MISSING = (
    "tests with machines of their own need Linux, root and iproute2: run `make test` "
    "as root, in a container for example"
)


class Machine:
    """A network namespace with an interface and an address.

    Processes, threads and sockets that are made ``inside`` are on that machine; else it
    is like this one.
    """

    def __init__(self, name: str, cable: str, address: str) -> None:
        self.name = name
        self.cable = cable
        self.address = address

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Be on this machine for the length of the block, with this thread."""
        with Path("/proc/thread-self/ns/net").open() as home:
            _enter(NAMESPACES / self.name)
            try:
                yield
            finally:
                _move(home.fileno())

    def ip(self, *arguments: str) -> None:
        """Change the machine's network."""
        run("-n", self.name, *arguments)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Give two machines on one cable, which nobody else is on.

    Fails the test where that cannot be.
    """
    if sys.platform != "linux" or os.geteuid() or shutil.which("ip") is None:
        pytest.fail(MISSING)
    number = os.getpid() % 100_000
    one, other = (
        Machine(f"shoal{number}{end}", f"sh{number}{end}", f"10.77.0.{place}")
        for place, end in enumerate("ab", start=1)
    )
    try:
        for machine in (one, other):
            run("netns", "add", machine.name)
        run(
            *("link", "add", one.cable, "netns", one.name, "type", "veth"),
            *("peer", "name", other.cable, "netns", other.name),
        )
        for machine in (one, other):
            machine.ip("link", "set", "lo", "up")
            machine.ip("link", "set", machine.cable, "up")
            machine.ip("addr", "add", f"{machine.address}/24", "dev", machine.cable)
        yield one, other
    finally:
        for machine in (one, other):
            with suppress(AssertionError):  # it was not made
                run("netns", "del", machine.name)


def run(*arguments: str) -> None:
    """Run ``ip``."""
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}{MISSING}"


def _enter(namespace: Path) -> None:
    with namespace.open() as file:
        _move(file.fileno())


def _move(descriptor: int) -> None:
    """Move this thread to a network namespace: setns(2), which Python has from 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
