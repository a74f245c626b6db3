"""A real llama-server in router mode, whose models are loaded by orders.

It starts a process of its own program for each model.  So it has to run in the folder
that it was installed into, as on the distribution that it is from.
"""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engines.outputs import TINY, ask
from engines.test_server_control import HI, library, offered
from harness.llama_cpp import llama_cpp
from harness.ports import free_port
from shoal.domain.errors import JobError
from shoal.domain.work import Chat, Feature
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.server_control import ServerControl

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0, reason="it needs chroot"
    ),
]

ENTER = """
set -e
for each in lib lib64; do [ ! -d usr/$each ] || mount --bind usr/$each $each; done
mount --bind "$1" models
mount --bind /dev dev
mount -t proc proc proc
export LD_LIBRARY_PATH=/usr/lib/$(uname -m)-linux-gnu
export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$LD_LIBRARY_PATH/llama LLAMA_CACHE=/models
exec chroot . /usr/bin/llama-server --models-dir /models --no-models-autoload \
    --host 127.0.0.1 --port "$2" --ctx-size 2048 --parallel 2
"""


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[OpenAIEngine]:
    """An engine in front of a router with two models, and a damaged file."""
    for name in ("one", "two"):
        shutil.copy(TINY, tmp_path / f"{name}.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF and no more")
    root, port = llama_cpp() / "root", free_port()
    for name in ("lib", "lib64", "models", "dev", "proc"):
        (root / name).mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--mount", "bash", "-c", ENTER, "bash", tmp_path, str(port)),
        cwd=root,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    said = b""
    while b"listening on" not in said:
        said = await process.stdout.readline()
        assert said, "it has ended"
    reading = asyncio.create_task(process.stdout.read())
    engine = OpenAIEngine(f"http://127.0.0.1:{port}", control=ServerControl)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
        process.terminate()
        await reading
        await process.wait()


async def test_a_router_loads_and_unloads_by_orders(router: OpenAIEngine) -> None:
    control = router.control
    assert control is not None
    assert sorted(library(control)) == ["bad", "one", "two"]
    assert offered(router) == []

    await control.load("two", 0)
    await router.refresh()

    assert offered(router) == ["two"]
    (model,) = router.models
    assert model.context == 1024, "of each slot"
    assert Feature.CONTINUE in model.features
    assert library(control)["two"].size > 200_000
    first = await ask(router, Chat("two", HI, 8, 0.0))
    assert first.text

    await control.load("one", 0)
    await router.refresh()
    assert offered(router) == ["one", "two"]
    control.withdraw("two")
    await control.unload("two")
    await router.refresh()
    control.restore("two")
    assert offered(router) == ["one"]
    assert (await ask(router, Chat("one", HI, 8, 0.0))).text == first.text


async def test_a_router_tells_that_a_model_cannot_be_loaded(
    router: OpenAIEngine,
) -> None:
    control = router.control
    assert control is not None
    with pytest.raises(JobError, match="llama-server: its process ended with status"):
        await control.load("bad", 0)

    await control.load("one", 0)  # the others can
    await router.refresh()
    assert offered(router) == ["one"]
