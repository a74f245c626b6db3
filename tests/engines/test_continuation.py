"""Every kind of server that can continue an answer does, whatever it samples."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product

import pytest
from msgspec import structs

from engines.outputs import ask, tokens_of
from engines.sampling_server import (
    LLAMA_SERVER,
    LMDEPLOY,
    NEW_TURN,
    NUMBERS,
    OLLAMA,
    SGLANG,
    VLLM,
    Habits,
    SamplingServer,
    counts,
    serving,
)
from shoal.domain.errors import CannotDo, Unavailable
from shoal.domain.work import Chat, Completion, Feature
from shoal.engines.openai_server import OpenAIEngine

KINDS = {
    "llama-server": LLAMA_SERVER,
    "vLLM": VLLM,
    "SGLang": SGLANG,
    "LMDeploy": LMDEPLOY,
    "template that trims": replace(SGLANG, trims=True),
    "template that begins a thought": replace(LLAMA_SERVER, thinks=True),
    "tokenizer, and a template that begins a thought": replace(VLLM, thinks=True),
}
REASONING = {
    "thoughts, by a template": replace(LLAMA_SERVER, reasons=True),
    "thoughts, by a tokenizer": replace(VLLM, reasons=True),
}
KINDS |= REASONING
COUNT = Chat("counter", ({"role": "user", "content": "Count."},), temperature=0.8)
ALL = [*range(1, len(NUMBERS) + 1)]


@asynccontextmanager
async def engine_of(
    habits: Habits, seed: int = 1
) -> AsyncIterator[tuple[OpenAIEngine, SamplingServer]]:
    server = SamplingServer(habits, seed)
    async with serving(server) as (url,):
        engine = OpenAIEngine(url)
        await engine.start()
        try:
            yield engine, server
        finally:
            await engine.close()


def continues(engine: OpenAIEngine) -> bool:
    (model,) = engine.models
    return Feature.CONTINUE in model.features


@pytest.mark.parametrize("kind", KINDS)
async def test_answer_is_continued_after_each_of_its_pieces(
    kind: str, subtests: pytest.Subtests
) -> None:
    async with engine_of(KINDS[kind]) as (engine, _):
        assert continues(engine)
        for end, space in product(range(1, len(NUMBERS)), ("", " ")):
            with subtests.test(pieces=end, space=space):
                beginning = " ".join(NUMBERS[:end]) + space

                rest = await ask(engine, COUNT, beginning)

                assert counts(f"{beginning}{rest.text}") == ALL
                assert "  " not in f"{beginning}{rest.text}"
                assert rest.usage is not None
                spaces = 0 if space == "" else 1  # a token of its own
                assert rest.usage.completion_tokens - len(NUMBERS) in (0, spaces)


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_of_the_beginning_count_towards_the_limit(kind: str) -> None:
    async with engine_of(KINDS[kind]) as (engine, _):
        limited = structs.replace(COUNT, max_tokens=5)

        rest = await ask(engine, limited, "one two three")
        none = await ask(engine, limited, "one two three four five")

    assert counts(rest.text) == [4, 5]
    assert rest.finish_reason == none.finish_reason == "length"
    assert none.text == ""
    assert rest.usage is not None
    assert rest.usage.completion_tokens == 5


@pytest.mark.parametrize("kind", KINDS)
async def test_stop_string_across_the_cut_ends_the_answer(kind: str) -> None:
    async with engine_of(KINDS[kind]) as (engine, _):
        stops = [f"two {three}" for three in ("three", "3")]
        stopped = structs.replace(COUNT, options={"stop": stops})

        rest = await ask(engine, stopped, "one two")

    assert rest.text.strip() == ""
    assert rest.finish_reason == "stop"


@pytest.mark.parametrize("kind", REASONING)
async def test_answer_is_continued_in_its_thoughts(
    kind: str, subtests: pytest.Subtests
) -> None:
    async with engine_of(KINDS[kind]) as (engine, _):
        for end in range(1, len(NUMBERS) + 1):
            with subtests.test(thoughts=end):
                thoughts = " ".join(NUMBERS[:end])

                rest = await ask(engine, COUNT, "", thoughts)
                text = await ask(engine, COUNT, "one two", thoughts)

                fields = rest.choices[0].fields if rest.choices else {}
                told = fields.get("reasoning_content", "")
                assert counts(f"{thoughts}{told}") == counts(rest.text) == ALL
                assert counts(text.text) == ALL[2:]
                assert rest.usage is not None
                assert text.usage is not None
                assert rest.usage.completion_tokens >= 2 * len(NUMBERS)
                assert text.usage.completion_tokens >= end + len(NUMBERS)


@pytest.mark.parametrize("habits", [SGLANG, LMDEPLOY], ids=lambda habits: habits.owner)
async def test_thoughts_that_no_text_continues_begin_anew(habits: Habits) -> None:
    async with engine_of(replace(habits, reasons=True)) as (engine, _):
        rest = await ask(engine, COUNT, "", "one two")

    assert counts(str(rest.choices[0].fields["reasoning_content"])) == ALL
    assert counts(rest.text) == ALL


async def test_real_server_continues_an_answer(server_url: str) -> None:
    engine = OpenAIEngine(server_url)
    await engine.start()
    try:
        assert continues(engine)
        whole = await ask(engine, "Count to sixty.")
        middle = len(whole.text) // 2

        rest = await ask(engine, "Count to sixty.", whole.text[:middle])
    finally:
        await engine.close()

    assert whole.text[:middle] + rest.text == whole.text
    assert tokens_of(rest) == tokens_of(whole)


async def test_server_that_begins_a_new_turn_is_offered_for_no_continuation() -> None:
    async with engine_of(replace(NEW_TURN, owner="vllm")) as (engine, _):
        assert not continues(engine)
        with pytest.raises(Unavailable, match="cannot continue"):
            await ask(engine, COUNT, "one two")


async def test_model_that_is_loaded_on_demand_is_tried_once_it_has_answered() -> None:
    # Not before: the trial would load each of dozens of models.
    async with engine_of(replace(OLLAMA, owner="somebody")) as (engine, server):
        await engine.refresh()
        assert not server.asked
        assert not continues(engine)

        await ask(engine, COUNT)
        await engine.refresh()
        assert continues(engine)
        tried = len(server.asked)
        await engine.refresh()

        assert len(server.asked) == tried
        assert counts((await ask(engine, COUNT, "one two")).text) == ALL[2:]


async def test_text_is_continued_by_any_server() -> None:
    async with engine_of(NEW_TURN) as (engine, _):
        text = Completion("counter", "Count: ", temperature=0.8)

        rest = await ask(engine, text, "one two")

    assert counts(rest.text) == ALL[2:]


def begun_by(text: str) -> Chat:
    """Return a chat whose client has begun the answer, as Anthropic's API has it."""
    begun = {"role": "assistant", "content": text}
    return structs.replace(COUNT, messages=(*COUNT.messages, begun))


