"""Every dialect's own client, with a real model that calls tools, thinks and sees."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from harness.slow_imports import anthropic, ollama
from harness.speed import PATIENCE
from live.programs import KEY, Pool, Programs
from models.images import png_of
from models.tool_answers import (
    COLOUR,
    SWIMS,
    THOUGHT,
    TOOLS_GGUF,
    WEATHER,
    question,
)

MODEL = "tools"
PARIS = {"city": "Paris"}
CANNOT, SUNNY = "I cannot know.", "It is sunny in Paris."
RED = base64.b64encode(png_of("r")).decode()

FUNCTION = WEATHER["function"]
ASKED: list[Any] = [{"role": "user", "content": question("Paris")}]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A coordinator with one worker that runs the model with tools."""
    running = Programs(tmp_path_factory.mktemp("dialects"))
    try:
        pool = running.serve()
        pool.joined("one", "--model", f"{MODEL}={TOOLS_GGUF}")
        yield pool
    finally:
        running.close()


def test_chat_completions(pool: Pool) -> None:
    with pool.client() as client:
        completions: Any = client.chat.completions
        create = completions.create
        common = {"model": MODEL, "temperature": 0}
        tools = [WEATHER]

        whole = create(messages=ASKED, tools=tools, **common).choices[0]
        (call,) = whole.message.tool_calls
        with completions.stream(
            messages=ASKED, tools=tools, model=MODEL, temperature=0
        ) as stream:
            (streamed,) = stream.get_final_completion().choices
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        told = create(messages=[*ASKED, whole.message, result], tools=tools, **common)
        thought = create(messages=[{"role": "user", "content": SWIMS}], **common)
        image = {"url": f"data:image/png;base64,{RED}"}
        parts = [
            {"type": "image_url", "image_url": image},
            {"type": "text", "text": COLOUR},
        ]
        seen = create(messages=[{"role": "user", "content": parts}], **common)

    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    for each in (call, *(streamed.message.tool_calls or ())):
        assert each.function.name == "get_weather"
        assert json.loads(each.function.arguments) == PARIS
    assert told.choices[0].message.content == SUNNY
    assert thought.choices[0].message.reasoning_content == THOUGHT
    assert thought.choices[0].message.content == "No."
    assert seen.choices[0].message.content == "Red."


def test_responses(pool: Pool) -> None:
    tools: list[Any] = [{"type": "function", **FUNCTION}]
    with pool.client() as client:
        responses: Any = client.responses
        create = responses.create
        common = {"model": MODEL, "temperature": 0}

        asked = create(input=question("Paris"), tools=tools, **common)
        (call,) = asked.output
        result = {"type": "function_call_output", "call_id": call.call_id}
        told = create(
            input=[result | {"output": "sunny"}],
            previous_response_id=asked.id,
            tools=tools,
            **common,
        )
        with responses.stream(
            input=question("Paris"), tools=tools, model=MODEL, temperature=0
        ) as stream:
            (streamed,) = stream.get_final_response().output
        thought = create(input=SWIMS, **common)
        parts = [
            {"type": "input_image", "image_url": f"data:image/png;base64,{RED}"},
            {"type": "input_text", "text": COLOUR},
        ]
        seen = create(input=[{"role": "user", "content": parts}], **common)

    for each in (call, streamed):
        assert each.type == "function_call"
        assert each.name == "get_weather"
        assert json.loads(each.arguments) == PARIS
    assert told.output_text == SUNNY
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    assert thought.output_text == "No."
    assert seen.output_text == "Red."


def test_messages(pool: Pool) -> None:
    tool = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
    with anthropic.Anthropic(
        base_url=pool.url, api_key=KEY, max_retries=0, timeout=PATIENCE
    ) as client:
        messages: Any = client.messages
        create = messages.create
        common = {"model": MODEL, "max_tokens": 300, "extra_body": {"temperature": 0}}

        asked = create(messages=ASKED, tools=[tool], **common)
        (use,) = asked.content
        with messages.stream(messages=ASKED, tools=[tool], **common) as stream:
            (streamed,) = stream.get_final_message().content
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
        turns = [
            *ASKED,
            {"role": "assistant", "content": asked.content},
            {"role": "user", "content": [result]},
        ]
        (told,) = create(messages=turns, tools=[tool], **common).content
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
        swims = {"messages": [{"role": "user", "content": SWIMS}]}
        thought = create(**swims, **thinking, **common | {"max_tokens": 1100})
        source = {"type": "base64", "media_type": "image/png", "data": RED}
        parts = [{"type": "image", "source": source}, {"type": "text", "text": COLOUR}]
        (seen,) = create(
            messages=[{"role": "user", "content": parts}], **common
        ).content

    assert asked.stop_reason == "tool_use"
    for each in (use, streamed):
        assert each.type == "tool_use"
        assert (each.name, each.input) == ("get_weather", PARIS)
    assert told.text == SUNNY
    assert [block.type for block in thought.content] == ["thinking", "text"]
    assert thought.content[0].thinking == THOUGHT
    assert seen.text == "Red."


def test_ollama(pool: Pool) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    connection: Any = ollama.Client(f"{pool.url}/ollama", headers=headers)
    with connection as client:
        options = {"temperature": 0}

        asked = client.chat(MODEL, ASKED, tools=[WEATHER], options=options)
        (call,) = asked.message.tool_calls
        streamed = client.chat(
            MODEL, ASKED, tools=[WEATHER], options=options, stream=True
        )
        (again,) = [each for part in streamed for each in part.message.tool_calls or ()]
        result = {"role": "tool", "tool_name": "get_weather", "content": "sunny"}
        turns = [*ASKED, asked.message, result]
        told = client.chat(MODEL, turns, tools=[WEATHER], options=options)
        swims = [{"role": "user", "content": SWIMS}]
        thought = client.chat(MODEL, swims, options=options, think=True)
        image = {"role": "user", "content": COLOUR, "images": [RED]}
        seen = client.chat(MODEL, [image], options=options)

    for each in (call, again):
        assert each.function.name == "get_weather"
        assert each.function.arguments == PARIS
    assert told.message.content == SUNNY
    assert (thought.message.thinking, thought.message.content) == (THOUGHT, "No.")
    assert seen.message.content == "Red."
