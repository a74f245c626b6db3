"""Runs of ``shoal train`` whose ranks, workers and coordinator are killed and stopped.

``python -m live.train_siege --runs 100`` in ``tests`` prints how they ended.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from harness.ports import free_port
from live.programs import KEY, Pool, Program, Programs, eventually

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
marks, seconds = sys.argv[1], float(sys.argv[2])
start, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
open(f"{marks}/{start}-{rank}", "w").write(str(os.getpid()))
dist.init_process_group("shoal")
open(f"{marks}/begun-{start}-{rank}", "w").close()
step, total = 0, torch.zeros(1000)
until = time.time() + seconds
going = torch.ones(1)
while going.item() > 0:
    gradient = torch.full((1000,), 1.0)
    dist.all_reduce(gradient)
    total += gradient
    going[0] = float(time.time() < until)
    dist.all_reduce(going, dist.ReduceOp.MIN)
    time.sleep(0.05)
if dist.get_rank() == 0:
    torch.save(total, os.environ["SHOAL_OUTPUT"] + "/model.pt")
dist.destroy_process_group()
"""
WORKERS = ("one", "two", "three")
VICTIMS = ("rank", "rank", "worker", "coordinator")
STOPS = (0.0, 0.0, 3.0, 20.0)  # seconds; 0: it is killed
AWAY = 1.0  # seconds until what was killed is started again
IDLE_MAX = 60.0  # seconds that a run may take after its last rank
START = 20.0  # seconds in which a script begins on a busy machine
PATIENCE = 300.0  # seconds after which a run hangs


