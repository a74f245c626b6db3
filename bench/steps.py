"""Calls of Python functions that a unit of each kind of work takes.

``shoal serve`` and ``shoal join`` count them in all their threads (bench/counted.py);
clients, engines and nodes of other makers are this process.  *hub* is that of a
coordinator with one front.  Resumptions of coroutines
count, functions of C do not.  Unlike time, it hardly varies with what else the machine
does.  A chat has 64 chunks, in one burst; a chunk or frame *alone* is written when the
client has the one before, and is the difference of a long answer and a short one.
*kept* is what bench/steps.json has of the latest `make bench NAME=steps WRITE=1`, and
tests/live/test_steps.py fails for what takes 5 % more.
"""

import asyncio
import json
import os
import platform
import struct
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
)
from contextlib import (
    AbstractContextManager,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from functools import partial
from typing import IO, TypeAlias

from aiohttp import web

import engine
import shoal
from counted import LOOK
from jobs import at_work, clients_of
from load import ask_all, connected, post, request, run
from node import BINARY, TEXT, frame, join, receive
from processes import HERE, Program, program
from relayed import registered, serve
from report import Goal, Results
from scaleout import hub_of
from tealenet import chat

ROUNDS = 7
AT_MOST = 1.05  # of what is kept
KEPT = HERE / "steps.json"
KEY = "k"
TOKEN = "bench-token"  # of a length that calls of functions ask for
WORKERS = 200  # of a model that has many
POLL = 0.05  # seconds
PATIENCE = 120.0  # seconds for anything
FRAMES = 500  # of an answer in a burst
STREAMED = request("burst", key=KEY, stream=True)
WHOLE = request("burst", key=KEY, stream=False)

Calls: TypeAlias = Counter[str]
"""How often each function is called, by ``PATH:LINE NAME``."""
Programs: TypeAlias = Mapping[str, "Process"]
"""Those whose calls are counted, by what they are."""
Measured: TypeAlias = Callable[["Unit"], Awaitable[None]]
Start: TypeAlias = Callable[..., AbstractContextManager[Program]]

GOALS: list[Goal] = []  # by what is kept when it begins
_latest: dict[str, Calls] = {}


@dataclass(frozen=True, slots=True)
class Process:
    """A process that counts its calls; ``stdout`` is where it tells of them."""

    pid: int
    stdout: IO[str]

    @classmethod
    def of(cls, running: Program) -> "Process":
        assert running.process.stdout is not None
        return cls(running.process.pid, running.process.stdout)


@dataclass(frozen=True, slots=True)
class Unit:
    """What is done ``many`` times, and what ``few`` times takes off again."""

    name: str
    act: Callable[[int], Awaitable[object]]
    many: int
    few: int = 0
    at_once: int = 1  # of which ``act`` does so many each time
    alone: bool = False
    """Nothing else is done meanwhile (see ``rounds_of``), and the test counts it, too:
    how much is done together depends on the load of the machine."""


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    found: dict[str, list[Calls]] = defaultdict(list)

    async def measured(programs: Programs, unit: Unit) -> None:
        async with aclosing(rounds_of(unit, programs)) as all_rounds:
            for _ in range(rounds):
                for role, calls in (await anext(all_rounds)).items():
                    found[f"{role}, {unit.name}"].append(calls)

    run(each_unit(measured, counted))
    kept = json.loads(KEPT.read_text())["calls"] if KEPT.exists() else {}
    GOALS.clear()
    for row, each in found.items():
        results[row] = [calls.total() for calls in each]
        _latest[row] = sorted(each, key=Counter.total)[len(each) // 2]
        if row in kept:
            results[f"kept, {row}"] = rounds * [sum(kept[row].values())]
            GOALS.append(Goal(row, f"kept, {row}", at_most=AT_MOST))
    return results


def keep() -> None:
    """Write what was measured, by part of the program, for the test to compare."""
    rows = ",\n".join(
        f"{json.dumps(row)}: {json.dumps(by_part(calls))}"
        for row, calls in _latest.items()
    )
    python = ".".join(platform.python_version_tuple()[:2])
    KEPT.write_text(f'{{"python": "{python}", "calls": {{\n{rows}\n}}}}\n')


def by_part(calls: Calls) -> dict[str, float]:
    """Return the calls of each package: Shoal's own, or a library."""
    parts: Counter[str] = Counter()
    for function, times in calls.items():
        parts[part(function)] += times
    # What is less is of timers.
    return {each: round(n, 1) for each, n in sorted(parts.items()) if abs(n) >= 0.05}


def part(function: str) -> str:
    """Return the package that a function is in, such as ``pool`` or ``aiohttp``."""
    for folder in ("/src/shoal/", "/site-packages/"):
        if folder in function:
            return function.split(folder)[1].split("/")[0].split(":")[0]
    return "standard library"


async def rounds_of(unit: Unit, programs: Programs) -> AsyncIterator[dict[str, Calls]]:
    """Yield what each program calls for one of a unit, again and again.

    What is still to be done at the end of a round is counted in the next one.  A unit
    that is done alone calls each function a whole number of times; the rest is of
    timers, which call the more often the busier the machine is.
    """
    units = (unit.many - unit.few) * unit.at_once
    # Connections and caches are there afterwards.
    await _during(unit, unit.few or unit.many, programs)
    while True:
        found = await _during(unit, unit.many, programs)
        if unit.few:
            for role, calls in (await _during(unit, unit.few, programs)).items():
                found[role].subtract(calls)
        yield {
            role: Counter(
                {
                    each: round(times / units) if unit.alone else times / units
                    for each, times in calls.items()
                }
            )
            for role, calls in found.items()
        }


async def _during(unit: Unit, number: int, programs: Programs) -> dict[str, Calls]:
    async with asyncio.timeout(PATIENCE):
        await unit.act(number)
    for each in programs.values():
        os.kill(each.pid, LOOK)
    return {role: _told(each) for role, each in programs.items()}


def _told(process: Process) -> Calls:
    for line in process.stdout:
        if (event := json.loads(line)).get("event") == "calls":
            return Counter(event["calls"])
    raise RuntimeError("a program that is counted has ended; its log says why")


def counted(*arguments: str) -> AbstractContextManager[Program]:
    """Run ``shoal`` within the block, with its calls counted."""
    errors = subprocess.DEVNULL if "info" in arguments else None
    return program(str(HERE / "counted.py"), *arguments, stderr=errors)


async def each_unit(
    measured: Callable[[Programs, Unit], Awaitable[None]], start: Start
) -> None:
    """Have each unit measured while the programs that it needs run."""
    with tempfile.TemporaryDirectory() as folder:
        async with engine.serving() as behind:
            models = ["--engine", f"http://127.0.0.1:{behind}/v1", "--slots", "256"]
            tasks = ["--tasks", str(HERE / "tasks_same.py"), "--slots", "2"]
            with _coordinator(start, f"{folder}/one", "error") as (port, serving):
                only = partial(measured, {"coordinator": Process.of(serving)})
                await _tealenet_chats(only, port)
                await _nodes_answer(only, port)
                await _dispatch_jobs(only, port)
                async with _worker(
                    start, f"{folder}/two", "error", port, *tasks
                ) as worker:
                    both = partial(measured, _both(serving, worker))
                    await _calls(both, port)
                async with _worker(
                    start, f"{folder}/three", "error", port, *models
                ) as worker:
                    both = partial(measured, _both(serving, worker))
                    await _chats(both, port)
                    await _chunks(both, port)
            with _coordinator(start, f"{folder}/four", "info") as (port, serving):
                async with _worker(
                    start, f"{folder}/five", "info", port, *models
                ) as worker:
                    both = partial(measured, _both(serving, worker))
                    await _chats(both, port, ", log level info")
            front = ["--fronts", "1"]
            with _coordinator(start, f"{folder}/six", "error", *front) as (port, parts):
                async with _worker(start, f"{folder}/seven", "error", port, *models):
                    hub = Process(hub_of(parts), Process.of(parts).stdout)
                    await _chats(partial(measured, {"hub": hub}), port)


def _both(serving: Program, worker: Program) -> Programs:
    return {"coordinator": Process.of(serving), "worker": Process.of(worker)}


@contextmanager
def _coordinator(
    start: Start, folder: str, log_level: str, *options: str
) -> Iterator[tuple[int, Program]]:
    secrets = ["--api-key", KEY, "--join-token", TOKEN]
    open_to_all = ["--dispatch-open", "--tealenet-open", "--relay-open"]
    how = ["--port", "0", "--data-dir", folder, "--json", "--log-level", log_level]
    with start("serve", *secrets, *open_to_all, *how, *options) as serving:
        yield serving.report["ports"]["http"], serving


@asynccontextmanager
async def _worker(
    start: Start, folder: str, log_level: str, port: int, *offer: str
) -> AsyncIterator[Program]:
    where = [f"http://127.0.0.1:{port}", "--token", TOKEN, "--data-dir", folder]
    how = ["--json", "--log-level", log_level]
    with ExitStack() as stack:
        # In a thread, for it looks at the engine, which is here.
        joining = start("join", *where, *offer, *how)
        yield await asyncio.to_thread(stack.enter_context, joining)


async def _chats(measured: Measured, port: int, how: str = "") -> None:
    for what, asked, most in (
        ("chat streamed", STREAMED, 64),
        ("chat not streamed", WHOLE, 16),
    ):
        for clients, many in ((1, 20), (most, 64)):

            async def ask(
                number: int, asked: bytes = asked, clients: int = clients
            ) -> None:
                await ask_all(port, asked, clients, number)

            at_once = f"{clients} at once" if clients > 1 else "one client"
            name, alone = f"{what}, {at_once}{how}", clients == 1
            await measured(Unit(name, ask, many, alone=alone))


async def _chunks(measured: Measured, port: int) -> None:
    for clients, answers in ((1, 4), (16, 1)):

        async def ask(
            chunks: int, clients: int = clients, answers: int = answers
        ) -> None:
            for _ in range(answers):
                streams = (_step_by_step(port, each, chunks) for each in range(clients))
                await asyncio.gather(*streams)

        at_once = f"{clients} at once" if clients > 1 else "one client"
        units = clients * answers
        sole = clients == 1  # else how many are read together is a matter of time
        name = f"chunk alone, {at_once}"
        await measured(Unit(name, ask, 60, 20, units, alone=sole))


async def _step_by_step(port: int, stream: int, chunks: int) -> None:
    """Have an answer whose chunks are written when the client has the one before."""
    question, read = f"alone {stream}", asyncio.Semaphore(0)

    async def write(response: web.StreamResponse) -> None:
        for chunk in (engine.FIRST, *[engine.NEXT] * (chunks - 1)):
            await response.write(chunk)
            await read.acquire()
        await response.write_eof(engine.LAST)

    engine.WAYS[question] = write
    asked = request(question, key=KEY, stream=True)
    await _read(port, asked, engine.TEXT.encode(), b"[DONE]", read)


async def _read(
    port: int, asked: bytes, each: bytes, last: bytes, read: asyncio.Semaphore
) -> None:
    """Read an answer up to ``last``, and tell of ``each`` that has come."""
    async with connected(port) as client:
        client.writer.write(asked)
        answer, seen = b"", 0
        while last not in answer:
            if not (data := await client.reader.read(1 << 16)):
                raise RuntimeError(f"not the whole answer: {answer[-400:]!r}")
            answer += data
            for _ in range(seen, seen := answer.count(each)):
                read.release()


async def _nodes_answer(measured: Measured, port: int) -> None:
    """Have nodes of GrandSage answer, on its own HTTP API and on OpenAI's."""
    frames, read = 0, asyncio.Semaphore()

    async def burst(writer: asyncio.StreamWriter, task: bytes) -> None:
        writer.write(frame(BINARY, task + b" token") * frames + frame(BINARY, task))

    async def step_by_step(writer: asyncio.StreamWriter, task: bytes) -> None:
        for _ in range(frames):
            writer.write(frame(BINARY, task + b" token"))
            await read.acquire()
        writer.write(frame(BINARY, task))

    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    data = json.dumps(body | {"max_new_tokens": 999}).encode()
    asked = post("/api/chat", data, KEY)

    async def ask(number: int, answers: int) -> None:
        nonlocal frames, read
        frames = number
        for _ in range(answers):
            read = asyncio.Semaphore(0)
            await _read(port, asked, b'{"o"', b'{"done":true}', read)

    async def ask_in_json(number: int) -> None:
        nonlocal frames
        frames = engine.CHUNKS
        await ask_all(port, WHOLE, 1, number)

    async with _nodes(port, 1, burst):
        name = f"GrandSage answer of {FRAMES} frames in a burst"
        await measured(Unit(name, partial(ask, FRAMES), 10, alone=True))
    async with _nodes(port, 1, step_by_step):
        alone = partial(ask, answers=4)
        await measured(Unit("GrandSage frame alone", alone, 60, 20, 4, alone=True))
    for workers in (1, WORKERS):
        async with _nodes(port, workers, burst):
            name = f"chat with {workers} workers of the model"
            await measured(Unit(name, ask_in_json, 20, alone=True))


@asynccontextmanager
async def _nodes(
    port: int,
    number: int,
    answer: Callable[[asyncio.StreamWriter, bytes], Awaitable[None]],
) -> AsyncIterator[None]:
    """Have nodes of GrandSage there for the length of the block."""
    here = asyncio.Semaphore(0)

    async def work(name: str) -> None:
        reader, writer = await join(port, name, token=TOKEN)
        here.release()
        try:
            while True:
                opcode, payload = await receive(reader)
                if opcode == TEXT:
                    await answer(writer, struct.pack("!I", json.loads(payload)["id"]))
        finally:
            writer.close()

    async with asyncio.TaskGroup() as tasks:
        working = [tasks.create_task(work(f"n{each}")) for each in range(number)]
        for _ in working:
            await here.acquire()
        yield
        for each in working:
            each.cancel()


async def _dispatch_jobs(measured: Measured, port: int) -> None:
    async with at_work(port, 1, signs=True), clients_of(port) as (client, *_):

        async def wait_for_each(jobs: int) -> None:
            for _ in range(jobs):
                await client.one()

        name = "Dispatch job and its result, one client"
        await measured(Unit(name, wait_for_each, 20, alone=True))
    async with at_work(port, 32, signs=True), clients_of(port) as clients:

        async def commit(jobs: int) -> None:
            todo = iter(range(jobs))
            done = await clients[0].logged() + jobs
            await asyncio.gather(*(each.commit_all(todo) for each in clients))
            while await clients[0].logged() < done:  # noqa: ASYNC110  # afar
                await asyncio.sleep(POLL)

        await measured(Unit("Dispatch job, 64 at once", commit, 64))


async def _tealenet_chats(measured: Measured, port: int) -> None:
    """Have a node of TealeNet behind the relay answer."""
    node = await registered(port, 1, "m")
    serving = asyncio.create_task(serve(node))
    async with connected(port) as client:

        async def ask(number: int) -> None:
            for _ in range(number):
                # Until the node is known, which nothing tells.
                while await chat(client.reader, client.writer) is None:  # noqa: ASYNC110
                    await asyncio.sleep(POLL)

        await ask(1)
        await measured(
            Unit("chat behind TealeNet's relay, one client", ask, 20, alone=True)
        )
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    node.writer.close()


async def _calls(measured: Measured, port: int) -> None:
    for what, durable, many in (
        ("call in memory", False, 2000),
        ("durable call", True, 200),
    ):
        url = f"http://127.0.0.1:{port}"
        with shoal.Pool(url, api_key=KEY, durable=durable) as pool:

            def one_by_one(number: int, pool: shoal.Pool = pool) -> None:
                for x in range(number):
                    pool.submit("bench.same", x).result()

            def all_at_once(number: int, pool: shoal.Pool = pool) -> None:
                list(pool.map("bench.same", range(number)))

            # How many are answered together is a matter of time.
            for act, at_once, number, alone in (
                (one_by_one, "one at a time", 50, True),
                (all_at_once, f"{many} at once", many, False),
            ):
                apart = partial(asyncio.to_thread, act)
                name = f"{what}, {at_once}"
                await measured(Unit(name, apart, number, alone=alone))