async def test_sglang_that_counts_no_tokens_is_believed_to_continue() -> None:
    async with engine_of(replace(SGLANG, silent=True)) as (engine, _):
        answer = await ask(engine, begun_by("one two three"))

    assert counts(answer.text) == ALL[3:]
    assert not any(Feature.CONTINUE in each.features for each in engine.models)


@pytest.mark.parametrize("kind", [*KINDS, "on demand"])
async def test_beginning_of_an_answer_in_the_request_is_continued(kind: str) -> None:
    habits = KINDS.get(kind, replace(OLLAMA, owner="somebody"))
    async with engine_of(habits) as (engine, _):
        whole = await ask(engine, begun_by("one two three"))
        rest = await ask(engine, begun_by("one two three"), " four five")
        empty = await ask(engine, begun_by(""))

    assert counts(whole.text) == ALL[3:]
    assert counts(rest.text) == ALL[5:]
    assert counts(empty.text.rpartition("</think>")[2]) == ALL


async def test_engine_that_would_begin_a_new_answer_refuses_a_begun_one() -> None:
    async with engine_of(NEW_TURN) as (engine, _):
        with pytest.raises(CannotDo, match="cannot continue it") as caught:
            await ask(engine, begun_by("one two three"))

    assert caught.value.field == "messages"
