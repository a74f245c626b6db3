"""A model whose layers are on several machines, by llama.cpp's own programs."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from engines.outputs import ENDLESS, TINY, ask, chat_of
from harness.llama_cpp import llama_cpp, one_process
from models.tiny_answers import HAIKU
from shoal.domain.errors import ConfigError, Unavailable
from shoal.domain.work import Shard
from shoal.engines.gguf_files import demo_model_path
from shoal.engines.llama_child import MODEL
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.shards import shard_process
from shoal.engines.shards.programs import (
    ShardPrograms,
    find_programs,
)
from shoal.engines.shards.shard_process import ShardProcess
from shoal.engines.shards.split_engine import SplitEngine
from shoal.worker.shard_links import ShardLinks
from shoal.worker.shard_port import ShardPort
from worker.fake_shards import GROUP, RUNNER, shard_at

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="Debian's programs run there"),
]

QUESTIONS = ("Why is the sea salty?", "Name five birds.")
CONTEXT = 1024  # tokens


@pytest.fixture
async def programs() -> ShardPrograms:
    found = await find_programs(llama_cpp())
    assert found is not None
    return found


class Machines:
    """Shards of this machine that stand for those of others, and engines on them."""

    def __init__(self, programs: ShardPrograms, folder: Path) -> None:
        self._programs = programs
        self._folder = folder
        self._opened = AsyncExitStack()
        self.others: list[ShardProcess] = []

    async def close(self) -> None:
        await self._opened.aclose()

    async def lend(self, memory: int | None = None) -> Shard:
        """Lend a shard in this process."""
        name = f"machine {len(self.others)}"
        process = await ShardProcess.start(
            self._programs, self._folder / name, memory=memory, threads=1
        )
        self.others.append(process)
        port = await ShardPort.open(
            "127.0.0.1", GROUP, RUNNER.public_key.hex(), process
        )
        self._opened.push_async_callback(port.close)
        return shard_at(port, name)

    async def run(
        self,
        shards: Sequence[Shard],
        layers: Sequence[int],
        path: Path,
    ) -> SplitEngine:
        """Return an engine that has not started."""
        links = await ShardLinks.open(GROUP, RUNNER, self._programs.protocol, shards)
        engine = SplitEngine(
            *("model", path),
            programs=self._programs,
            layers=layers,
            links=links,
            slots=2,
            context=CONTEXT,
            threads=1,
        )
        self._opened.push_async_callback(engine.close)
        return engine


@pytest.fixture
async def machines(programs: ShardPrograms, tmp_path: Path) -> AsyncIterator[Machines]:
    made = Machines(programs, tmp_path)
    yield made
    await made.close()


async def answers_of(engine: SplitEngine | OpenAIEngine, model: str) -> list[str]:
    return [
        (await ask(engine, replace(chat_of(each, max_tokens=64), model=model))).text
        for each in QUESTIONS
    ]


@pytest.mark.parametrize("layers", [(18, 12), (7, 14, 9)])
async def test_split_model_answers_as_one_process(
    machines: Machines, programs: ShardPrograms, layers: Sequence[int]
) -> None:
    async with one_process(programs, demo_model_path(), 2 * CONTEXT) as whole:
        expected = await answers_of(whole, MODEL)
    shards = [await machines.lend() for _ in layers[1:]]
    engine = await machines.run(shards, layers, demo_model_path())

    await engine.start()

    assert await answers_of(engine, "model") == expected
    together = await asyncio.gather(answers_of(engine, "model"), ask(engine, "Hello."))
    assert [len(each) > 0 for each in together[0]] == [True, True]
    assert engine.activity() is not None
    # Each has computed, and none has it all.
    used = [each.activity() for each in machines.others]
    assert all(each is not None and each.memory < 90 << 20 for each in used)


async def test_answer_is_continued(machines: Machines) -> None:
    engine = await machines.run([await machines.lend()], (1, 1), TINY)
    await engine.start()

    rest = await ask(engine, "Write a haiku.", HAIKU[:20])

    assert HAIKU[:20] + rest.text == HAIKU


async def begin_to_answer(
    engine: SplitEngine,
) -> tuple[asyncio.Task[None], asyncio.Event]:
    """Begin an answer that does not end by itself."""
    begun = asyncio.Event()

    async def read() -> None:
        chat = chat_of("Count to sixty.", options=ENDLESS)
        while True:
            async with aclosing(engine.run(chat)) as pieces:
                async for _ in pieces:
                    begun.set()

    return asyncio.create_task(read()), begun


def rpc_server_of(process: psutil.Process) -> psutil.Process:
    while children := process.children():
        (process,) = children
    return process


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (signal.SIGKILL, "machine 0: the shard was ended by SIGKILL"),
        (signal.SIGSTOP, "machine 0: the shard's process is stopped"),
    ],
)
async def test_lost_shard_ends_the_engine(
    machines: Machines, sent: signal.Signals, reason: str
) -> None:
    engine = await machines.run([await machines.lend()], (1, 1), TINY)
    await engine.start()
    answer, begun = await begin_to_answer(engine)
    await begun.wait()

    rpc_server_of(psutil.Process(machines.others[0].pid)).send_signal(sent)

    with pytest.raises(Unavailable, match=reason):
        await answer
    with pytest.raises(Unavailable, match=reason):
        await engine.refresh()
    with pytest.raises(Unavailable, match=reason):
        await ask(engine, "ping")


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (signal.SIGKILL, "anna: the connection was closed"),
        (signal.SIGSTOP, "anna has been silent for 5 s"),
    ],
)
async def test_lost_machine_ends_the_engine(
    machines: Machines, tmp_path: Path, sent: signal.Signals, reason: str
) -> None:
    lender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worker.lend_shard", str(tmp_path / "lent")),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert lender.stdout is not None
    printed, _, pid = (await lender.stdout.readline()).rpartition(b" ")
    shard = msgspec.json.decode(printed, type=Shard)
    family = psutil.Process(int(pid)).children(recursive=True)
    try:
        engine = await machines.run([shard], (1, 1), TINY)
        await engine.start()
        answer, begun = await begin_to_answer(engine)
        await begun.wait()

        lender.send_signal(sent)

        with pytest.raises(Unavailable, match=reason):
            await answer
        with pytest.raises(Unavailable, match=reason):
            await engine.refresh()
    finally:
        if lender.returncode is None:
            lender.kill()
        await lender.communicate()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 10)
    assert not alive


async def end_of(engine: SplitEngine) -> None:
    """Wait until the engine accepts no jobs; raises Unavailable then."""
    while True:
        await engine.refresh()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kills_child", [True, False])
async def test_dead_server_is_not_started_again(
    machines: Machines, *, kills_child: bool
) -> None:
    engine = await machines.run([await machines.lend()], (1, 1), TINY)
    await engine.start()
    assert engine.pid is not None
    child = psutil.Process(engine.pid)
    (server,) = child.children()

    (child if kills_child else server).kill()

    with pytest.raises(Unavailable, match="ended by SIGKILL"):
        await end_of(engine)
    with pytest.raises(Unavailable, match="ended by SIGKILL"):
        await ask(engine, "ping")
    _, alive = await asyncio.to_thread(psutil.wait_procs, [server], 10)
    assert not alive


async def test_shard_with_too_little_memory_is_said(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_process, "OWN_MEMORY", 0)
    shard = await machines.lend(memory=20 << 20)
    engine = await machines.run([shard], (18, 12), demo_model_path())

    with pytest.raises((ConfigError, Unavailable), match="alloc"):
        await engine.start()


async def test_damaged_file_is_said(machines: Machines, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(TINY.read_bytes()[:20_000])
    engine = await machines.run([await machines.lend()], (1, 1), path)

    with pytest.raises(ConfigError, match=r"damaged\.gguf"):
        await engine.start()
