"""What it costs that several machines run a model together: SmolLM2-135M, 30 layers.

The machines are programs of this one, with one thread each, and relays delay what goes
between them.  One of them runs the model, with its own layers and the output; "plain"
is llama.cpp's own rpc-server, unencrypted and without Shoal between.  Answers have 32
tokens at temperature 0, and the faster of two counts, as other load only slows them;
four at once go to four slots.

*Wide*: a model of 160 MB, of which one machine has one layer, and the other three, as
the machine that runs it sends them, or as copied from a coordinator before.
"""

import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from itertools import product
from pathlib import Path

from load import run
from processes import HERE, Program, cpu_of, free_port, program
from report import Goal, Results
from shoal.domain.work import Chat, Shard
from shoal.engines.engine import Engine
from shoal.engines.gguf_files import demo_model_path
from shoal.engines.llama_child import MODEL
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.shards.programs import (
    ShardPrograms,
    find_programs,
    program_environment,
)
from shoal.engines.shards.split_child import is_loaded, port_of
from shoal.engines.shards.split_engine import ShardPorts, SplitEngine
from shoal.ledger.keys import Signer
from shoal.models.fetch import fetch_parts
from shoal.models.peer_connection import DialledPeer
from shoal.models.tensor_cache import TensorCache
from shoal.worker.shard_links import ShardLinks

sys.path.insert(0, str(HERE.parent / "tests"))

from harness.wide_model import write_wide_model

ROUNDS = 2
PROGRAMS = HERE.parent / "build" / "llama.cpp"
LAYERS = {2: (18, 12), 3: (11, 11, 8)}  # by the number of machines
ROUND_TRIPS = (0, 5, 20)  # ms
TOKENS = 32
TRIES = 2
AT_ONCE = 4
CONTEXT = 1024
QUESTIONS = ("Why is the sea salty?", "Name birds.", "Tell a tale.", "What is ice?")
OPTIONS = {"ignore_eos": True}
GROUP, SIGNER = "bench", Signer.from_seed(bytes(32))

WHOLE = "one process: tokens/s"


def _split(machines: int, trip: int, plain: str = "") -> str:
    return f"{plain}{machines} machines, round trip {trip} ms: tokens/s"


def _plain(trip: int) -> str:
    return _split(2, trip, "plain, ")


TOGETHER = f"2 machines, round trip 20 ms, {AT_ONCE} answers at once: tokens/s"
BYTES = "to a shard and back for a token: kB"
TUNNEL = "a lender's end of the connection: CPU ms a token"
LOADED = "2 machines, round trip 0 ms: s to load"
WIDE_SENT = "wide, layers sent by the machine that runs it: MB to the other"
WIDE_COPIED = "wide, layers copied before: MB to the other"
WIDE_LOADED = "wide, layers sent by the machine that runs it: s to load"
WIDE_LOADED_COPY = "wide, layers copied before: s to load"
WIDE_COPY = "wide: s to copy three layers"

GOALS = [
    Goal(_plain(0), WHOLE),
    *(Goal(_split(n, 0), WHOLE) for n in LAYERS),
    Goal(_split(2, 0), _plain(0)),
    Goal(_split(2, 5), _plain(5), at_least=0.9),
    Goal(TOGETHER, _split(2, 20), at_least=1.6),
    Goal(BYTES, at_most=20),
    Goal(TUNNEL),
    Goal(WIDE_COPIED, WIDE_SENT),
    Goal(WIDE_LOADED_COPY, WIDE_LOADED),
    Goal(WIDE_COPY),
]


def measure(rounds: int) -> Results:
    return run(_measure(rounds))


