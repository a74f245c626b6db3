"""``shoal train`` with real workers: scripts that begin together, and how they end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from live.programs import KEY, PATIENCE, Pool, Program, Programs, eventually

pytestmark = pytest.mark.long

FLEET = ("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0")
TOKEN = "join-me-please"
MEETING = """
import os, socket, sys
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(place) as server:
        for _ in range(size - 1):
            server.accept()[0].close()
else:
    while True:
        try:
            socket.create_connection(place).close()
            break
        except ConnectionRefusedError:
            pass
print(f"step=1 loss={rank}")
with open(os.environ["SHOAL_OUTPUT"] + "/model", "w") as model:
    model.write(sys.argv[1])
"""
WAITING = """
import os, sys, time
open(sys.argv[1] + os.environ["RANK"], "w").write(str(os.getpid()))
print("waiting")
while not os.path.exists(sys.argv[1] + "go"):
    time.sleep(0.05)
"""
FAILS = """
import os
import torch.distributed as dist
if os.environ["RANK"] == "1":
    raise ValueError("zap")
dist.init_process_group("shoal")
with open(os.environ["SHOAL_OUTPUT"] + "/size", "w") as file:
    file.write(str(dist.get_world_size()))
dist.destroy_process_group()
"""
GATED = """
import builtins, os, runpy, sys, time

say = print

def say_and_wait(line):
    say(line, flush=True)
    while line.startswith("step=10 ") and not os.path.exists(gate):
        time.sleep(0.05)

