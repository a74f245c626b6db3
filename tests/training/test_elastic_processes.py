"""Replicas stay the same while processes are killed and paused at random."""

import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from harness.speed import scaled
from training.run_server import RunServer, serving

SCRIPTS = Path(__file__).parent / "scripts"
RANKS = 4
LIMIT = scaled(120.0)  # seconds
LINE = 80  # characters of a step
ROUNDS = 4
ROUNDS_OF_ALL = 100  # with --every

pytestmark = pytest.mark.long


def start(server: RunServer, rank: int, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / "train_elastic.py"), str(folder)],
        env=server.environment(rank),
        stderr=subprocess.PIPE,
        text=True,
    )


def eventually(holds: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < ends, what
        time.sleep(0.02)


def lines(folder: Path) -> list[list[str]]:
    return [
        line.split()
        for file in folder.iterdir()
        for line in file.read_text().splitlines()
        if line.count(" ") == 2
    ]


def written(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def train_on(folder: Path, steps: int = 3) -> None:
    """Wait for a few more steps of all ranks."""
    until = written(folder) + steps * RANKS * LINE
    eventually(lambda: written(folder) >= until, "more steps")


def test_replicas_are_the_same_whichever_ranks_are_killed_or_paused(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rounds = ROUNDS_OF_ALL if request.config.getoption("every") else ROUNDS
    draw = random.Random(7)
    with ExitStack() as stack, serving(RANKS) as server:

        def begin(rank: int) -> subprocess.Popen[str]:
            process = stack.enter_context(start(server, rank, tmp_path))
            stack.callback(process.kill)
            return process

        ranks = {rank: begin(rank) for rank in range(RANKS)}

        def complete() -> bool:
            formation = server.rendezvous.formation
            return formation is not None and len(formation.ranks) == RANKS

        def later(generation: int) -> bool:
            return server.rendezvous.generation > generation

        for number in range(rounds):
            eventually(
                complete, f"round {number}: all ranks: {server.rendezvous.history}"
            )
            train_on(tmp_path)
            rank = draw.randrange(RANKS)
            generation = server.rendezvous.generation
            if number % 3 == 2:
                server.restart()  # the coordinator; ranks connect again
            end = signal.SIGKILL if draw.random() < 0.5 else signal.SIGSTOP
            ranks[rank].send_signal(end)
            eventually(
                partial(later, generation), f"round {number}: without rank {rank}"
            )
            if end is signal.SIGSTOP:
                ranks[rank].send_signal(signal.SIGCONT)
            _, errors = ranks[rank].communicate(timeout=LIMIT)
            assert ranks[rank].returncode != 0, errors
            ranks[rank] = begin(rank)
        eventually(complete, "all ranks")
        train_on(tmp_path, 20)
        (tmp_path / "stop").touch()
        ends = [each.communicate(timeout=LIMIT) for each in ranks.values()]

    assert [each.returncode for each in ranks.values()] == [0] * RANKS, ends
    hashes: defaultdict[int, set[str]] = defaultdict(set)
    for step, digest, _ in lines(tmp_path):
        hashes[int(step)].add(digest)
    assert {len(each) for each in hashes.values()} == {1}
    assert [*sorted(hashes)] == [*range(1, len(hashes) + 1)]
    last = [loss for step, _, loss in lines(tmp_path) if int(step) == len(hashes)]
    # Alone, the noise of one rank's samples leaves about this much.
    assert max(map(float, last)) < 0.01