async def _measure(rounds: int) -> Results:
    programs = await find_programs(PROGRAMS)
    assert programs is not None
    results: Results = defaultdict(list)
    for _ in range(rounds):
        async with _one_process(programs) as whole:
            results[WHOLE].append(await _speed(whole, MODEL))
        for machines, trip in product(LAYERS, ROUND_TRIPS):
            if machines == 2 and trip < 20:
                await _measure_plain(programs, trip, results)
            await _measure_split(programs, machines, trip, results)
        with tempfile.TemporaryDirectory() as folder:
            await _measure_copied(programs, Path(folder), results)
    return results


async def _measure_plain(programs: ShardPrograms, trip: int, results: Results) -> None:
    async with (
        _plain_shard(programs) as port,
        _Relay(port, trip) as relay,
        _engine(programs, _PlainLinks(relay.port)) as engine,
    ):
        results[_plain(trip)].append(await _speed(engine))


async def _measure_copied(
    programs: ShardPrograms, folder: Path, results: Results
) -> None:
    model = await asyncio.to_thread(write_wide_model, folder / "m.gguf")
    token, cache = "bench-of-copies", folder / "copied"
    serve = ["serve", "--port", "0", "--data-dir", str(folder / "data"), "--json"]
    serve += ["--share", f"wide={model}", "--join-token", token]
    with program("-m", "shoal", *serve, "--log-level", "warning") as serving:
        url = f"http://127.0.0.1:{serving.report['ports']['http']}"
        began = time.monotonic()
        await fetch_parts(
            *("wide", [DialledPeer(url, token)]),
            lambda content: TensorCache(cache, content, range(1, 4), 1 << 30),
        )
        results[WIDE_COPY].append(time.monotonic() - began)
    for rows, extra in (
        ((WIDE_SENT, WIDE_LOADED), ()),
        ((WIDE_COPIED, WIDE_LOADED_COPY), (str(cache),)),
    ):
        async with AsyncExitStack() as stack:
            own = stack.enter_context(tempfile.TemporaryDirectory())
            key = SIGNER.public_key.hex()
            command = [str(HERE / "giant_shard.py"), str(PROGRAMS), own, GROUP, key]
            lender = stack.enter_context(program(*command, *extra))
            relay = await stack.enter_async_context(_Relay(lender.report["port"], 0))
            address = ("127.0.0.1",), relay.port, lender.report["fingerprint"]
            shards = [Shard("machine", 3, 0, *address)]
            links = await ShardLinks.open(GROUP, SIGNER, programs.protocol, shards)
            began = time.monotonic()
            await stack.enter_async_context(_engine(programs, links, (3, 1), model))
            results[rows[1]].append(time.monotonic() - began)
            results[rows[0]].append(relay.passed / 1e6)


async def _measure_split(
    programs: ShardPrograms, machines: int, trip: int, results: Results
) -> None:
    async with AsyncExitStack() as stack:
        relays: list[_Relay] = []
        lenders: list[Program] = []
        shards: list[Shard] = []
        for index, layers in enumerate(LAYERS[machines][:-1]):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            key = SIGNER.public_key.hex()
            command = (str(HERE / "giant_shard.py"), str(PROGRAMS), folder, GROUP, key)
            lender = stack.enter_context(program(*command))
            relay = await stack.enter_async_context(_Relay(lender.report["port"], trip))
            relays.append(relay)
            lenders.append(lender)
            address = ("127.0.0.1",), relay.port, lender.report["fingerprint"]
            shards.append(Shard(f"machine {index}", layers, 0, *address))
        links = await ShardLinks.open(GROUP, SIGNER, programs.protocol, shards)
        began = time.monotonic()
        layers = LAYERS[machines]
        engine = await stack.enter_async_context(_engine(programs, links, layers))
        if (machines, trip) == (2, 0):
            results[LOADED].append(time.monotonic() - began)
        row, passed, used = _split(machines, trip), 0, 0.0

        def on_first() -> None:
            nonlocal passed, used
            passed, used = relays[0].passed, cpu_of(lenders[0].process.pid)

        results[row].append(await _speed(engine, on_first=on_first))
        if (machines, trip) == (2, 5):
            tokens = TOKENS - 1
            results[BYTES].append((relays[0].passed - passed) / tokens / 1000)
            took = cpu_of(lenders[0].process.pid) - used
            results[TUNNEL].append(took / tokens * 1000)
        if (machines, trip) == (2, 20):
            results[TOGETHER].append(await _speed(engine, at_once=AT_ONCE))


