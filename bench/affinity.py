"""Conversations over four engines with prefix caches: the wait for the first text.

Each engine (bench/prefix_engines.py) reads 4,000 tokens of prompts in a second, one
prompt at a time, and only what is not in its cache, which holds sixteen long
conversations.  Clients hold conversations of six turns, with one of four instructions
of 400 tokens, and think for a moment before each turn.  *least busy* is Shoal without
its memory of what workers have read.  vllm-router 0.1.17 has its policy cache_aware,
with the limits that it comes with.  All gateways get the same conversations.
"""

import asyncio
import json
import random
import statistics
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import aiohttp

from load import run
from peers import KEY, Gateway, vllm_router
from processes import HERE, program
from report import Goal, Results

ROUNDS = 3
ENGINES = 4
TOKEN = "token of the bench"
SLOTS = "16"  # of a worker
LOADS = {"8 clients": 8, "24 clients": 24}
CONVERSATIONS = 3  # of a client
TURNS = 6
INSTRUCTIONS = 4
THINKING = 0.4  # seconds, on average
WORD = "word "  # about a token
BEST, LEAST, PEER = "shoal", "least busy", "vllm-router"
P50, P99, READ = "p50 ms", "p99 ms", "% of tokens read"

GOALS = [
    Goal(f"{BEST}, {load}: {what}", f"{other}, {load}: {what}", at_most=most)
    for load in LOADS
    for what, most in ((P50, 1.0), (P99, 1.0))
    for other in (LEAST, PEER)
]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    for number in range(rounds):
        for load, clients in LOADS.items():
            for name in (BEST, LEAST, PEER):
                # Engines of their own, which have read nothing.
                with ExitStack() as stack:
                    engines = stack.enter_context(
                        program(str(HERE / "prefix_engines.py"), str(ENGINES))
                    )
                    ports = engines.report["ports"]
                    gateway = stack.enter_context(_gateway(name, ports))
                    waits = run(_talk(gateway.port, clients, number))
                    counts = [*map(_counts, ports)]
                hundredths = statistics.quantiles(waits, n=100)
                row = f"{name}, {load}"
                results[f"{row}: {P50}"].append(hundredths[49] * 1e3)
                results[f"{row}: {P99}"].append(hundredths[98] * 1e3)
                read, asked = (sum(each[k] for each in counts) for k in counts[0])
                results[f"{row}: {READ}"].append(100 * read / asked)
    return results


@contextmanager
def _gateway(name: str, engines: Sequence[int]) -> Iterator[Gateway]:
    if name == PEER:
        with vllm_router(*engines, policy="cache_aware") as gateway:
            yield gateway
        return
    runs = [str(HERE / "least_busy.py")] if name == LEAST else ["-m", "shoal"]
    quiet = ["--log-level", "warning", "--json"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        keys = ["--api-key", KEY, "--join-token", TOKEN, "--data-dir", folder]
        serve = [*runs, "serve", "--port", "0", *keys, *quiet]
        serving = stack.enter_context(program(*serve))
        port = serving.report["ports"]["http"]
        for number, engine in enumerate(engines):
            there = [
                f"http://127.0.0.1:{port}",
                "--token",
                TOKEN,
                "--name",
                f"w{number}",
            ]
            engine_of = ["--engine", f"http://127.0.0.1:{engine}/v1", "--slots", SLOTS]
            stack.enter_context(
                program("-m", "shoal", "join", *there, *engine_of, *quiet)
            )
        yield Gateway(name, serving, port)


async def _talk(port: int, clients: int, seed: int) -> list[float]:
    """Hold all conversations; return the waits for first texts, in seconds."""
    waits: list[float] = []
    headers = {"Authorization": f"Bearer {KEY}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(headers=headers, connector=connector) as session,
        asyncio.TaskGroup() as tasks,
    ):
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        for client in range(clients):
            chance = random.Random(f"{seed} {client}")
            tasks.create_task(_client(session, url, client, chance, waits))
    return waits


async def _client(
    session: aiohttp.ClientSession,
    url: str,
    client: int,
    chance: random.Random,
    waits: list[float],
) -> None:
    for number in range(CONVERSATIONS):
        rules = f"Rules {chance.randrange(INSTRUCTIONS)}. {WORD * 320}"
        messages = [{"role": "system", "content": rules}]
        for turn in range(TURNS):
            await asyncio.sleep(chance.expovariate(1 / THINKING))
            words = WORD * chance.randint(50, 400)
            question = f"{client} {number} {turn}: {words}"
            messages.append({"role": "user", "content": question})
            body = {"model": "m", "messages": messages, "stream": True}
            began = time.perf_counter()
            text = ""
            async with session.post(url, json=body) as got:
                got.raise_for_status()
                async for line in got.content:
                    if b'"content":' not in line:
                        continue
                    if not text:
                        waits.append(time.perf_counter() - began)
                    event = json.loads(line.removeprefix(b"data: "))
                    text += event["choices"][0]["delta"]["content"]
            messages.append({"role": "assistant", "content": text})


def _counts(port: int) -> dict[str, int]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/counts") as got:
        counts: dict[str, int] = json.load(got)
        return counts
