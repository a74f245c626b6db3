"""How ranks of a run meet that are on one machine, or on several."""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import psutil
import pytest

from harness.speed import scaled
from shoal.training import meeting
from shoal.training.meeting import join_run
from training.run_server import RunServer, serving

LIMIT = scaled(60.0)  # seconds


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


def test_lowest_rank_that_is_left_is_the_writer() -> None:
    """A script that has asked goes on without rank 0, though files are wanted."""
    script = Path(__file__).parent / "scripts" / "ask_for_writer.py"
    with serving(3) as server, ExitStack() as stack:
        ranks = []
        for rank in range(3):
            process = subprocess.Popen(
                [sys.executable, str(script)],
                env={**server.environment(rank), "SHOAL_RUN_OUTPUT": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        printed = [each.communicate(timeout=LIMIT)[0] for each in ranks]

    assert [each.returncode for each in ranks] == [1, 0, 0]
    assert printed == ["", "False False True\n", "False False False\n"]


@pytest.mark.parametrize(("rank", "writes"), [("", True), ("0", True), ("1", False)])
def test_process_without_a_run_is_the_writer_by_its_rank(
    monkeypatch: pytest.MonkeyPatch, rank: str, writes: bool
) -> None:
    monkeypatch.setattr(meeting, "_groups", [])
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)

    assert meeting.is_writer() is writes
