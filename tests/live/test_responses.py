"""OpenAI's client and the Responses API, with real models and processes."""

from collections.abc import Sequence
from typing import Any

import pytest

from harness.slow_imports import openai
from live.programs import GatedModel, Programs, eventually
from models.tiny_answers import ANSWERS
from models.tool_answers import SWIMS, THOUGHT, TOOLS_GGUF, WEATHER, question
from shoal.gateway.chat.responses.events import NUMBERS_PER_START

WEATHER_TOOL: Any = {"type": "function", **WEATHER["function"], "strict": False}
STORY = "Tell me a story."


def text_in(events: Sequence[Any]) -> str:
    deltas = (each for each in events if each.type == "response.output_text.delta")
    return "".join(each.delta for each in deltas)


def test_tools_and_thoughts_are_streamed_and_continued(programs: Programs) -> None:
    pool = programs.serve()
    pool.joined("w", "--model", f"tools={TOOLS_GGUF}", "--context", "512")
    asked: Any = {"model": "tools", "temperature": 0}
    with pool.client() as client:
        thinking = client.responses.create(input=SWIMS, **asked)
        with client.responses.stream(
            input=question("Paris"), tools=[WEATHER_TOOL], **asked
        ) as stream:
            events = list(stream)
            called = stream.get_final_response()
        (call,) = called.output
        assert call.type == "function_call"
        result: Any = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": "sunny",
        }
        answer = client.responses.create(
            input=[result],
            tools=[WEATHER_TOOL],
            previous_response_id=called.id,
            **asked,
        )
        stored = client.responses.retrieve(answer.id)

    assert [item.type for item in thinking.output] == ["reasoning", "message"]
    assert thinking.to_dict()["output"][0]["content"] == [
        {"type": "reasoning_text", "text": THOUGHT}
    ]
    assert thinking.output_text == "No."
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Paris"}')
    arguments = (
        e for e in events if e.type == "response.function_call_arguments.delta"
    )
    assert "".join(each.delta for each in arguments) == call.arguments
    assert answer.output_text == "It is sunny in Paris."
    assert stored.to_dict() == answer.to_dict()


def test_background_response_survives_the_coordinator(
    programs: Programs, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    pool.joined("w", *slow_model.flags)
    with pool.client() as client:
        seen: list[Any] = []
        for event in client.responses.create(
            model="tiny", input=STORY, background=True, stream=True
        ):
            seen.append(event)
            if text_in(seen) == "".join(ANSWERS[STORY][:5]):
                break
    id_, last = seen[0].response.id, seen[-1].sequence_number

    pool.program.kill()
    pool = programs.serve(port=pool.port)
    with pool.client() as client:
        eventually(
            lambda: [each["busy"] for each in pool.workers()] == [1], "it goes on"
        )
        running = client.responses.retrieve(id_)
        slow_model.go_on.set()
        whole = list(client.responses.retrieve(id_, stream=True))
        begun = NUMBERS_PER_START + 5  # the number of the text's first character
        rest = client.responses.retrieve(id_, stream=True, starting_after=begun + 9)
        resumed = list(rest)
        with pytest.raises(openai.BadRequestError, match="the answer starts over"):
            client.responses.retrieve(id_, stream=True, starting_after=last)

    assert running.status == "in_progress"
    assert whole[-1].type == "response.completed"
    assert whole[-1].response.output_text == text_in(whole) == ANSWERS[STORY]
    assert whole[0].sequence_number == NUMBERS_PER_START
    assert text_in(resumed) == ANSWERS[STORY][10:]


def test_cancelled_response_frees_its_worker(
    programs: Programs, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    pool.joined("w", *slow_model.flags)
    with pool.client() as client:
        queued = client.responses.create(model="tiny", input=STORY, background=True)
        eventually(lambda: slow_model.requests == 1, "the response begins")

        cancelled = client.responses.cancel(queued.id)
        slow_model.go_on.set()
        eventually(
            lambda: all(each["busy"] == 0 for each in pool.workers()),
            "the worker is free",
        )
        client.responses.delete(queued.id)
        after = client.responses.create(model="tiny", input="ping")

    assert (queued.status, cancelled.status) == ("queued", "cancelled")
    assert after.output_text == "pong"