async def _speed(
    engine: Engine,
    model: str = "model",
    at_once: int = 1,
    on_first: Callable[[], None] = lambda: None,
) -> float:
    """Return the tokens a second of answers, after the first token of all."""
    firsts: list[float] = []

    async def answer(question: str) -> None:
        messages = ({"role": "user", "content": question},)
        work = Chat(model, messages, TOKENS, 0.0, OPTIONS)
        async with aclosing(engine.run(work)) as items:
            await anext(items)
            on_first()
            firsts.append(time.monotonic())
            async for _ in items:
                pass

    speeds = []
    for first in range(TRIES):
        firsts.clear()
        asked = [QUESTIONS[(first + each) % len(QUESTIONS)] for each in range(at_once)]
        await asyncio.gather(*map(answer, asked))
        speeds.append(at_once * (TOKENS - 1) / (time.monotonic() - max(firsts)))
    return max(speeds)


@asynccontextmanager
async def _engine(
    programs: ShardPrograms,
    links: ShardPorts,
    layers: Sequence[int] = LAYERS[2],
    path: Path | None = None,
) -> AsyncIterator[SplitEngine]:
    engine = SplitEngine(
        *("model", path or demo_model_path()),
        programs=programs,
        layers=layers,
        links=links,
        slots=AT_ONCE,
        context=CONTEXT,
        threads=1,
    )
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def _one_process(programs: ShardPrograms) -> AsyncIterator[OpenAIEngine]:
    server = await asyncio.create_subprocess_exec(
        *(str(programs.llama_server), "-m", str(demo_model_path()), "-a", MODEL),
        *f"-ngl 0 -np {AT_ONCE} -c {AT_ONCE * CONTEXT} -t 1 --port 0".split(),
        *("--cache-ram", "0"),
        env=program_environment(),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        while (port := port_of(server.pid)) is None or not is_loaded(port):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        engine = OpenAIEngine(f"http://127.0.0.1:{port}/v1")
        await engine.start()
        yield engine
        await engine.close()
    finally:
        server.kill()
        await server.wait()


@asynccontextmanager
async def _plain_shard(programs: ShardPrograms) -> AsyncIterator[int]:
    """Run rpc-server on a loopback port."""
    port = free_port()
    server = await asyncio.create_subprocess_exec(
        *(str(programs.rpc_server), "-H", "127.0.0.1", "-p", str(port), "-t", "1"),
        env=program_environment(),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            await asyncio.sleep(0.02)
        yield port
    finally:
        server.kill()
        await server.wait()


class _PlainLinks:
    """The port of rpc-server itself."""

    def __init__(self, port: int) -> None:
        self.ports = (port,)
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """There is nothing to close."""


class _Relay:
    """Passes connections on to a port, half a round trip later, and counts bytes."""

    def __init__(self, port: int, trip: int) -> None:
        self.passed = 0  # bytes in both directions
        self.port = 0
        self._to = port
        self._delay = trip / 2000  # seconds
        self._server: asyncio.Server

    async def __aenter__(self) -> "_Relay":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        with suppress(asyncio.CancelledError):  # the bench ends
            await asyncio.gather(
                self._pass_on(reader, back), self._pass_on(there, writer)
            )

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        loop, data = asyncio.get_running_loop(), b"begun"
        with suppress(ConnectionError):
            while data := await reader.read(1 << 18):
                self.passed += len(data)
                loop.call_later(self._delay, writer.write, data)
        loop.call_later(self._delay, writer.close)
