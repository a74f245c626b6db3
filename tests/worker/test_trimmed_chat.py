"""Conversations that exceed the context lose their oldest messages."""

from collections.abc import AsyncGenerator

import pytest

from shoal.domain.errors import ContextExceeded
from shoal.domain.work import JSON, Chat, Work, message_text
from shoal.engines.engine import Finished, Item, Progress
from shoal.worker.jobs import run_trimmed, trimmed

SYSTEM: dict[str, JSON] = {"role": "system", "content": "be brief"}


def user(text: str) -> dict[str, JSON]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, JSON]:
    return {"role": "assistant", "content": text}


class CountingRunner:
    """Counts a word as a token, and reserves room for the answer, as vLLM does."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.accepted: list[Chat] = []
        self.attempts = 0

    async def run(
        self, work: Work, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Item, None]:
        assert isinstance(work, Chat)
        self.attempts += 1
        words = sum(len(message_text(each).split()) for each in work.messages)
        if words + (work.max_tokens or 1) > self.context:
            raise ContextExceeded("too long")
        self.accepted.append(work)
        yield "done"
        yield Finished()


async def run(runner: CountingRunner, chat: Chat) -> list[Item]:
    return [
        item
        async for item in run_trimmed(runner, chat)
        if not isinstance(item, Progress)
    ]


async def test_a_chat_that_fits_is_run_as_it_is() -> None:
    runner = CountingRunner(100)
    chat = Chat("m", (SYSTEM, user("hello")), 50)

    assert await run(runner, chat) == ["done", Finished()]
    assert runner.accepted == [chat]


async def test_the_oldest_messages_go_first_and_the_system_stays() -> None:
    runner = CountingRunner(30)
    talk = (user("a " * 20), assistant("b " * 5), user("c " * 5), user("last"))

    await run(runner, Chat("m", (SYSTEM, *talk), 10))

    assert runner.accepted[0].messages == (SYSTEM, user("c " * 5), user("last"))


async def test_a_thousand_messages_take_few_attempts() -> None:
    runner = CountingRunner(64)
    talk = tuple(user(f"word {number}") for number in range(1000))

    await run(runner, Chat("m", talk, 1))

    assert runner.accepted[0].messages[-1] == user("word 999")
    assert runner.attempts < 20


async def test_a_last_message_that_is_too_long_fails() -> None:
    with pytest.raises(ContextExceeded):
        await run(CountingRunner(10), Chat("m", (SYSTEM, user("a " * 20)), 1))


def test_a_conversation_does_not_begin_with_an_answer() -> None:
    chat = Chat("m", (user("a"), assistant("b"), user("c")))

    shorter = trimmed(chat)

    assert shorter is not None
    assert shorter.messages == (user("c"),)
    assert trimmed(shorter) is None
