"""How ranks of a run meet that are on one machine, or on several."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import psutil
import pytest

from shoal.training.meeting import join_run
from training.run_server import RunServer, serving

LIMIT = 60.0  # seconds


def train(server: RunServer, rank: int, master: str) -> float:
    variables = {
        **server.environment(rank),
        "MASTER_ADDR": master,
        "MASTER_PORT": "29500",
    }
    with closing(join_run(environment=variables)) as group:
        total = group.all_reduce(np.ones(3, np.float32))
        assert group.place.rank == rank
        return float(total[0])


def network_addresses() -> list[str]:
    """Return addresses of this machine that are not loopback ones."""
    return [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    ]


def both(masters: list[str]) -> list[float]:
    with serving(2) as server, ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(train, server, *each) for each in enumerate(masters)]
        return [each.result(LIMIT) for each in ranks]


def test_ranks_on_one_machine_meet_over_loopback() -> None:
    assert both(["127.0.0.1", "127.0.0.1"]) == [2.0, 2.0]


@pytest.mark.parametrize("first", ["127.0.0.1", ""], ids=["coordinator's", "any"])
def test_ranks_elsewhere_reach_all_machines_encrypted(first: str) -> None:
    elsewhere = (network_addresses() or ["127.0.0.1"])[0]

    # Rank 0 has joined the coordinator over loopback; the other one has not.
    assert both([first or elsewhere, elsewhere]) == [2.0, 2.0]
