"""The process of the embedded engine: its start, its crashes, its log and its end."""

import asyncio
import os
import signal
import sys
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from engines.outputs import ENDLESS, TINY, ask, chat_of
from engines.test_gguf_export import CONFIG, tensors
from shoal.domain.errors import ConfigError, Unavailable
from shoal.engines import engine_child
from shoal.engines.engine_child import (
    LlamaProcess,
    first_error,
    last_unformatted_line,
)
from shoal.engines.gguf_export import write_gguf
from shoal.engines.gguf_vocabulary import byte_vocabulary
from shoal.engines.llama_engine import LlamaEngine, restart_delay

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")


async def kill(engine: LlamaEngine) -> None:
    assert engine.pid is not None
    psutil.Process(engine.pid).kill()


@posix
async def test_killed_process_fails_its_chats_and_is_replaced(
    doomed: LlamaEngine,
) -> None:
    async with aclosing(doomed.run(chat_of("ping", options=ENDLESS))) as pieces:
        await anext(pieces)
        await kill(doomed)

        with pytest.raises(Unavailable, match="ended by SIGKILL"):
            async for _ in pieces:
                pass

    assert (await ask(doomed, "ping")).text == "pong"


@posix
async def test_only_a_process_that_works_has_moved(doomed: LlamaEngine) -> None:
    assert doomed.pid is not None
    process = psutil.Process(doomed.pid)
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110
        await asyncio.sleep(0)
    before, after = doomed.activity(), doomed.activity()
    assert before is not None
    assert after is not None
    assert not after.has_moved_since(before)

    process.resume()
    while not after.has_moved_since(before):
        await ask(doomed, "Count to sixty.")
        after = doomed.activity()
        assert after is not None

    process.kill()
    while doomed.activity() is not None:  # noqa: ASYNC110
        await asyncio.sleep(0)


@posix
async def test_crash_loop_delays_the_restart(
    doomed: LlamaEngine,
) -> None:
    for _ in range(2):
        async with aclosing(doomed.run(chat_of("ping", options=ENDLESS))) as pieces:
            await anext(pieces)
            await kill(doomed)
            with pytest.raises(Unavailable, match="ended by SIGKILL"):
                async for _ in pieces:
                    pass

    with pytest.raises(Unavailable, match="ended by SIGKILL") as refusal:
        await ask(doomed, "ping")
    assert refusal.value.retry_after == 1
    with pytest.raises(Unavailable, match="ended by SIGKILL"):
        await doomed.refresh()


@pytest.mark.parametrize(
    ("failures", "delay"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (8, 60), (2000, 60)]
)
def test_restart_delay_grows(failures: int, delay: float) -> None:
    assert restart_delay(failures) == delay


@posix
async def test_close_kills_a_hanging_process(
    doomed: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_child, "EXIT_LIMIT", 0.05)
    assert doomed.pid is not None
    os.kill(doomed.pid, signal.SIGSTOP)

    await doomed.close()

    with pytest.raises(ProcessLookupError):
        os.kill(doomed.pid, 0)


async def test_close_ends_running_chats(doomed: LlamaEngine) -> None:
    async with aclosing(doomed.run(chat_of("ping", options=ENDLESS))) as pieces:
        await anext(pieces)
        await doomed.close()

        with pytest.raises(Unavailable, match="the engine was closed"):
            async for _ in pieces:
                pass

    with pytest.raises(Unavailable, match="the engine was closed"):
        await ask(doomed, "ping")


async def test_close_aborts_a_loading_model() -> None:
    engine = LlamaEngine("tiny", TINY)
    starting = asyncio.create_task(engine.start())
    while engine.pid is None:  # noqa: ASYNC110  (nothing announces it)
        await asyncio.sleep(0)

    await engine.close()

    with pytest.raises(ConfigError, match="the engine was closed"):
        await starting


async def test_first_chat_starts_the_process() -> None:
    engine = LlamaEngine("tiny", TINY)

    assert (await ask(engine, "ping")).text == "pong"

    await engine.close()


