"""PyTorch's own launcher, scripts and backends, in processes of their own."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from harness.fork_server import TORCH, started
from harness.speed import scaled
from training.run_server import serving

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT = scaled(240.0)  # seconds; a script fails by then
RANKS = 3

pytestmark = pytest.mark.long


@dataclass(frozen=True, slots=True)
class EndedRank:
    """How a rank's process ended, and what it printed."""

    status: int
    output: str
    errors: str


def plain_environment(rank: int) -> Mapping[str, str]:
    return {**os.environ, "RANK": str(rank), **dict(TORCH.variables)}


def run_ranks(
    script: str,
    *arguments: str,
    environment: Callable[[int], Mapping[str, str]] = plain_environment,
    count: int = RANKS,
) -> list[EndedRank]:
    """Run a script in all ranks, without a launcher, which would kill them all."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    group = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    module = script.removesuffix(".py")
    with ExitStack() as stack:
        ranks, outputs, logs = [], [], []
        for rank in range(count):
            logs.append(stack.enter_context(TemporaryFile("w+")))
            variables = {**environment(rank), **group}
            process = started(
                *(module, arguments, str(SCRIPTS), variables, logs[-1], TORCH)
            )
            assert process.stdout is not None
            outputs.append(stack.enter_context(process.stdout))
            stack.callback(process.kill)
            ranks.append(process)
        ended = []
        for process, output, log in zip(ranks, outputs, logs, strict=True):
            text, status = output.read(), process.wait(LIMIT)
            log.seek(0)
            ended.append(EndedRank(status, text, log.read()))
        return ended


def run_by_torchrun(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
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
    ours = run_by_torchrun("train_ddp.py", "shoal")
    gloo = "".join(each.output for each in run_ranks("train_ddp.py", "gloo"))

    # Gloo's processes sometimes abort on exit, after their last line.
    assert ours.returncode == 0, ours.stderr
    assert losses(ours.stdout) == pytest.approx(losses(gloo), rel=1e-3)
    assert len(losses(ours.stdout)) == RANKS


def test_models_train_in_parallel_as_with_gloo(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    ranks = [
        run_ranks("train_parallel.py", backend, str(tmp_path / backend), count=2)
        for backend in ("shoal", "gloo")
    ]
    ours, gloo = (
        dict(re.findall(r"(rank \d .*): (.*)\n", "".join(each.output for each in two)))
        for two in ranks
    )

    for rank in ranks[0]:
        assert rank.status == 0, rank.errors
    assert len(gloo) == 18
    for way in gloo:
        with subtests.test(way):
            assert ours[way] == gloo[way]


def test_transfers_and_callbacks_are_beside_collectives() -> None:
    check_done(run_ranks("beside_collectives.py"))


def test_models_train_with_compressed_gradients_and_with_diloco() -> None:
    check_done(run_ranks("slow_links.py"))


def check_done(ranks: list[EndedRank]) -> None:
    for rank in ranks:
        assert rank.status == 0, rank.errors
        assert "has done all" in rank.output


def test_a_killed_rank_ends_the_others_with_the_cause() -> None:
    *others, killed = run_ranks("train_ddp.py", "shoal", "killed", "7")

    assert killed.status == -signal.SIGKILL
    for rank in others:
        assert rank.status == 1
        assert "GroupEnded: rank" in rank.errors
        assert "hashes" not in rank.output


def test_an_unchanged_script_goes_on_without_a_killed_rank() -> None:
    with serving(RANKS) as server:
        # It has PyTorch's store, and its buffers are the ones that the others get.
        killed, *others = run_ranks(
            "survive_ddp.py", "0", environment=server.environment
        )

    assert killed.status == -signal.SIGKILL
    assert [each.status for each in others] == [0, 0], others
    assert len({each.output for each in others}) == 1
    for rank in others:
        assert "counted 2 mean 1.0" in rank.output
        assert "needs all ranks, and ranks [0] are lost" in rank.output
        assert "rank 0 was lost" in rank.errors
        assert "sums of floats are multiplied by 3/2" in rank.errors
