"""Fixtures with started engines."""

import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from gguf import GGUFReader, GGUFValueType, GGUFWriter, PoolingType

from engines.outputs import TINY
from shoal.engines.engine import Engine
from shoal.engines.llama_engine import LlamaEngine
from shoal.engines.openai_server import OpenAIEngine

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[str]]

Routes = Mapping[str, object]
"""What a server answers, by method and path: JSON, or a handler."""

Fakes = Callable[[Routes], Awaitable[str]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llama() -> AsyncIterator[LlamaEngine]:
    """The embedded engine, which the tests of a module share."""
    engine = LlamaEngine("tiny", TINY)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
async def doomed() -> AsyncIterator[LlamaEngine]:
    """The embedded engine, for a test that ends it."""
    engine = LlamaEngine("tiny", TINY)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture(scope="session")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, declared as an embedding model with mean pooling."""
    path = tmp_path_factory.mktemp("vectors") / "vectors.gguf"
    writer = copy_of_tiny(path, "llama")
    writer.add_pooling_type(PoolingType.MEAN)
    write_gguf(writer)
    return path


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a reranker, of the architecture that llama.cpp has for it.

    Its ranks mean nothing, but depend on the text.
    """
    path = tmp_path_factory.mktemp("ranks") / "ranks.gguf"
    writer = copy_of_tiny(path, "qwen3")
    writer.add_pooling_type(PoolingType.RANK)
    writer.add_classifier_output_labels(["yes", "no"])
    for block, name in product(range(2), ("attn_q_norm", "attn_k_norm")):
        writer.add_tensor(f"blk.{block}.{name}.weight", np.ones(16, np.float32))
    difference = np.linspace(-1, 1, 64, dtype=np.float32)
    writer.add_tensor("cls.output.weight", np.stack([difference, -difference]))
    write_gguf(writer)
    return path


def copy_of_tiny(path: Path, architecture: str) -> GGUFWriter:
    """Begin a file with the fields and tensors of the tiny model."""
    reader = GGUFReader(TINY)
    writer = GGUFWriter(path, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind is GGUFValueType.ARRAY else None
        name = field.name.replace("llama.", f"{architecture}.")
        writer.add_key_value(name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    return writer


def write_gguf(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of the tiny model, of rank 1, that changes what it says."""
    path = tmp_path_factory.mktemp("adapters") / "odd.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    random = np.random.default_rng(1)
    for part, size in (("ffn_down", 160), ("attn_output", 64)):
        for letter, shape in (("a", (1, size)), ("b", (64, 1))):
            values = random.standard_normal(shape).astype(np.float32)
            writer.add_tensor(f"blk.0.{part}.weight.lora_{letter}", values)
    write_gguf(writer)
    return path


@pytest.fixture(scope="session")
def adapted_url(adapter: Path) -> Iterator[str]:
    """The base URL of a real server with the tiny model and an adapter."""
    with _served(TINY, adapter) as url:
        yield url


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The base URL of a real server with the tiny model."""
    with _served(TINY) as url:
        yield url


@contextmanager
def _served(*files: Path) -> Iterator[str]:
    script = Path(__file__).with_name("serve_tiny.py")
    with subprocess.Popen(
        [sys.executable, script, *files],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["llama", "openai"])
async def engine(
    request: pytest.FixtureRequest, server_url: str
) -> AsyncIterator[Engine]:
    """Each engine in turn, which the tests of the port share."""
    engine: Engine = (
        LlamaEngine("tiny", TINY)
        if request.param == "llama"
        else OpenAIEngine(server_url)
    )
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start a server whose chats are answered by a handler; returns its base URL."""
    runners: list[web.AppRunner] = []

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})

    async def start(handler: Handler) -> str:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/chat/completions", handler)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        return f"http://{host}:{port}/v1"

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def fake() -> AsyncIterator[Fakes]:
    """Start servers that know some paths, and answer 404 to all others.

    The routes may be changed while a server runs.  Returns its base URL.
    """
    runners: list[web.ServerRunner] = []

    async def start(routes: Routes) -> str:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            answer = routes.get(f"{request.method} {request.path}")
            if answer is None:
                return web.json_response({"error": "no such path"}, status=404)
            if callable(answer):
                response: web.StreamResponse = await answer(request)
                return response
            return web.json_response(answer)

        server = web.Server(handle, access_log=None, handler_cancellation=True)
        runner = web.ServerRunner(server, shutdown_timeout=0)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        return f"http://{host}:{port}/v1"

    yield start
    for runner in runners:
        await runner.cleanup()