def test_runs_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def kill_and_ask() -> str:
        engine = LlamaEngine("tiny", TINY)
        async with aclosing(engine.run(chat_of("ping", options=ENDLESS))) as pieces:
            await anext(pieces)
            await kill(engine)
            with pytest.raises(Unavailable):
                async for _ in pieces:
                    pass
        text = (await ask(engine, "ping")).text
        await engine.close()
        return text

    assert uvloop.run(kill_and_ask()) == "pong"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
async def test_process_does_not_outlive_the_worker() -> None:
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, TINY), stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    process = os.pidfd_open(int(await worker.stdout.readline()))
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(process, ended.set)

    worker.kill()
    await worker.communicate()

    await ended.wait()
    asyncio.get_running_loop().remove_reader(process)
    os.close(process)


WORKER = """
import asyncio, sys
from pathlib import Path
from shoal.domain.work import Chat
from shoal.engines.llama_engine import LlamaEngine

async def main():
    engine = LlamaEngine("tiny", Path(sys.argv[1]))
    message = {"role": "user", "content": "ping"}
    chat = engine.run(Chat("tiny", (message,), options={"ignore_eos": True}))
    await anext(chat)
    print(engine.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is not a GGUF file"),
        (b"<html>", "is not a GGUF file: it begins with b'<htm'"),
        (TINY.read_bytes()[:100], "cannot be loaded"),
        (TINY.read_bytes()[:-20_000], "is corrupted or incomplete. Download it again"),
    ],
    ids=["missing", "empty", "other", "header", "truncated"],
)
async def test_error_names_an_unloadable_model(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / "broken.gguf"
    if content is not None:
        path.write_bytes(content)
    engine = LlamaEngine("broken", path)

    with pytest.raises(ConfigError, match=f"broken.gguf.*{complaint}"):
        await engine.start()

    await engine.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit")
async def test_error_of_a_full_memory_says_what_takes_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = 8_000_000  # tokens, which take 2 GB
    config = {**CONFIG, "max_position_embeddings": context}
    path = write_gguf(tmp_path / "long.gguf", tensors(), config, byte_vocabulary())
    spawn = LlamaProcess.spawn

    async def limited() -> LlamaProcess:
        process = await spawn()
        psutil.Process(process.child.pid).rlimit(psutil.RLIMIT_AS, (10**9, 10**9))
        return process

    monkeypatch.setattr(LlamaProcess, "spawn", limited)
    engine = LlamaEngine("long", path, slots=1, context=context)

    with pytest.raises(ConfigError, match=r"long\.gguf cannot .* memory .* --context"):
        await engine.start()

    await engine.close()


@posix
async def test_error_of_a_killed_load_says_what_takes_less() -> None:
    engine = LlamaEngine("tiny", TINY)
    starting = asyncio.create_task(engine.start())
    while engine.pid is None:  # noqa: ASYNC110  (nothing announces it)
        await asyncio.sleep(0)

    await kill(engine)

    with pytest.raises(ConfigError, match=r"SIGKILL.*memory was full.* --context"):
        await starting
    await engine.close()


async def test_error_names_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)

    with pytest.raises(ConfigError, match=r"is not installed: .*\[llm\]"):
        await LlamaEngine("tiny", TINY).start()


LOG = """\
0.00.001 W srv init: no API key is set
0.00.002 E gguf_init_from_file: failed to open GGUF file 'x.gguf'
0.00.003 E llama_model_load: error loading model: something more general
"""


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (LOG, "failed to open GGUF file 'x.gguf'"),
        ("0.1 E llama_model_load: error loading model: cut short\n", "cut short"),
        ("0.1 I srv init: all is well\n", None),
        ("", None),
    ],
)
def test_first_error_of_a_log_is_reported(log: str, message: str | None) -> None:
    assert first_error(log) == message


@pytest.mark.parametrize(
    ("log", "suffix"),
    [
        ("", ""),
        (LOG, ""),
        (
            LOG + "ggml.c:7: GGML_ASSERT(x) failed\n",
            ": ggml.c:7: GGML_ASSERT(x) failed",
        ),
    ],
)
def test_unformatted_last_line_is_reported(log: str, suffix: str) -> None:
    assert last_unformatted_line(log) == suffix
