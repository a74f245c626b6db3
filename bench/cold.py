"""Seconds from a request for a model that is loaded nowhere to its first text.

*engine*: the embedded engine alone, which loads the same file and answers the same
chat.  *pool*: a coordinator with a worker that has the file and has loaded nothing.
*next one*: the same once it is loaded.  The model of `make demo`: 98 MB.
"""

import asyncio
import json
import shutil
import tempfile
import time
import urllib.request
from pathlib import Path

from peers import KEY
from processes import program
from report import Goal, Results
from shoal.domain.work import Chat
from shoal.engines.gguf_files import demo_model_path
from shoal.engines.llama_engine import LlamaEngine

ROUNDS = 7
MODEL = "cold"
ENGINE, POOL = "engine: s to the first text", "pool: s to the first text"
WARM_ENGINE = "engine, next one: s to the first text"
WARM_POOL = "pool, next one: s to the first text"
GOALS = [Goal(POOL, ENGINE, at_most=1.1)]
QUESTION = {"role": "user", "content": "Why is the sea salty?"}


def measure(rounds: int) -> Results:
    results: Results = {row: [] for row in (ENGINE, WARM_ENGINE, POOL, WARM_POOL)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "data", "models", f"{MODEL}.gguf")
        file.parent.mkdir(parents=True)
        shutil.copy(demo_model_path(), file)
        for number in range(rounds):
            for rows, seconds in (
                ((ENGINE, WARM_ENGINE), lambda: asyncio.run(_engine(file))),
                ((POOL, WARM_POOL), lambda: _pool(Path(folder))),
            )[:: 1 if number % 2 else -1]:
                for row, value in zip(rows, seconds(), strict=True):
                    results[row].append(value)
    return results


async def _engine(file: Path) -> tuple[float, float]:
    """Return the seconds to the first text of an engine, cold and warm."""
    began = time.perf_counter()
    engine = LlamaEngine(MODEL, file)
    try:
        await engine.start()
        cold = await _first_text(engine, began)
        return cold, await _first_text(engine, time.perf_counter())
    finally:
        await engine.close()


async def _first_text(engine: LlamaEngine, began: float) -> float:
    found = [
        time.perf_counter()
        async for _ in engine.run(Chat(MODEL, (QUESTION,), max_tokens=8))
    ]
    return found[0] - began


def _pool(folder: Path) -> tuple[float, float]:
    """Return the seconds to the first text of a pool, cold and warm."""
    data = str(folder / "data")
    keys = ["--api-key", KEY, "--join-token", "bench-of-loads", "--data-dir", data]
    quiet = ["--log-level", "warning", "--json"]
    with program("-m", "shoal", "serve", "--port", "0", *keys, *quiet) as serving:
        url = f"http://127.0.0.1:{serving.report['ports']['http']}"
        join = [url, "--token", "bench-of-loads", "--load", "local"]
        with program("-m", "shoal", "join", *join, "--data-dir", data, *quiet):
            return _asked(url), _asked(url)


def _asked(url: str) -> float:
    body = {"model": MODEL, "messages": [QUESTION], "max_tokens": 8, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    asked = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    began = time.perf_counter()
    first = None
    with urllib.request.urlopen(asked, timeout=60) as response:
        for line in response:
            text = line.removeprefix(b"data: ")
            if first is None and b'"content":"' in text and b'"content":""' not in text:
                first = time.perf_counter() - began
    assert first is not None, "it has a text"
    return first
