"""Peers written from TealeNet's document alone, on the local network."""

import asyncio
import random
from typing import Any

import pytest

from documents.serving import chat, until, workers_of
from documents.tealenet import CHUNK, Peer
from live.programs import PATIENCE, TINY, Pool, Programs
from models.tiny_answers import ANSWERS

MODEL = "mlx-community/Qwen3-8B-4bit"
OPEN = "--tealenet-open"


def port_of(pool: Pool) -> int:
    port: int = pool.ready["ports"]["tealenet"]
    return port


def ping(model: str) -> dict[str, Any]:
    """Return the request of the document's example, about something else."""
    return {
        "model": model,
        "messages": [
            {"role": "user", "content": "ping"},
        ],
        "temperature": 0,
        "top_p": 0.9,
        "max_tokens": 2048,
        "stream": True,
    }


@pytest.mark.short
async def test_a_peer_joins_and_serves_and_asks(programs: Programs) -> None:
    pool = programs.serve(OPEN)
    pool.joined("one", "--model", f"tiny={TINY}")
    peer = Peer((MODEL,), ("You said ",), heartbeat=0.2)

    async with asyncio.timeout(PATIENCE), peer.connected(port_of(pool)) as connection:
        await connection.well.wait()
        await workers_of(pool, 2)
        said = await chat(pool, MODEL, "hello")
        assert await connection.ask(ping("tiny")) == ANSWERS["ping"]
        whole = await connection.ask(ping("tiny"), streaming=False)

    assert said == "You said hello"
    assert whole == ANSWERS["ping"]
    assert peer.faults == []


@pytest.mark.parametrize("strict", [False, True])
async def test_a_peer_that_is_dialled_serves_and_asks(
    programs: Programs, strict: bool
) -> None:
    peer = Peer((MODEL,), ("You said ",), strict=strict)

    async with asyncio.timeout(PATIENCE), peer.listening() as port:
        pool = programs.serve(OPEN, "--tealenet-peers", f"127.0.0.1:{port}")
        pool.joined("one", "--model", f"tiny={TINY}")
        await workers_of(pool, 2)
        said = [await chat(pool, MODEL, "hello") for _ in range(3)]
        answer = await peer.connections[-1].ask(ping("tiny"))

    assert said == ["You said hello"] * 3
    assert answer == ANSWERS["ping"]


@pytest.mark.parametrize("strict", [False, True])
async def test_a_worker_serves_a_peer(programs: Programs, strict: bool) -> None:
    peer = Peer(strict=strict)

    async with asyncio.timeout(PATIENCE), peer.listening() as port:
        worker = programs.run(
            *("join", f"tcp://127.0.0.1:{port}", "--wire", "tealenet", "--plain"),
            "--json",
            *("--name", "one", "--model", f"tiny={TINY}"),
        )
        await until(lambda: any(each.well.is_set() for each in peer.connections))
        (connection,) = (each for each in peer.connections if each.well.is_set())
        answers = await asyncio.gather(
            *(connection.ask(ping("tiny")) for _ in range(2))
        )
        with pytest.raises(RuntimeError):
            await connection.ask(ping("another"))
        assert worker.process.poll() is None

    assert answers == [ANSWERS["ping"]] * 2
    assert connection.theirs["loadedModels"] == ["tiny"]
    assert connection.health["loadedModels"] == ["tiny"]


async def test_peers_of_a_cluster_know_the_passcode(programs: Programs) -> None:
    pool = programs.serve("--tealenet-passcode", "wildlife")
    peer = Peer((MODEL,), passcode="wildlife")
    stranger = Peer((MODEL,), passcode="zoo")

    async with asyncio.timeout(PATIENCE):
        async with stranger.connected(port_of(pool)) as connection:
            await connection.ended.wait()
        async with peer.connected(port_of(pool)) as connection:
            await connection.well.wait()
            await workers_of(pool)
            assert await chat(pool, MODEL, "hello") == "hello"


async def test_a_peer_with_rare_heartbeats_is_used(programs: Programs) -> None:
    pool = programs.serve(OPEN)
    peer = Peer((MODEL,), heartbeat=600.0)

    async with asyncio.timeout(40 + PATIENCE), peer.connected(port_of(pool)):
        await workers_of(pool)
        await asyncio.sleep(20)
        assert await chat(pool, MODEL, "hello") == "hello"
        await asyncio.sleep(20)
        assert await chat(pool, MODEL, "hello") == "hello"


async def test_a_peer_copies_a_model(programs: Programs) -> None:
    pool = programs.serve(OPEN, "--share", f"tiny={TINY}")
    peer = Peer()

    async with asyncio.timeout(PATIENCE), peer.connected(port_of(pool)) as connection:
        await connection.well.wait()
        found = await connection.query("tiny")
        files = await connection.fetch("tiny")
        missing = await connection.query("another")

    data = TINY.read_bytes()
    assert found["available"]
    assert found["totalSizeBytes"] == len(data)
    assert list(files.values()) == [data]
    assert not missing["available"]


async def test_the_model_of_a_peer_is_copied(programs: Programs) -> None:
    data = random.Random(1).randbytes(2 * CHUNK + 100)
    files = {"model.safetensors": data, "config.json": b"{}"}
    peer = Peer((MODEL,), files=files)
    folder = programs.folder / "models"

    async with asyncio.timeout(PATIENCE), peer.listening() as port:
        getting = programs.run(
            *("models", "get", MODEL, "--from", f"127.0.0.1:{port}", "--plain"),
            *("--to", str(folder)),
        )
        assert await asyncio.to_thread(getting.wait) == 0, getting.errors

    found = {each.name: each.read_bytes() for each in folder.rglob("*.*")}
    assert found.items() >= files.items()
