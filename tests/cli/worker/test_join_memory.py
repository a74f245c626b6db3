"""How much memory a worker lends to models, by its options, engines and machine."""

from pathlib import Path

import pytest

from shoal.cli.worker import join_library
from shoal.cli.worker.join_library import GB, ModelMemory, model_memory
from shoal.config import JoinConfig
from shoal.config.loader import Size
from shoal.engines.llama_engine import LlamaEngine
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.selection import EngineSource
from shoal.engines.server_control import ServerControl


def server(url: str) -> EngineSource:
    return EngineSource("server", OpenAIEngine(url, control=ServerControl))


HERE, AWAY = "http://127.0.0.1:11434", "http://gpu.example.com:8000"


@pytest.mark.parametrize(
    ("chosen", "urls", "gpus", "on_gpus", "limit"),
    [
        (24 * GB, (), 0, 0, 24 * GB),
        (24 * GB, (AWAY,), 80 * GB, 80 * GB, 24 * GB),
        (0, (HERE,), 80 * GB, 0, 72 * GB),
        (0, (HERE, AWAY), 80 * GB, 0, 72 * GB),
        (0, (AWAY,), 80 * GB, 0, 0),
        (0, (), 80 * GB, 60 * GB, 54 * GB),
    ],
)
async def test_a_limit_that_is_not_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
    chosen: int,
    urls: tuple[str, ...],
    gpus: int,
    on_gpus: int,
    limit: int,
) -> None:
    async def free_memory_of_gpus() -> int:
        return on_gpus

    monkeypatch.setattr(join_library, "free_memory_of_gpus", free_memory_of_gpus)
    config = JoinConfig(memory=Size(chosen))
    servers = [server(each) for each in urls]

    found = await model_memory(config, servers, gpus, embedded=True)

    assert found == ModelMemory(limit)


async def test_what_is_free_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10 * GB]
    monkeypatch.setattr(join_library, "free_memory", lambda: free[0])

    found = await model_memory(JoinConfig(), [server(HERE)], 0, embedded=True)

    assert found.limit == 9 * GB
    assert found.free is not None
    free[0] = 5 * GB
    assert found.free(0) == 4.5 * GB
    assert found.free(GB) == 3.6 * GB
    assert found.free(6 * GB) == 1, "not unknown"
    free[0] = 0
    assert found.free(0) == 0, "unknown"


async def test_unknown_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_library, "free_memory", lambda: None)

    found = await model_memory(JoinConfig(), [], 0, embedded=True)

    assert found == ModelMemory(0)


def test_files_are_of_this_machine(tmp_path: Path) -> None:
    engine = LlamaEngine("tiny", tmp_path / "tiny.gguf")
    assert EngineSource("embedded", engine).is_here
