"""``shoal train`` with real workers: scripts that begin together, and how they end."""

import json
import os
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
    story = explained(pool, events[0]["run"])
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


def test_unchanged_script_trains_on_without_a_killed_worker(
    pool: Pool, workers: dict[str, Program], tmp_path: Path
) -> None:
    """The model's file returns from the machine that is left."""
    flags = ("--nodes", "2", "--min-nodes", "1", "--env", "OMP_NUM_THREADS=1")
    words = ("train", *flags, "--json", "--output", str(tmp_path), str(EXAMPLE))
    with subprocess.Popen(
        [sys.executable, "-m", "shoal", *words, "--steps", "40"],
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
        story = explained(pool, events[0]["run"])
        (lost,) = [
            each for each in workers if f"machine 1: given to macfleet:{each}" in story
        ]
        workers[lost].kill()
        events += map(json.loads, watching.stdout)

    assert watching.returncode == 0
    assert events[-1]["text"] == "done: 1 of 2 machines"
    assert "rank 1 was lost" in explained(pool, events[0]["run"])
    assert (tmp_path / "model.safetensors").stat().st_size > 1_000_000


def test_unchanged_script_goes_on_without_a_killed_rank(pool: Pool) -> None:
    pool.join("three", "--trust-code", "--slots", "1", token=TOKEN)
    eventually(lambda: len(pool.workers()) == 3, "three workers")
    script = Path(__file__).parents[1] / "training" / "scripts" / "survive_ddp.py"

    words = ("--nodes", "3", "--min-nodes", "1", "--json", str(script), "1")
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
    assert "rank 1 was lost" in explained(pool, events[0]["run"])
