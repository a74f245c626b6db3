"""PyTorch's own launcher, scripts and backends, in processes of their own."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.ports import free_port
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
    return {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS)}


def run_ranks(
    script: str,
    *arguments: str,
    environment: Callable[[int], Mapping[str, str]] = plain_environment,
) -> list[EndedRank]:
    """Run a script in all ranks, without a launcher, which would kill them all."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        ranks = []
        for rank in range(RANKS):
            process = subprocess.Popen(
                [sys.executable, str(SCRIPTS / script), *arguments],
                env={**environment(rank), **place},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        printed = [each.communicate(timeout=LIMIT) for each in ranks]
    return [
        EndedRank(each.returncode, *texts)
        for each, texts in zip(ranks, printed, strict=True)
    ]


def run_by_torchrun(
    script: str, *arguments: str, ranks: int = RANKS
) -> subprocess.CompletedProcess[str]:
    command = (
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(ranks), str(SCRIPTS / script), *arguments),
    )
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, check=False
    )


def test_an_unchanged_script_trains_in_parallel_as_with_gloo(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    figures = {
        backend: run_by_torchrun(
            "train_parallel.py", backend, str(tmp_path / backend), ranks=2
        )
        for backend in ("shoal", "gloo")
    }
    ours, gloo = (
        dict(re.findall(r"(rank \d .*): (.*)\n", each.stdout))
        for each in figures.values()
    )

    assert figures["shoal"].returncode == 0, figures["shoal"].stderr
    assert len(gloo) == 20
    for way in gloo:
        with subtests.test(way):
            assert ours[way] == gloo[way]


def test_transfers_and_callbacks_are_beside_collectives() -> None:
    check_done(run_ranks("beside_collectives.py"))


def test_a_group_itself_is_called_as_gloos_is() -> None:
    ended = run_by_torchrun("direct_calls.py", ranks=2)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("has done all") == 2


def test_models_train_with_compressed_gradients_and_with_diloco() -> None:
    check_done(run_ranks("slow_links.py"))


def check_done(ranks: list[EndedRank]) -> None:
    for rank in ranks:
        assert rank.status == 0, rank.errors
        assert "has done all" in rank.output


def test_a_killed_rank_ends_the_others_with_the_cause() -> None:
    *others, killed = run_ranks("train_ddp.py", str(RANKS - 1))

    assert killed.status == -signal.SIGKILL
    for rank in others:
        assert rank.status == 1
        assert "GroupEnded: rank" in rank.errors
        assert "hash" not in rank.output


def test_an_unchanged_script_goes_on_without_a_killed_rank() -> None:
    with serving(RANKS) as server:
        # It has PyTorch's store, and its buffers are the ones that the others get.
        killed, *others = run_ranks("train_ddp.py", "0", environment=server.environment)

    assert killed.status == -signal.SIGKILL
    assert [each.status for each in others] == [0, 0], others
    assert len({each.output for each in others}) == 1
    for rank in others:
        assert "counted 2 mean 1.0" in rank.output
        assert "needs all ranks, and ranks [0] are lost" in rank.output
        assert "rank 0 was lost" in rank.errors
        assert "sums of floats are multiplied by 3/2" in rank.errors
