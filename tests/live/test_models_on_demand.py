"""Models that a pool loads for requests, with llama.cpp and real processes."""

import asyncio
import base64
import shutil
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from openai.types.chat import (
    ChatCompletionContentPartParam,
    ChatCompletionUserMessageParam,
)

from engines.model_servers import Ollama, serving
from live.programs import KEY, TINY, Pool, Program, Programs, eventually
from models import hub_server
from models.images import png_of
from models.tool_answers import COLOUR, COLOURS, TOOLS_GGUF

ASK: ChatCompletionUserMessageParam = {"role": "user", "content": "hello"}


def machine(
    programs: Programs, pool: Pool, name: str, *models: str, memory: str = ""
) -> Program:
    """Join a machine that has the files of models, and has loaded none."""
    data = programs.folder / name
    (data / "models").mkdir(parents=True, exist_ok=True)
    for each in models:
        shutil.copy(TINY, data / "models" / f"{each}.gguf")
    limit = ("--memory", memory) if memory else ()
    return pool.joined(name, "--load", "local", "--data-dir", str(data), *limit)


def replicas(pool: Pool, model: str) -> dict[str, str]:
    """Return the machines that have a model by order, with their states."""
    listed = pool.admin("models")["data"]
    found = [each["replicas"] for each in listed if each["id"] == model]
    return {each["name"]: each["state"] for places in found for each in places}


def said(pool: Pool, model: str) -> str:
    with pool.client() as client:
        answer = client.chat.completions.create(
            model=model, messages=[ASK], max_tokens=4, temperature=0
        )
    return answer.choices[0].message.content or ""


def test_a_chat_has_its_model_loaded(programs: Programs) -> None:
    pool = programs.serve()
    machine(programs, pool, "anna", "small", "other")
    machine(programs, pool, "ben")
    with pool.client() as client:
        listed = {each.id: each.to_dict()["state"] for each in client.models.list()}
    assert listed == {"small": "loadable", "other": "loadable"}

    first = said(pool, "small")

    assert first
    assert said(pool, "small") == first
    assert replicas(pool, "small") == {"anna": "loaded"}
    assert replicas(pool, "other") == {}
    jobs = pool.admin("jobs")["data"]
    assert [(each["kind"], each["model"]) for each in jobs] == [
        ("chat", "small"),
        ("model", "small"),
        ("chat", "small"),
    ]


def test_a_deployment_outlives_its_machine_and_its_coordinator(
    programs: Programs,
) -> None:
    pool = programs.serve()
    anna = machine(programs, pool, "anna", "small")
    machine(programs, pool, "ben", "small")
    pool.put("admin/deployments/small", {"replicas": 1, "on": ["anna"]})
    eventually(lambda: replicas(pool, "small") == {"anna": "loaded"}, "the load")
    pool.put("admin/deployments/small", {"replicas": 1})

    anna.kill()
    eventually(lambda: replicas(pool, "small") == {"ben": "loaded"}, "the next load")

    pool.program.kill()
    pool = programs.serve(port=pool.port)
    eventually(lambda: replicas(pool, "small") == {"ben": "loaded"}, "its return")
    assert said(pool, "small")


async def test_machines_get_a_deployed_model_from_the_hub(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"tiny-Q8_0.gguf": TINY.read_bytes(), "tiny-F16.gguf": b"GGUF?"}
    hub = hub_server.HubServer({"org/Tiny-GGUF": files})
    async with hub_server.serving(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(programs.folder / "cache"))
        await asyncio.to_thread(_deploy_from_hub, programs)

    assert {*hub.downloads} == {"tiny-Q8_0.gguf"}
    assert {*hub.revisions} == {hub_server.COMMIT}


def _deploy_from_hub(programs: Programs) -> None:
    pool = programs.serve()
    for name in ("anna", "ben"):
        data = str(programs.folder / name)
        pool.joined(name, "--load", "pull", "--data-dir", data)
    where = ("--url", pool.url, "--api-key", KEY)
    source = ("--hub", "org/Tiny-GGUF:Q8_0", "--replicas", "2")

    deploy = programs.run("models", "deploy", "mine", *source, *where)

    assert deploy.wait() == 0, deploy.errors
    assert said(pool, "mine")  # it waits for the first load
    both = {"anna": "loaded", "ben": "loaded"}
    eventually(lambda: replicas(pool, "mine") == both, "the loads")
    assert said(pool, "mine")


