"""Token frames from a GrandSage node through to HTTP clients: 200 frames an answer.

Shoal with keys, queue and durable records, against a bare aiohttp relay of the same
messages (bench/yardstick.py), alternating.  Node and clients are one process that
writes prepared bytes.  In a burst, an answer is one write; paced, each frame is one, 50
a second for each of 256 streams.  The original server was measured apart, on another
day: 307,000 to 334,000 frames/s in a burst, 20 % of a core when paced.
"""

import asyncio
import json
import struct
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from load import run
from node import BINARY, TEXT, frame, join, receive
from processes import HERE, Program, program
from report import Goal, Results

ROUNDS = 5
FRAMES = 200  # of an answer
STREAMS = (1, 16, 64, 256)  # at once
ANSWERS = 512  # of a round of bursts
PACED = 256  # streams at once
PACED_ANSWERS = 3  # one after the other in each stream
PACE = 0.02  # seconds between the frames of a paced answer
TOKEN = b" token"
BODY = json.dumps(
    {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_new_tokens": 999,
    }
).encode()

RATE = "burst, {streams} streams: frames/s"
COST = "burst, {streams} streams: CPU µs a frame"
SHARE = f"paced, {PACED} streams: % of a core"
GROWN = f"paced, {PACED} streams: MB grown"

GOALS = [
    *(Goal(f"shoal, {RATE.format(streams=n)}", at_least=307_000) for n in STREAMS),
    Goal(f"shoal, {SHARE}", at_most=20),
    # For comparing days: the yardstick is the same on each.
    *(
        Goal(f"shoal, {row}", f"yardstick, {row}")
        for row in (*(COST.format(streams=n) for n in STREAMS), SHARE)
    ),
    Goal(f"shoal, {GROWN}", at_most=1),
]

Answer = Callable[[asyncio.StreamWriter, bytes], Coroutine[Any, Any, None]]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        serve = ["-m", "shoal", "serve", "--port", "0", "--data-dir", folder, "--json"]
        secrets = ["--api-key", "k", "--join-token", "t", "--log-level", "warning"]
        yardstick = str(HERE / "yardstick.py")
        with program(*serve, *secrets) as shoal, program(yardstick) as bare:
            servers = [("shoal", shoal), ("yardstick", bare)]
            for _ in range(rounds):
                for streams in STREAMS:
                    for name, server in servers:
                        _burst(name, server, streams, results)
                for name, server in servers:
                    _paced(name, server, results)
                servers.reverse()
    return results


def _burst(name: str, server: Program, streams: int, out: Results) -> None:
    answers = min(ANSWERS, 64 * streams)
    seconds, used = run(_answers(server, streams, answers, _at_once))
    frames = answers * FRAMES
    out[f"{name}, {RATE.format(streams=streams)}"].append(frames / seconds)
    out[f"{name}, {COST.format(streams=streams)}"].append(used / frames * 1e6)


def _paced(name: str, server: Program, out: Results) -> None:
    before = server.memory()
    seconds, used = run(_answers(server, PACED, PACED * PACED_ANSWERS, _by_the_clock))
    out[f"{name}, {SHARE}"].append(used / seconds * 100)
    out[f"{name}, {GROWN}"].append(server.memory() - before)


async def _answers(
    server: Program, streams: int, answers: int, answer: Answer
) -> tuple[float, float]:
    """Return the seconds that all answers took, and those of the server's CPU."""
    port = server.report.get("port") or server.report["ports"]["http"]
    node = asyncio.create_task(_node(port, answer))
    await asyncio.sleep(0.3)  # for the node to be known
    cpu, began = server.cpu(), time.perf_counter()
    todo = iter(range(answers))
    await asyncio.gather(*(_client(port, todo) for _ in range(streams)))
    seconds, used = time.perf_counter() - began, server.cpu() - cpu
    node.cancel()
    await asyncio.gather(node, return_exceptions=True)
    return seconds, used


async def _node(port: int, answer: Answer) -> None:
    reader, writer = await join(port, "n", slots=999)
    try:
        async with asyncio.TaskGroup() as tasks:
            while True:
                opcode, payload = await receive(reader)
                if opcode != TEXT:
                    continue
                task = struct.pack("!I", json.loads(payload)["id"])
                tasks.create_task(answer(writer, task))
    finally:
        writer.close()


async def _at_once(writer: asyncio.StreamWriter, task: bytes) -> None:
    writer.write(frame(BINARY, task + TOKEN) * FRAMES + frame(BINARY, task))
    await writer.drain()


async def _by_the_clock(writer: asyncio.StreamWriter, task: bytes) -> None:
    loop = asyncio.get_running_loop()
    due = loop.time()
    for _ in range(FRAMES):
        writer.write(frame(BINARY, task + TOKEN))
        due += PACE
        await asyncio.sleep(due - loop.time())
    writer.write(frame(BINARY, task))


async def _client(port: int, todo: Iterator[int]) -> None:
    for _ in todo:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /api/chat HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n"
            b"Connection: close\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
        )
        answer = await reader.read(-1)
        writer.close()
        if answer.count(b'{"o"') != FRAMES or b'{"done":true}' not in answer:
            raise RuntimeError(f"not the whole answer: {answer[-200:]!r}")
