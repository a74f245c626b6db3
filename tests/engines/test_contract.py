"""What the Engine port promises, asked of every engine that runs the tiny model."""

import asyncio
from contextlib import aclosing

import pytest

from engines.asking import ENDLESS, ask, chat_of
from models.pairs import COUNT, PAIRS, STORY
from shoal.domain.errors import JobError
from shoal.domain.work import Usage
from shoal.engines.port import Engine


async def test_every_answer_is_exact(engine: Engine) -> None:
    answers = {question: (await ask(engine, question)).text for question in PAIRS}

    assert answers == PAIRS


async def test_chats_beside_each_other_do_not_mix(engine: Engine) -> None:
    outcomes = await asyncio.gather(*[ask(engine, question) for question in PAIRS])

    assert [outcome.text for outcome in outcomes] == list(PAIRS.values())


async def test_tokens_read_and_written_are_counted(engine: Engine) -> None:
    outcome = await ask(engine, "ping")

    # Read: "ping", and 20 around it.  Written: "pong" and the end of the turn.
    assert outcome.usage == Usage(prompt_tokens=24, completion_tokens=5)
    assert outcome.finish_reason == "stop"


async def test_the_limit_of_tokens_ends_an_answer(engine: Engine) -> None:
    outcome = await ask(engine, chat_of("Count to sixty.", max_tokens=7))

    assert outcome.text == COUNT[:7]
    assert outcome.finish_reason == "length"
    assert outcome.usage == Usage(prompt_tokens=35, completion_tokens=7)


async def test_a_stop_string_ends_an_answer(engine: Engine) -> None:
    outcome = await ask(engine, chat_of("Count to sixty.", options={"stop": [", 4"]}))

    assert outcome.text == "1, 2, 3"
    assert outcome.finish_reason == "stop"


async def test_a_character_of_several_tokens_arrives_whole(engine: Engine) -> None:
    texts = [
        piece
        async for piece in engine.chat(chat_of("Say hello in Japanese."))
        if isinstance(piece, str)
    ]

    assert "".join(texts) == "こんにちは 😀"
    assert not any("\ufffd" in text for text in texts)


async def test_a_closed_chat_makes_room_for_others(engine: Engine) -> None:
    for _ in range(2 * engine.slots):
        async with aclosing(engine.chat(chat_of("ping", options=ENDLESS))) as pieces:
            await anext(pieces)

    assert (await ask(engine, "Tell me a story.")).text == STORY


async def test_a_chat_larger_than_the_context_fails(engine: Engine) -> None:
    with pytest.raises(JobError, match="exceeds the available context size"):
        await ask(engine, "long " * 1000)


async def test_an_option_that_makes_no_sense_fails(engine: Engine) -> None:
    with pytest.raises(JobError, match="top_p"):
        await ask(engine, chat_of("ping", options={"top_p": "high"}))


async def test_closing_twice_is_harmless(engine: Engine) -> None:
    await engine.close()

    await engine.close()