async def test_a_machine_that_dies_while_it_loads_is_replaced(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = hub_server.HubServer({"org/Tiny-GGUF": {"tiny-Q8_0.gguf": TINY.read_bytes()}})
    hub.gone = True  # the machine asks again and again
    async with hub_server.serving(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(programs.folder / "cache"))

        def at_hand() -> None:
            hub.gone = False

        await asyncio.to_thread(_kill_the_first, programs, at_hand)


def _kill_the_first(programs: Programs, at_hand: Callable[[], None]) -> None:
    pool = programs.serve()
    machines = {}
    for name in ("anna", "ben"):
        data = str(programs.folder / name)
        machines[name] = pool.joined(name, "--load", "pull", "--data-dir", data)
    where = ("--url", pool.url, "--api-key", KEY, "--hub", "org/Tiny-GGUF")
    deploy = programs.run("models", "deploy", "mine", *where)
    assert deploy.wait() == 0, deploy.errors
    eventually(lambda: replicas(pool, "mine"), "the load")
    (first,) = replicas(pool, "mine")
    at_hand()

    machines.pop(first).kill()

    assert said(pool, "mine")
    (second,) = machines
    assert replicas(pool, "mine")[second] == "loaded"


async def test_a_model_comes_with_its_projector_from_the_hub_and_from_a_machine(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    projector = TOOLS_GGUF.with_name("mmproj-tools.gguf")
    files = {"tools-Q8_0.gguf": TOOLS_GGUF, projector.name: projector}
    repository = {name: path.read_bytes() for name, path in files.items()}
    hub = hub_server.HubServer({"org/Tools-GGUF": repository})
    async with hub_server.serving(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(programs.folder / "cache"))
        await asyncio.to_thread(_look_at_red, programs)

    assert {*hub.downloads} == {*files}


def _look_at_red(programs: Programs) -> None:
    pool = programs.serve()
    pool.joined("anna", "--load", "pull", "--data-dir", str(programs.folder / "anna"))
    where = ("--url", pool.url, "--api-key", KEY)
    source = ("--hub", "org/Tools-GGUF:Q8_0")
    deploy = programs.run("models", "deploy", "eyes", *source, *where)
    assert deploy.wait() == 0, deploy.errors
    assert colour_of(pool, "r") == COLOURS["r"]

    ben = str(programs.folder / "ben")
    pool.joined("ben", "--load", "pull", "--data-dir", ben)
    pool.put("admin/deployments/eyes", {"on": ["ben"]})

    eventually(lambda: replicas(pool, "eyes").get("ben") == "loaded", "the copy")
    names = {each.name for each in Path(ben, "models", "eyes").iterdir()}
    assert names == {"tools-Q8_0.gguf", "mmproj-tools.gguf"}
    assert colour_of(pool, "g") == COLOURS["g"]


def colour_of(pool: Pool, colour: str) -> str:
    url = f"data:image/png;base64,{base64.b64encode(png_of(colour)).decode()}"
    parts: list[ChatCompletionContentPartParam] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": COLOUR},
    ]
    with pool.client() as client:
        answer = client.chat.completions.create(
            model="eyes", messages=[{"role": "user", "content": parts}], temperature=0
        )
    return answer.choices[0].message.content or ""


def test_a_model_makes_room_for_another(programs: Programs) -> None:
    pool = programs.serve()
    machine(programs, pool, "anna", "small", "other")
    pool.put("admin/deployments/small", {"replicas": 1, "context": 512, "slots": 1})
    eventually(lambda: replicas(pool, "small") == {"anna": "loaded"}, "the load")

    pool.delete("admin/deployments/small")

    assert said(pool, "other")
    assert replicas(pool, "other") == {"anna": "loaded"}


def test_an_operator_can_list_loaded_models_only(programs: Programs) -> None:
    pool = programs.serve("--list-models", "loaded")
    machine(programs, pool, "anna", "small", "other")
    with pool.client() as client:
        assert [each.id for each in client.models.list()] == []

        assert said(pool, "small")

        assert [each.id for each in client.models.list()] == ["small"]


def test_a_damaged_file_is_named_and_other_models_go_on(programs: Programs) -> None:
    pool = programs.serve()
    machine(programs, pool, "anna", "small", "broken")
    file = programs.folder / "anna" / "models" / "broken.gguf"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])  # its header is whole

    with pytest.raises(openai.APIStatusError) as refused:
        said(pool, "broken")

    assert refused.value.status_code == 503
    assert "broken cannot be loaded: " in str(refused.value)
    assert "anna failed to load it" in str(refused.value)
    assert said(pool, "small")


def test_what_fits_nowhere_is_refused_with_the_numbers(programs: Programs) -> None:
    pool = programs.serve()
    machine(programs, pool, "anna", "small", memory="0.001")

    with pytest.raises(openai.APIStatusError) as refused:
        said(pool, "small")

    assert refused.value.status_code == 503
    assert "anna has 1 MB" in str(refused.value)


def test_a_server_loads_models_by_its_own_api(programs: Programs) -> None:
    pool = programs.serve()
    ollama = Ollama("small:latest", "other:latest", loaded=("other:latest",))
    with serving(ollama) as url:
        pool.joined("anna", "--engine", url, "--load", "local", "--memory", "4")
        with pool.client() as client:
            listed = {each.id: each.to_dict()["state"] for each in client.models.list()}
        assert listed == {"small:latest": "loadable", "other:latest": "loaded"}

        # Each needs 3.2 GB, so the other has to go; it stays for half a minute.
        assert said(pool, "small:latest") == "I am small:latest"

        assert replicas(pool, "small:latest") == {"anna": "loaded"}
        assert ollama.loaded == ["small:latest"]
        assert ollama.misdirected == []
