"""LoRA adapters: found on disks, loaded by vLLM, chosen at a real llama.cpp server."""

import json
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from engines.model_servers import SleepingVllm, serving
from engines.outputs import ask
from engines.test_server_control import HI, library, offered
from shoal.domain.errors import JobError
from shoal.domain.work import Chat, Feature
from shoal.engines.adapters import Adapter, find_adapters
from shoal.engines.gguf_files import ModelFolder
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.server_control import ServerControl

BASE = "org/base"


def write_adapter(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    fields = {"base_model_name_or_path": BASE, "peft_type": "LORA", **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> tuple[ModelFolder, ...]:
    """Folders with an adapter in each, as Shoal and the hub's cache have them."""
    write_adapter(tmp_path / "models" / "style")
    write_adapter(tmp_path / "hub" / "models--me--tone" / "snapshots" / "abc")
    return (
        ModelFolder(tmp_path / "models", "**/*.gguf"),
        ModelFolder(tmp_path / "hub", "models--*/snapshots/*/**/*.gguf"),
    )


def test_adapters_are_found_with_their_bases(
    folders: tuple[ModelFolder, ...], tmp_path: Path
) -> None:
    write_adapter(tmp_path / "models" / "prefix", peft_type="PREFIX_TUNING")
    write_adapter(tmp_path / "models" / "no-base", base_model_name_or_path=None)
    empty = write_adapter(tmp_path / "models" / "empty")
    (empty / "adapter_model.safetensors").unlink()
    broken = write_adapter(tmp_path / "models" / "broken")
    (broken / "adapter_config.json").write_bytes(b"[" * 100_000)
    write_adapter(tmp_path / "hub" / "models--other--style" / "snapshots" / "abc")

    found = find_adapters((*folders, ModelFolder(tmp_path / "absent", "**/*.gguf")))

    assert found == [
        Adapter("style", BASE, tmp_path / "models" / "style", 7),
        Adapter("tone", BASE, found[1].folder, 7),
    ]


async def test_vllm_loads_and_unloads_adapters(
    folders: tuple[ModelFolder, ...],
) -> None:
    server = SleepingVllm(BASE, loaded=(BASE,))
    server.loads_adapters = True
    adapters = partial(find_adapters, folders)
    with serving(server) as url:
        control_of = partial(ServerControl, find_adapters=adapters)
        engine = OpenAIEngine(url, control=control_of)
        await engine.start()
        control = engine.control
        assert control is not None
        try:
            style = f"{BASE}:style"
            assert sorted(library(control)) == [BASE, style, f"{BASE}:tone"]
            assert library(control)[style].size == 7
            assert offered(engine) == [BASE]

            await control.load(style, 0)
            await engine.refresh()
            assert offered(engine) == [BASE, style]
            assert control.is_loaded(style)
            assert (await ask(engine, Chat(style, HI))).text == f"I am {style}"

            await control.unload(BASE)  # all of it sleeps
            await engine.refresh()
            assert offered(engine) == []
            await control.load(style, 0)  # which wakes up its base, and is there
            await engine.refresh()
            assert offered(engine) == [BASE, style]

            await control.unload(style)
            await engine.refresh()
            assert offered(engine) == [BASE]
        finally:
            await engine.close()
    folder = str(folders[0].folder / "style")
    assert server.orders == [
        ("/v1/load_lora_adapter", {"lora_name": style, "lora_path": folder}),
        ("/sleep?level=1", None),
        ("/wake_up", None),
        ("/v1/unload_lora_adapter", {"lora_name": style}),
    ]


async def test_a_vllm_without_runtime_adapters_is_not_asked_for_them(
    folders: tuple[ModelFolder, ...],
) -> None:
    server = SleepingVllm(BASE, "mine", loaded=(BASE, "mine"))
    control = ServerControl(server.query, partial(find_adapters, folders))
    with serving(server) as url:
        engine = OpenAIEngine(url, control=lambda query: control)
        await engine.start()
        try:
            assert offered(engine) == [BASE, "mine"], "it has this one from the start"
            assert list(library(control)) == [BASE]
        finally:
            await engine.close()


async def test_an_adapter_that_does_not_fit_fails_with_vllms_words(
    folders: tuple[ModelFolder, ...],
) -> None:
    server = SleepingVllm(BASE, loaded=(BASE,))
    server.loads_adapters = True
    control = ServerControl(server.query, partial(find_adapters, folders))
    with serving(server) as url:
        engine = OpenAIEngine(url, control=lambda query: control)
        await engine.start()
        try:
            server.models.append(f"{BASE}:style")  # somebody else was faster
            with pytest.raises(JobError, match="already been loaded"):
                await control.load(f"{BASE}:style", 0)
        finally:
            await engine.close()


async def test_a_request_chooses_an_adapter_of_llama_server(adapted_url: str) -> None:
    engine = OpenAIEngine(adapted_url)
    await engine.start()
    try:
        assert offered(engine) == ["tiny", "tiny:odd"]
        asked = [Chat(name, HI, 12, 0.0) for name in ("tiny", "tiny:odd", "tiny")]
        texts = [(await ask(engine, each)).text for each in asked]
        assert texts[0] == texts[2] != texts[1]

        assert all(Feature.CONTINUE in each.features for each in engine.models)
        goes_on = [(await ask(engine, each, "I am")).text for each in asked]
        assert goes_on[0] == goes_on[2] != goes_on[1]
        chosen = structs.replace(asked[0], options={"lora": [{"id": 0, "scale": 1.0}]})
        assert (await ask(engine, chosen)).text == texts[1], "a client may choose"
    finally:
        await engine.close()
