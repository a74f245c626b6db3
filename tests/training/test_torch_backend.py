"""PyTorch's own launcher, scripts and backends, in processes of their own."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.speed import scaled
from training.run_server import serving

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT = scaled(240.0)  # seconds; a script fails by then
RANKS = 3

pytestmark = pytest.mark.long


def launch(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun."""
    command = (
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(RANKS), str(SCRIPTS / script), *arguments),
    )
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, check=False
    )


def losses(output: str) -> dict[str, float]:
    return {
        rank: float(loss)
        for rank, loss in re.findall(r"rank (\d) loss (\S+) hashes 1\n", output)
    }


def test_an_unchanged_script_trains_as_with_gloo() -> None:
    ours, gloo = launch("train_ddp.py", "shoal"), launch("train_ddp.py", "gloo")

    # Gloo's processes sometimes abort on exit, after their last line.
    assert ours.returncode == 0, ours.stderr
    assert losses(ours.stdout) == pytest.approx(losses(gloo.stdout), rel=1e-3)
    assert len(losses(ours.stdout)) == RANKS


def test_all_operations_of_the_backend() -> None:
    done = launch("all_operations.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("has done all") == RANKS


def test_models_train_with_compressed_gradients_and_with_diloco() -> None:
    done = launch("slow_links.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("has done all") == RANKS


def test_a_killed_rank_ends_the_others_with_the_cause() -> None:
    # Without a launcher, which would kill the others too.
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    ranks = []
    for rank in range(RANKS):
        variables = {
            **os.environ,
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            **{"RANK": str(rank), "WORLD_SIZE": str(RANKS)},
        }
        command = [
            sys.executable,
            str(SCRIPTS / "train_ddp.py"),
            "shoal",
            "killed",
            "7",
        ]
        ranks.append(
            subprocess.Popen(
                command,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    outputs = [each.communicate(timeout=LIMIT) for each in ranks]

    assert ranks[-1].returncode == -signal.SIGKILL
    for rank in range(RANKS - 1):
        assert ranks[rank].returncode == 1
        assert "GroupEnded: rank" in outputs[rank][1]
        assert "hashes" not in outputs[rank][0]


def test_an_unchanged_script_goes_on_without_a_killed_rank() -> None:
    killed = 0  # which has PyTorch's store, and whose buffers the others get
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(SCRIPTS / "survive_ddp.py"), str(killed)]
    with ExitStack() as stack, serving(RANKS) as server:
        ranks = []
        for rank in range(RANKS):
            process = subprocess.Popen(
                command,
                env={**server.environment(rank), **place},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)

        outputs = [each.communicate(timeout=LIMIT) for each in ranks]

    assert ranks.pop(killed).returncode == -signal.SIGKILL
    outputs.pop(killed)
    assert [each.returncode for each in ranks] == [0, 0], outputs
    assert len({output for output, _ in outputs}) == 1
    for output, errors in outputs:
        assert "counted 2 mean 1.0" in output
        assert f"needs all ranks, and ranks [{killed}] are lost" in output
        assert f"rank {killed} was lost" in errors
        assert "sums of floats are multiplied by 3/2" in errors