@dataclass(frozen=True, slots=True)
class Fault:
    """What is killed or stopped, and when."""

    victim: str
    begun: bool  # after all ranks have begun
    delay: float  # seconds later
    stop: float


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended; ``idle`` are the seconds after its last rank."""

    status: int
    has_model: bool
    seconds: float
    idle: float
    cause: str

    @property
    def fault(self) -> str:
        """What is wrong with it; empty: nothing."""
        if self.seconds > PATIENCE:
            return f"hung for {self.seconds:.0f} s"
        if self.idle > IDLE_MAX:
            return f"ended {self.idle:.0f} s after its last rank"
        if self.status == 0 and not self.has_model:
            return "succeeded without a model"
        if self.status and not self.cause.startswith("shoal train: "):
            return "failed without a cause"
        return ""


class TrainSiege:
    """A pool whose parts are killed while it trains."""

    def __init__(self, folder: Path, random: Random, seconds: float) -> None:
        self._folder, self._random, self._seconds = folder, random, seconds
        self._programs = Programs(folder)
        self._port = free_port()
        self._pool = self._serve()
        self._workers = {name: self._join(name) for name in WORKERS}
        self._script = folder / "job.py"
        self._script.write_text(SCRIPT)

    def close(self) -> None:
        self._programs.close()

    def faults(self) -> list[Fault]:
        """Draw one fault or two."""
        draw = self._random
        return [
            Fault(
                draw.choice(VICTIMS),
                draw.random() < 0.6,
                draw.uniform(0.0, 2.0),
                draw.choice(STOPS),
            )
            for _ in range(draw.choice((1, 1, 2)))
        ]

    def run(self, number: int, faults: list[Fault]) -> Ending:
        """Train under faults; return how it ended."""
        eventually(lambda: len(self._pool.workers()) == len(WORKERS), "all workers")
        marks, out = self._folder / f"marks{number}", self._folder / f"out{number}"
        marks.mkdir()
        flags = ("--nodes", "3", "--min-nodes", "2", "--output", str(out))
        job = (str(self._script), str(marks), str(self._seconds))
        began = alive = time.monotonic()
        with (
            (self._folder / f"output{number}").open("w") as output,
            subprocess.Popen(
                [sys.executable, "-m", "shoal", "train", *flags, *job],
                env={**os.environ, "SHOAL_URL": self._pool.url, "SHOAL_API_KEY": KEY},
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
            ) as training,
        ):
            for fault in sorted(faults, key=lambda each: each.begun):
                pattern = "begun-*" if fault.begun else "[0-9]*"
                self._wait(marks, pattern, training)
                time.sleep(fault.delay)
                self._strike(fault, marks)
                alive = time.monotonic()
            while training.poll() is None and time.monotonic() < began + PATIENCE:
                alive = time.monotonic() if _running(marks) else alive
                time.sleep(0.1)
            ended = time.monotonic()
            if training.poll() is None:
                training.send_signal(signal.SIGINT)
            _, errors = training.communicate()
        cause = (errors.strip().splitlines() or [""])[-1]
        model = (out / "model.pt").exists()
        return Ending(training.returncode, model, ended - began, ended - alive, cause)

    def _wait(
        self, marks: Path, pattern: str, training: "subprocess.Popen[str]"
    ) -> None:
        """Wait until three ranks have left a mark, for a while."""
        until = time.monotonic() + START
        while len([*marks.glob(pattern)]) < 3 and time.monotonic() < until:
            if training.poll() is not None:
                return
            time.sleep(0.05)

    def _strike(self, fault: Fault, marks: Path) -> None:
        if fault.victim == "rank":
            with suppress(ProcessLookupError):
                _signal(self._random.choice(_running(marks) or [0]), fault.stop)
        elif fault.victim == "worker":
            name = self._random.choice(WORKERS)
            _signal(self._workers[name].process.pid, fault.stop)
            if not fault.stop:
                self._workers[name].wait()
                time.sleep(AWAY)
                self._workers[name] = self._join(name)
        else:
            _signal(self._pool.program.process.pid, fault.stop)
            if not fault.stop:
                self._pool.program.wait()
                time.sleep(AWAY)
                self._pool = self._serve()

    def _serve(self) -> Pool:
        return self._programs.serve("--no-discovery", port=self._port)

    def _join(self, name: str) -> Program:
        return self._pool.join(name, "--trust-code", "--slots", "1")


def _running(marks: Path) -> list[int]:
    """Return the ranks that run, by their processes."""
    pids = []
    for each in sorted(marks.glob("[0-9]*")):
        with suppress(ValueError, ProcessLookupError):
            os.kill(pid := int(each.read_text()), 0)
            pids.append(pid)
    return pids


def _signal(pid: int, stop: float) -> None:
    """Kill a process, or stop it for a while."""
    if not pid:
        return
    if not stop:
        os.kill(pid, signal.SIGKILL)
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(stop)
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def besieged(folder: Path, seed: int, seconds: float) -> Iterator[TrainSiege]:
    """Yield a siege, and end its programs."""
    siege = TrainSiege(folder, Random(seed), seconds)
    try:
        yield siege
    finally:
        siege.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the job")
    args = parser.parse_args()
    ends: Counter[str] = Counter()
    faulty = 0
    folder = Path(tempfile.mkdtemp(prefix="shoal-siege-"))
    with besieged(folder, args.seed, args.seconds) as siege:
        for number in range(args.runs):
            faults = siege.faults()
            ending = siege.run(number, faults)
            faulty += bool(ending.fault)
            ends["a model" if ending.status == 0 else "its cause"] += 1
            struck = ", ".join(
                f"{'stop ' if each.stop else 'kill '}{each.victim} "
                f"{'after' if each.begun else 'before'} {each.delay:.1f} s"
                for each in faults
            )
            print(
                f"{number:3} {ending.seconds:5.0f} s, {ending.idle:.1f} s after its "
                f"last rank, status {ending.status}; {struck}; {ending.cause} "
                f"{ending.fault and 'WRONG: ' + ending.fault}",
                flush=True,
            )
    print(f"{args.runs} runs: {dict(ends)}, {faulty} wrong; in {folder}")
    return bool(faulty)


if __name__ == "__main__":
    sys.exit(main())
