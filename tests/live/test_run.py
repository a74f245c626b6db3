"""`shoal run`: from nothing to an answer in one command."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from live.programs import PATIENCE, TINY, TOKEN, Pool, eventually
from models.hub_server import HubServer, serving


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a user who has a new home."""
    places = {"HOME": str(home), "SHOAL_DATA_DIR": str(home / "data")}
    return {**os.environ, **places, "SHOAL_PORT": "0", "HF_HOME": str(home / "hub")}


def run(
    variables: Mapping[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", "run", *arguments],
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def programs_of(variables: Mapping[str, str]) -> list[psutil.Process]:
    """Return the processes with a home."""
    found = []
    for each in psutil.process_iter():
        try:
            if each.environ().get("HOME") == variables["HOME"]:
                found.append(each)
        except psutil.Error:  # it has ended
            continue
    return found


def test_a_file_is_chatted_with_where_nothing_ran(tmp_path: Path) -> None:
    variables = environment(tmp_path)
    other = tmp_path / "data" / "models" / "another.gguf"  # which is not meant
    other.parent.mkdir(parents=True)
    other.write_bytes(TINY.read_bytes()[:-20_000])

    done = run(variables, str(TINY), "ping")

    assert done.stdout == "pong\n", done.stderr
    assert done.returncode == 0
    eventually(lambda: programs_of(variables) == [], "all have ended")


def test_a_model_of_the_pool_needs_no_worker(pool: Pool, tmp_path: Path) -> None:
    variables = environment(tmp_path) | {
        "SHOAL_URL": pool.url,
        "SHOAL_API_KEY": pool.ready["api_key"],
    }

    done = run(variables, "tiny", "ping")

    assert (done.returncode, done.stdout) == (0, "pong\n")
    assert len(pool.workers()) == 1


def test_an_unknown_model_is_refused_with_what_to_give(tmp_path: Path) -> None:
    variables = environment(tmp_path)

    done = run(variables, "huge", "ping")

    assert done.returncode == 1
    assert (
        "`shoal join` did not start: model 'huge': no engine on this machine"
        in done.stderr
    )
    eventually(lambda: programs_of(variables) == [], "all have ended")


def test_a_name_that_is_like_one_of_the_pool_is_asked_about(
    pool: Pool, tmp_path: Path
) -> None:
    variables = environment(tmp_path) | {
        "SHOAL_URL": pool.url,
        "SHOAL_API_KEY": pool.ready["api_key"],
    }

    done = run(variables, "tinny", "ping")

    assert done.returncode == 1
    assert done.stderr.endswith("; did you mean tiny?\n"), done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_nothing_remains_when_it_is_killed(tmp_path: Path) -> None:
    variables = environment(tmp_path)
    read, write = os.pipe()  # a standard input that does not end
    with subprocess.Popen(
        [sys.executable, "-m", "shoal", "run", str(TINY), "-"],
        env=variables,
        stdin=read,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as running:
        # The coordinator, the worker, and the engine's process.
        eventually(lambda: len(programs_of(variables)) >= 4, "all have started")
        running.send_signal(signal.SIGKILL)
    eventually(lambda: programs_of(variables) == [], "all have ended")
    os.close(read)
    os.close(write)


def join_once(pool: Pool, variables: Mapping[str, str], model: str) -> str:
    """Join a pool with a model; return the name under which that is offered."""
    command = [sys.executable, "-m", "shoal", "join", pool.url, "--json", "--model"]
    with subprocess.Popen(
        [*command, model, "--token", TOKEN, "--name", "puller"],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        events = (json.loads(line) for line in worker.stdout)
        joined = next((each for each in events if each["event"] == "joined"), None)
        worker.terminate()
    assert joined is not None, "it ended before it joined; it says why above"
    return str(joined["model"])


async def test_a_model_of_the_hub_is_pulled_once(pool: Pool, tmp_path: Path) -> None:
    content = await asyncio.to_thread(TINY.read_bytes)
    async with serving(HubServer({"org/Tiny-GGUF": {"t-Q8_0.gguf": content}})) as hub:
        variables = environment(tmp_path) | {"HF_ENDPOINT": hub.url}
        asked = await asyncio.to_thread(run, variables, "org/Tiny-GGUF", "ping")
        assert asked.returncode == 1
        told = "org/Tiny-GGUF is not on this machine; to download it: --yes"
        assert told in asked.stderr
        pulled = await asyncio.to_thread(
            run, variables, "--yes", "org/Tiny-GGUF", "ping"
        )
        assert pulled.stdout == "pong\n", pulled.stderr
    again = await asyncio.to_thread(run, variables, "org/Tiny-GGUF:Q8_0", "ping")
    assert again.stdout == "pong\n", again.stderr
    joined = await asyncio.to_thread(join_once, pool, variables, "org/Tiny-GGUF")
    assert joined == "tiny"
