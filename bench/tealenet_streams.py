"""Chunks of answers from a worker through Shoal to HTTP clients, 200 chunks an answer.

Shoal's own worker (bench/streaming_worker.py) over TealeNet on the LAN (*lan*) and over
GrandSage's wire (*grandsage*), and a node of another maker through the coordinator's
relay in the open (*relay*), each a process of its own.  In a burst
an answer's chunks are there at once; paced, 50 a second for each stream, over
GrandSage's wire alone, for peers of TealeNet get one job at a time; *p99* is from when
the worker has a chunk to when the client does.  CPU time is the coordinator's, and
the worker's apart.  A relay takes 10,000 messages of all guests at once, and 2,000 a
second in the long run.
"""

import asyncio
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

from load import run
from processes import HERE, Program, program
from report import Goal, Results
from streaming_worker import BURST, CHUNKS, TOKEN

ROUNDS = 5
WAYS = ("grandsage", "lan", "relay")
STREAMS = (1, 16, 64)  # at once
ANSWERS = {1: 32, 16: 96, 64: 192}  # of a round of bursts: what a relay lets pass
PACED = 64  # streams at once
PACED_ANSWERS = 1  # of each stream, one after the other
PATIENCE = 120.0  # seconds for anything

RATE = "{streams} streams: chunks/s"
COST = "{streams} streams: CPU µs a chunk"
SHARE = f"paced, {PACED} streams: % of a core"
P99 = f"paced, {PACED} streams: p99 ms"

GOALS = [
    Goal(f"{way}, {row}", f"grandsage, {row}")
    for way in WAYS[1:]
    for row in (COST.format(streams=n) for n in STREAMS)
]

Workers = Mapping[str, Program]

_STAMP = re.compile(rb'"content":" (\d+\.\d+)"')
_TEXT = json.dumps(TOKEN).encode()


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        where = ["--port", "0", "--tealenet-port", "0", "--data-dir", folder]
        let_in = [
            "--api-key",
            "k",
            "--join-token",
            "t",
            "--tealenet-open",
            "--relay-open",
        ]
        quiet = ["--json", "--log-level", "error"]
        shoal = stack.enter_context(
            program("-m", "shoal", "serve", *where, *let_in, *quiet)
        )
        ports = shoal.report["ports"]
        workers = {
            way: stack.enter_context(
                program(
                    str(HERE / "streaming_worker.py"),
                    *(way, str(ports["http"]), str(ports["tealenet"])),
                )
            )
            for way in WAYS
        }
        run(_until_known(ports["http"]))
        measure_round(shoal, workers, defaultdict(list))  # for all to be warm
        for _ in range(rounds):
            measure_round(shoal, workers, results)
            workers = dict(reversed(workers.items()))
    return results


def measure_round(shoal: Program, workers: Workers, out: Results) -> None:
    """Put what every way costs into the results, once."""
    port = shoal.report["ports"]["http"]
    for streams in STREAMS:
        for way, worker in workers.items():
            cpu, began = (shoal.cpu(), worker.cpu()), time.perf_counter()
            run(_answers(port, way, BURST, streams, ANSWERS[streams]))
            seconds = time.perf_counter() - began
            chunks = ANSWERS[streams] * CHUNKS
            here, there = shoal.cpu() - cpu[0], worker.cpu() - cpu[1]
            cost = COST.format(streams=streams)
            out[f"{way}, {RATE.format(streams=streams)}"].append(chunks / seconds)
            out[f"{way}, {cost}"].append(here / chunks * 1e6)
            out[f"{way}'s worker, {cost}"].append(there / chunks * 1e6)
    # TealeNet's peers get one job at a time, so the others would wait too long.
    way, worker = WAYS[0], workers[WAYS[0]]
    cpu, began = (shoal.cpu(), worker.cpu()), time.perf_counter()
    late = run(_answers(port, way, "paced", PACED, PACED * PACED_ANSWERS))
    seconds = time.perf_counter() - began
    out[f"{way}, {SHARE}"].append((shoal.cpu() - cpu[0]) / seconds * 100)
    out[f"{way}'s worker, {SHARE}"].append((worker.cpu() - cpu[1]) / seconds * 100)
    out[f"{way}, {P99}"].append(statistics.quantiles(late, n=100)[-1] * 1e3)


async def _until_known(port: int) -> None:
    """Wait until each worker answers."""
    async with asyncio.timeout(PATIENCE):
        for way in WAYS:
            while True:
                try:
                    await _answers(port, way, BURST, 1, 1)
                    break
                except RuntimeError:
                    await asyncio.sleep(0.1)


async def _answers(
    port: int, model: str, question: str, streams: int, answers: int
) -> list[float]:
    """Have answers streamed; return how late their chunks came, where they tell."""
    asked = _request(model, question)
    todo = iter(range(answers))
    late: list[float] = []
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(
            *(_client(port, asked, todo, late) for _ in range(streams))
        )
    return late


def _request(model: str, question: str) -> bytes:
    chat = {"messages": [{"role": "user", "content": question}], "stream": True}
    body = json.dumps({"model": model} | chat).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )


async def _client(
    port: int, asked: bytes, todo: Iterator[int], late: list[float]
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in todo:
        writer.write(asked)
        parts: list[bytes] = []
        stamps = texts = 0
        tail = b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            data = await reader.read(1 << 18)
            now = time.monotonic()
            if not data or (not parts and not data.startswith(b"HTTP/1.1 200")):
                raise RuntimeError(f"not an answer: {data[-400:]!r}")
            parts.append(data)
            tail = tail[-6:] + data
            found = _STAMP.findall(data)
            late += [now - float(each) for each in found]
            stamps += len(found)
        texts = b"".join(parts).count(_TEXT)
        if stamps + texts != CHUNKS:
            raise RuntimeError(f"{stamps + texts} chunks, expected {CHUNKS}")
    writer.close()
