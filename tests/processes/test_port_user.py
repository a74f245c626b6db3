"""Naming the program that uses a port."""

import os
import socket
import sys
from pathlib import Path

import pytest

from harness.ports import free_port
from shoal.processes.programs import port_user

ON_LINUX = sys.platform == "linux"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_listener_of_a_port_is_named(family: socket.AddressFamily) -> None:
    with socket.create_server(
        ("::1", 0) if family == socket.AF_INET6 else ("127.0.0.1", 0), family=family
    ) as server:
        user = port_user(server.getsockname()[1])

    assert user is None or user.endswith(f"process {os.getpid()}")
    assert (user is not None) == ON_LINUX


def test_a_free_port_has_no_user() -> None:
    assert port_user(free_port()) is None


def test_unknown_user_is_none(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert port_user(server.getsockname()[1], proc=tmp_path) is None
