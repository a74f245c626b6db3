"""The contract of the Engine port, for every engine that runs the tiny model."""

import asyncio
import json
from contextlib import aclosing

import pytest

from engines.outputs import ENDLESS, TINY, ask, chat_of, pieces_of, tokens_of
from models.tiny_answers import ANSWERS, COUNT, STORY
from shoal.domain.errors import ContextExceeded, InvalidRequest
from shoal.domain.outcome import Delta
from shoal.domain.work import JSON, Completion, Feature, JobKind
from shoal.engines.engine import Engine
from shoal.engines.llama_engine import LlamaEngine
from shoal.engines.openai_server import OpenAIEngine

# The tests share the engines, and so their loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_answers_are_exact(engine: Engine) -> None:
    answers = {question: (await ask(engine, question)).text for question in ANSWERS}

    assert answers == ANSWERS


async def test_concurrent_chats_do_not_mix(engine: Engine) -> None:
    outcomes = await asyncio.gather(*[ask(engine, question) for question in ANSWERS])

    assert [outcome.text for outcome in outcomes] == list(ANSWERS.values())


async def test_usage_is_counted(engine: Engine) -> None:
    outcome = await ask(engine, "ping")

    # Read: "ping", and 20 around it.  Written: "pong" and the end of the turn.
    assert tokens_of(outcome) == (24, 5)
    assert outcome.finish_reason == "stop"


async def test_token_limit_ends_an_answer(engine: Engine) -> None:
    outcome = await ask(engine, chat_of("Count to sixty.", max_tokens=7))

    assert outcome.text == COUNT[:7]
    assert outcome.finish_reason == "length"
    assert tokens_of(outcome) == (35, 7)


async def test_stop_string_ends_an_answer(engine: Engine) -> None:
    outcome = await ask(engine, chat_of("Count to sixty.", options={"stop": [", 4"]}))

    assert outcome.text == "1, 2, 3"
    assert outcome.finish_reason == "stop"


async def test_character_of_several_tokens_arrives_whole(engine: Engine) -> None:
    texts = [
        piece
        async for piece in engine.run(chat_of("Say hello in Japanese."))
        if isinstance(piece, str)
    ]

    assert "".join(texts) == "こんにちは 😀"
    assert not any("\ufffd" in text for text in texts)


async def test_closed_chat_frees_its_slot(engine: Engine) -> None:
    for _ in range(2 * engine.slots):
        async with aclosing(engine.run(chat_of("ping", options=ENDLESS))) as pieces:
            await anext(pieces)

    assert (await ask(engine, "Tell me a story.")).text == STORY


async def test_chat_larger_than_the_context_fails(engine: Engine) -> None:
    with pytest.raises(ContextExceeded, match="exceeds the available context size"):
        await ask(engine, "long " * 1000)


async def test_invalid_option_fails(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="top_p"):
        await ask(engine, chat_of("ping", options={"top_p": "high"}))


async def test_several_choices_are_counted_together(engine: Engine) -> None:
    outcome = await ask(engine, chat_of("ping", options={"n": 3}))

    assert [choice.fields["content"] for choice in outcome.choices] == ["pong"] * 3
    assert {choice.finish_reason for choice in outcome.choices} == {"stop"}
    assert tokens_of(outcome) == (24, 15)


async def test_log_probabilities_are_returned_with_their_tokens(engine: Engine) -> None:
    options: dict[str, JSON] = {"logprobs": True, "top_logprobs": 2}
    *pieces, _ = await pieces_of(engine.run(chat_of("ping", options=options)))

    assert "".join(
        str(p.fields["content"]) for p in pieces if isinstance(p, Delta)
    ) == ("pong")
    for piece in pieces:
        assert isinstance(piece, Delta)
        assert isinstance(piece.logprobs, dict)
        (token,) = piece.logprobs["content"]
        assert token["token"] == piece.fields["content"]
        assert len(token["top_logprobs"]) == 2


async def test_answer_obeys_a_schema(engine: Engine) -> None:
    properties: JSON = {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}}
    schema: JSON = {
        "type": "object",
        "properties": properties,
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    form: JSON = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    outcome = await ask(
        engine, chat_of("ping", max_tokens=200, options={"response_format": form})
    )

    answer = json.loads(outcome.text)
    assert answer.keys() == {"a", "b"}
    assert answer["a"] in ("x", "y")
    assert isinstance(answer["b"], bool)


async def test_invalid_schema_is_an_invalid_request(
    engine: Engine,
) -> None:
    form: JSON = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {"type": "nonsense"}},
    }
    with pytest.raises(InvalidRequest, match="nonsense"):
        await ask(engine, chat_of("ping", options={"response_format": form}))


PROMPT = "<|start|>user\nping<|end|>\n<|start|>assistant\n"


async def test_completion_continues_a_text(engine: Engine) -> None:
    outcome = await ask(engine, Completion("tiny", PROMPT, temperature=0.0))

    assert outcome.text == "pong"
    assert tokens_of(outcome) == (24, 5)


async def test_each_of_several_prompts_is_answered(engine: Engine) -> None:
    prompts = (PROMPT, PROMPT.replace("ping", "Count to sixty."))
    outcome = await ask(engine, Completion("tiny", prompts, 4, temperature=0.0))

    assert [c.fields["content"] for c in outcome.choices] == ["pong", COUNT[:4]]
    assert outcome.usage is not None
    assert outcome.usage.completion_tokens == 8


@pytest.mark.parametrize("option", ["echo", "suffix", "best_of"])
async def test_ignored_option_is_rejected(engine: Engine, option: str) -> None:
    with pytest.raises(InvalidRequest, match=option):
        await ask(engine, Completion("tiny", "a", 1, options={option: 2}))


async def test_model_is_described_correctly(engine: Engine) -> None:
    await engine.refresh()

    (model,) = engine.models
    assert (model.name, model.context) == ("tiny", 2048)
    assert model.kinds == {JobKind.CHAT, JobKind.COMPLETION}
    assert not model.features & {Feature.TOOLS, Feature.IMAGES, Feature.AUDIO}


async def test_closing_twice_is_harmless(server_url: str) -> None:
    for engine in (LlamaEngine("tiny", TINY), OpenAIEngine(server_url)):
        await engine.start()
        await engine.close()

        await engine.close()
