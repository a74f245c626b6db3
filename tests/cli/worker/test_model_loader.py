"""Models that are loaded, and what the terminal shows meanwhile."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from shoal.cli.worker.worker_report import ModelLoader
from shoal.domain.errors import ConfigError
from shoal.domain.work import Inference
from shoal.domain.worker import ServedModel
from shoal.engines.engine import Finished, Item
from shoal.engines.selection import EngineSource

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no terminals")


class Loads:
    """An engine whose start takes until ``done``."""

    slots = 1
    models = (ServedModel("qwen\x1b[1m"),)

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.done = asyncio.Event()
        self.damage = ""

    async def start(self) -> None:
        self.begun.set()
        await self.done.wait()
        if self.damage:
            raise ConfigError(self.damage)

    async def refresh(self) -> None:
        pass

    async def run(
        self, work: Inference, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Item, None]:
        yield Finished()

    async def close(self) -> None:
        pass


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "qwen.gguf"
    with path.open("wb") as file:
        file.truncate(1_234_000_000)  # takes no space
    return path


def source(file: Path) -> tuple[Loads, EngineSource]:
    engine = Loads()
    return engine, EngineSource("embedded", engine, file=file, is_unloaded=True)


async def test_line_names_the_model_and_its_size(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, loaded = source(file)
    engine.done.set()

    await ModelLoader(as_json=False).load(loaded)

    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "loading qwen\\x1b[1m (1.2 GB)\n")


async def test_event_names_the_model_and_its_bytes(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, loaded = source(file)
    engine.done.set()

    await ModelLoader(as_json=True).load(loaded)

    printed = capsys.readouterr()
    assert printed.err == ""
    assert json.loads(printed.out) == {
        "event": "loading",
        "model": "qwen\x1b[1m",
        "bytes": 1_234_000_000,
    }


async def test_models_are_loaded_one_after_another(file: Path) -> None:
    loader = ModelLoader(as_json=True)
    (first, one), (second, two) = source(file), source(file)
    second.damage = "damaged"
    both = [asyncio.create_task(loader.load(each)) for each in (one, two)]
    await first.begun.wait()
    second.done.set()
    await asyncio.sleep(0)
    assert not second.begun.is_set()

    first.done.set()

    await both[0]
    with pytest.raises(ConfigError, match="damaged"):
        await both[1]


async def test_terminal_shows_the_time_and_is_clean_afterwards(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = os.openpty()
    engine, loaded = source(file)
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setenv("TERM", "xterm")
        patched.setattr(sys, "stderr", terminal)
        loading = asyncio.create_task(ModelLoader(as_json=False).load(loaded))
        shown = b""
        while b"0:00:00" not in shown:
            shown += await asyncio.to_thread(os.read, ours, 4096)
        assert b"loading qwen\\x1b[1m (1.2 GB)" in shown

        engine.done.set()
        await loading
        rest = await asyncio.to_thread(os.read, ours, 65536)
    os.close(ours)

    assert rest.endswith(b"\x1b[2K")  # the line is erased
