"""What the embedded engine does with a model made for it: tools, thoughts, images."""

import asyncio
import base64
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engines.outputs import ask, pieces_of, tokens_of
from models.images import png_of
from models.tool_answers import (
    BOTH,
    COLOUR,
    COLOURS,
    PLAN,
    PLANNED,
    SWIMS,
    THOUGHT,
    TOOLS_GGUF,
    WEATHER,
    question,
)
from shoal.domain.errors import ConfigError, InvalidRequest
from shoal.domain.outcome import Delta, Outcome
from shoal.domain.work import JSON, Chat, Feature
from shoal.engines.llama_engine import LlamaEngine

PROJECTOR = TOOLS_GGUF.with_name("mmproj-tools.gguf")

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")

PARIS, LIMA = '{"city": "Paris"}', '{"city": "Lima"}'


# The tests share an engine, and so its loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[LlamaEngine]:
    engine = LlamaEngine("tools", TOOLS_GGUF, projector=PROJECTOR)
    await engine.start()
    yield engine
    await engine.close()


def chat(*messages: Mapping[str, JSON], **options: JSON) -> Chat:
    return Chat("tools", messages, 200, 0.0, options)


def user(content: JSON) -> Mapping[str, JSON]:
    return {"role": "user", "content": content}


def calls_in(outcome: Outcome) -> list[tuple[str, str]]:
    """Return the names and arguments of the calls, in order."""
    (choice,) = outcome.choices
    calls = choice.fields["tool_calls"]
    assert isinstance(calls, list)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(c["function"]["name"], c["function"]["arguments"]) for c in calls]


def image_of(colour: str) -> Mapping[str, JSON]:
    """Return a message's part: an image of one colour."""
    url = f"data:image/png;base64,{base64.b64encode(png_of(colour)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


async def test_model_offers_what_its_files_can(engine: LlamaEngine) -> None:
    (model,) = engine.models

    assert {Feature.TOOLS, Feature.IMAGES, Feature.CONTINUE} <= model.features
    assert Feature.AUDIO not in model.features


NAMED: JSON = {"type": "function", "function": {"name": "get_weather"}}


async def test_tool_is_called(engine: LlamaEngine) -> None:
    for choice in (None, "auto", "required", NAMED):
        options = {"tools": [WEATHER]} | ({"tool_choice": choice} if choice else {})
        outcome = await ask(engine, chat(user(question("Paris")), **options))

        assert calls_in(outcome) == [("get_weather", PARIS)]
        assert outcome.finish_reason == "tool_calls"
        assert outcome.text == ""


@pytest.mark.long
async def test_call_is_streamed_in_pieces(engine: LlamaEngine) -> None:
    work = chat(user(question("Paris")), tools=[WEATHER])
    first, *pieces, _ = await pieces_of(engine.run(work))

    assert isinstance(first, Delta)
    begun: Any = first.fields["tool_calls"]
    assert begun[0]["function"]["name"] == "get_weather"
    assert len(pieces) > 1


async def test_several_tools_are_called_and_answer(engine: LlamaEngine) -> None:
    outcome = await ask(engine, chat(user(BOTH), tools=[WEATHER]))
    (choice,) = outcome.choices
    called: JSON = choice.fields["tool_calls"]
    assert isinstance(called, list)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": weather}
        for call, weather in zip(called, ("sunny", "rainy"), strict=True)
    ]

    assert calls_in(outcome) == [("get_weather", PARIS), ("get_weather", LIMA)]
    asked = {"role": "assistant", "content": None, "tool_calls": called}
    told = await ask(engine, chat(user(BOTH), asked, *results, tools=[WEATHER]))
    assert told.text == "It is sunny in Paris and rainy in Lima."
    assert told.finish_reason == "stop"


async def test_no_tool_is_called_if_none_may_be(engine: LlamaEngine) -> None:
    work = chat(user(question("Paris")), tools=[WEATHER], tool_choice="none")

    assert (await ask(engine, work)).text == "I cannot know."


@pytest.mark.long
async def test_unneeded_tool_is_not_called(engine: LlamaEngine) -> None:
    assert (await ask(engine, chat(user("ping"), tools=[WEATHER]))).text == "pong"


async def test_thoughts_are_apart_from_the_answer(engine: LlamaEngine) -> None:
    swims = await ask(engine, chat(user(SWIMS)))
    planned = await ask(engine, chat(user(PLANNED), tools=[WEATHER]))

    assert swims.choices[0].fields["reasoning_content"] == THOUGHT
    assert swims.text == "No."
    assert planned.choices[0].fields["reasoning_content"] == PLAN
    assert calls_in(planned) == [("get_weather", PARIS)]


async def test_answer_without_thoughts_continues(engine: LlamaEngine) -> None:
    work = chat(user(question("Paris")))
    whole = await ask(engine, work)

    for end in range(1, len("I cannot know.")):
        rest = await ask(engine, work, "I cannot know."[:end])
        assert rest.text == "I cannot know."[end:]
        assert tokens_of(rest) == tokens_of(whole)


async def test_images_are_seen(engine: LlamaEngine) -> None:
    works = [
        chat(user([image_of(c), {"type": "text", "text": COLOUR}])) for c in COLOURS
    ]

    outcomes = await asyncio.gather(*[ask(engine, work) for work in works])

    assert [outcome.text for outcome in outcomes] == list(COLOURS.values())


@pytest.mark.long
async def test_image_is_never_fetched(engine: LlamaEngine) -> None:
    for url in ("http://127.0.0.1:9/a.png", "file:///etc/passwd"):
        part: JSON = {"type": "image_url", "image_url": {"url": url}}

        with pytest.raises(InvalidRequest, match="send a data: URL"):
            await ask(engine, chat(user([part])))


@pytest.mark.long
@posix
async def test_damaged_image_fails_and_runs_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ffprobe"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    engine = LlamaEngine("tools", TOOLS_GGUF, projector=PROJECTOR)
    url = f"data:image/png;base64,{base64.b64encode(b'no image').decode()}"
    part: JSON = {"type": "image_url", "image_url": {"url": url}}

    with pytest.raises(InvalidRequest, match="Failed to load image"):
        await ask(engine, chat(user([part])))
    await engine.close()

    assert not (tmp_path / "was-run").exists()


@pytest.mark.long
async def test_error_names_an_unloadable_projector(tmp_path: Path) -> None:
    broken = tmp_path / "mmproj.gguf"
    broken.write_bytes(PROJECTOR.read_bytes()[:5000])
    engine = LlamaEngine("tools", TOOLS_GGUF, projector=broken)

    with pytest.raises(ConfigError, match=r"with .*mmproj.gguf cannot be loaded"):
        await engine.start()

    await engine.close()
