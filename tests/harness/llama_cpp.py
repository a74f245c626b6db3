"""llama.cpp's own programs, for tests of models in several shards."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from shoal.engines.llama_child import BATCH_TOKENS, MODEL
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.shards.programs import ShardPrograms, program_environment
from shoal.engines.shards.split_child import is_loaded, port_of

FOLDER = Path(
    os.environ.get("SHOAL_LLAMA_CPP")
    or Path(__file__).parents[2] / "build" / "llama.cpp"
)


def llama_cpp() -> Path:
    """Return the folder of the programs, which `make test-long` installs."""
    assert FOLDER.exists(), (
        f"{FOLDER} is missing: python scripts/install_llama_cpp.py {FOLDER}, or name "
        "the folder of llama.cpp's programs in SHOAL_LLAMA_CPP"
    )
    return FOLDER


@asynccontextmanager
async def one_process(
    programs: ShardPrograms, path: Path, context: int, *options: str
) -> AsyncIterator[OpenAIEngine]:
    """Run the server with a whole model, which is called ``MODEL``, in one process."""
    server = await asyncio.create_subprocess_exec(
        *(str(programs.llama_server), "--model", str(path), "--alias", MODEL),
        *("--port", "0", "--threads", "1", "--ctx-size", str(context)),
        *("--parallel", "2", "--batch-size", str(BATCH_TOKENS), "--cache-ram", "0"),
        *options,
        env=program_environment(),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        while (port := port_of(server.pid)) is None or not is_loaded(port):
            assert server.returncode is None
            await asyncio.sleep(0.05)
        engine = OpenAIEngine(f"http://127.0.0.1:{port}/v1")
        await engine.start()
        yield engine
        await engine.close()
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()