script, gate = sys.argv[1:3]
sys.argv[1:3] = []
builtins.print = say_and_wait
runpy.run_path(script, run_name="__main__")
"""  # runs a script, which waits for a file before it goes on after its tenth step

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_language_model.py"


@pytest.fixture
def pool(programs: Programs) -> Pool:
    return programs.serve("--join-token", TOKEN, *FLEET)


@pytest.fixture(autouse=True)
def workers(pool: Pool) -> dict[str, Program]:
    joining = {
        name: pool.join(name, "--trust-code", "--slots", "1", token=TOKEN)
        for name in ("one", "two")
    }
    eventually(lambda: len(pool.workers()) == 2, "two workers")
    return joining


def reach(pool: Pool) -> dict[str, str]:
    return {**os.environ, "SHOAL_URL": pool.url, "SHOAL_API_KEY": KEY}


def shoal(pool: Pool, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        env=reach(pool),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def explained(pool: Pool, run: str) -> str:
    return "\n".join(pool.admin(f"jobs/{run}/explain")["lines"])


def has_text(file: Path) -> bool:
    return file.exists() and bool(file.read_text())


def is_running(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def test_script_begins_on_all_machines_and_returns_its_files(
    pool: Pool, tmp_path: Path
) -> None:
    script = tmp_path / "meeting.py"
    script.write_text(MEETING)
    out = tmp_path / "out"

    words = ("--nodes", "2", "--nproc-per-node", "2", "--json", "--output", str(out))
    done = shoal(pool, "train", *words, str(script), "trained")

    assert done.returncode == 0, done.stderr
    events: list[dict[str, Any]] = [*map(json.loads, done.stdout.splitlines())]
    losses = {
        each["rank"]: each["values"]["loss"]
        for each in events
        if each["event"] == "progress"
    }
    assert losses == {0: 0, 1: 1, 2: 2, 3: 3}
    assert (out / "model").read_text() == "trained"
    run = events[0]["run"]
    fetched = shoal(pool, "train", "fetch", run, "--output", str(tmp_path / "again"))
    assert fetched.stdout == f"{tmp_path / 'again' / 'model'}\n", fetched.stderr
    assert (tmp_path / "again" / "model").read_text() == "trained"
    story = explained(pool, run)
    assert "machine 0: done by attempt 1" in story
    assert "rank 2 ended: with status 0" in story


def test_cancelled_run_ends_its_processes(pool: Pool, tmp_path: Path) -> None:
    script, mark = tmp_path / "waiting.py", tmp_path / "pid"
    script.write_text(WAITING)
    words = ("--nodes", "2", "--detach", str(script), str(mark))
    run = shoal(pool, "train", *words).stdout.strip()
    pids = [tmp_path / f"pid{rank}" for rank in range(2)]
    eventually(lambda: all(map(has_text, pids)), "two processes")

    cancelled = shoal(pool, "jobs", "cancel", run)

    assert cancelled.returncode == 0, cancelled.stderr
    eventually(lambda: not any(map(is_running, pids)), "their end")


def test_interrupted_run_ends_its_processes_and_says_so(
    pool: Pool, tmp_path: Path
) -> None:
    script, mark = tmp_path / "waiting.py", tmp_path / "pid"
    script.write_text(WAITING)
    with subprocess.Popen(
        [sys.executable, "-m", "shoal", "train", "--nodes", "2", script, str(mark)],
        env=reach(pool),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watching:
        pids = [tmp_path / f"pid{rank}" for rank in range(2)]
        eventually(lambda: all(map(has_text, pids)), "two processes")

        watching.send_signal(signal.SIGINT)
        output, errors = watching.communicate(timeout=PATIENCE)

    assert watching.returncode == 130
    assert output.splitlines()[-1] == "[run] cancelled"
    assert errors.strip() == (
        "shoal train: cancelling; Ctrl-C again exits without waiting"
    )
    eventually(lambda: not any(map(is_running, pids)), "their end")


def test_second_interrupt_leaves_at_once_and_says_what_goes_on(
    pool: Pool, tmp_path: Path
) -> None:
    script, mark = tmp_path / "waiting.py", tmp_path / "pid"
    script.write_text(WAITING)
    with subprocess.Popen(
        [sys.executable, "-m", "shoal", "train", script, str(mark)],
        env=reach(pool),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watching:
        eventually(lambda: has_text(tmp_path / "pid0"), "a process")
        pool.program.process.send_signal(signal.SIGSTOP)
        try:
            watching.send_signal(signal.SIGINT)
            assert watching.stderr is not None
            assert "cancelling" in watching.stderr.readline()
            watching.send_signal(signal.SIGINT)
            _, errors = watching.communicate(timeout=PATIENCE)
        finally:
            pool.program.process.send_signal(signal.SIGCONT)

    assert watching.returncode == 130
    assert "may still be running" in errors
    assert "shoal jobs cancel " in errors


def test_script_goes_on_while_the_coordinator_is_away(
    programs: Programs, pool: Pool, tmp_path: Path
) -> None:
    script, mark = tmp_path / "waiting.py", tmp_path / "pid"
    script.write_text(WAITING)
    words = ("train", "--nodes", "2", "--json", str(script), str(mark))
    with subprocess.Popen(
        [sys.executable, "-m", "shoal", *words],
        env=reach(pool),
        stdout=subprocess.PIPE,
        text=True,
    ) as watching:
        pids = [tmp_path / f"pid{rank}" for rank in range(2)]
        eventually(lambda: all(map(has_text, pids)), "two processes")
        before = [each.read_text() for each in pids]

        pool.program.kill()
        again = programs.serve("--join-token", TOKEN, *FLEET, port=pool.port)
        eventually(lambda: len(again.workers()) == 2, "two workers")
        (tmp_path / "pidgo").touch()
        output, _ = watching.communicate(timeout=PATIENCE)

    assert watching.returncode == 0
    last = json.loads(output.splitlines()[-1])
    assert last["text"] == "done: 2 of 2 machines"
    assert [each.read_text() for each in pids] == before


@pytest.mark.parametrize(("node", "least"), [(0, 1), (1, 1), (1, 2)])
def test_unchanged_script_trains_on_without_a_killed_worker(
    pool: Pool, workers: dict[str, Program], tmp_path: Path, node: int, least: int
) -> None:
    """The model's file returns from the machine that is left, whose rank is then 0.

    If two are needed, another one comes in the place of the lost one.
    """
    script, gate = tmp_path / "gated.py", tmp_path / "gate"
    script.write_text(GATED)
    out = tmp_path / "out"
    flags = ("--nodes", "2", "--min-nodes", str(least), "--env", "OMP_NUM_THREADS=1")
    words = ("train", *flags, "--json", "--output", str(out), str(script))
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "shoal", *words),
            *(str(EXAMPLE), str(gate), "--steps", "20"),
        ],
        env=reach(pool),
        stdout=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        events: list[dict[str, Any]] = []
        for line in watching.stdout:
            events.append(json.loads(line))
            if events[-1].get("values", {}).get("step") == 10:
                break
        run = events[0]["run"]
        given = f"machine {node}: given to shoal:"
        (lost,) = [each for each in workers if given + each in explained(pool, run)]
        workers[lost].kill()
        gate.touch()
        if least == 2:
            pool.join("spare", "--trust-code", "--slots", "1", token=TOKEN)
        events += map(json.loads, watching.stdout)

    assert watching.returncode == 0
    assert events[-1]["text"] == f"done: {least} of 2 machines"
    story = explained(pool, run)
    assert f"rank {node} was lost" in story
    assert (f"restarts on {least} machine" in story) == (node == 0 or least == 2)
    assert (out / "model.safetensors").stat().st_size > 1_000_000


def test_others_begin_at_once_without_a_rank_that_fails_before_all_have_begun(
    pool: Pool, tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    words = ("--nodes", "2", "--min-nodes", "1", "--output", str(tmp_path / "out"))

    done = shoal(pool, "train", *words, str(script))

    assert done.returncode == 0, done.stderr
    assert "ended: rank 1 of fails.py on" in done.stdout
    assert "ValueError: zap" in done.stdout
    assert (tmp_path / "out" / "size").read_text() == "1"

    failed = shoal(pool, "train", "--nodes", "2", str(script))
    assert failed.returncode == 1
    (cause,) = failed.stderr.splitlines()
    assert cause.startswith("shoal train: rank 1 of fails.py on ")
    assert cause.endswith("ended with status 1: ValueError: zap")


def test_output_that_cannot_be_written_stays_with_the_coordinator(
    pool: Pool, tmp_path: Path
) -> None:
    script = tmp_path / "model.py"
    script.write_text(MEETING)
    out = tmp_path / "out"
    (out / "model").mkdir(parents=True)

    done = shoal(pool, "train", "--output", str(out), str(script), "x")

    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert error.startswith(f"shoal train: --output {out}: Is a directory: `shoal tr")


def test_run_without_output_fails_and_says_which_rank_was_lost(
    pool: Pool, tmp_path: Path
) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("print('nothing')")

    done = shoal(pool, "train", "--output", str(tmp_path / "out"), str(script))

    assert done.returncode == 1
    assert done.stderr == "shoal train: no rank has left files in $SHOAL_OUTPUT\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_unchanged_script_goes_on_without_a_killed_rank(pool: Pool, rank: int) -> None:
    """Also without rank 0, as it is to leave no files."""
    pool.join("three", "--trust-code", "--slots", "1", token=TOKEN)
    eventually(lambda: len(pool.workers()) == 3, "three workers")
    script = Path(__file__).parents[1] / "training" / "scripts" / "train_ddp.py"

    words = ("--nodes", "3", "--min-nodes", "1", "--json", str(script), str(rank))
    done = shoal(pool, "train", *words)

    assert done.returncode == 0, done.stderr
    events: list[dict[str, Any]] = [*map(json.loads, done.stdout.splitlines())]
    printed = [
        line
        for each in events
        if each["event"] == "output"
        for line in each["lines"]
        if line.startswith("hash ")
    ]
    assert len(printed) == 2
    assert len({*printed}) == 1
    assert events[-1]["text"] == "done: 2 of 3 machines"
    assert f"rank {rank} was lost" in explained(pool, events[0]["run"])
