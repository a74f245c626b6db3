"""Runs a job on an engine and collects its answer."""

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Final

from shoal.domain.answer_assembly import assemble
from shoal.domain.outcome import AnswerPiece, Delta, Outcome
from shoal.domain.work import JSON, Chat, Inference
from shoal.engines.engine import Engine, Finished, Item

TINY: Final = Path(__file__).parent.parent / "models" / "tiny.gguf"

ENDLESS: Final[Mapping[str, JSON]] = {"ignore_eos": True}
"""Options with which the tiny model goes on until its context is full."""


def chat_of(
    question: str,
    *,
    max_tokens: int | None = None,
    options: Mapping[str, JSON] | None = None,
) -> Chat:
    messages = ({"role": "user", "content": question},)
    return Chat("tiny", messages, max_tokens, 0.0, options or {})


async def pieces_of(pieces: AsyncGenerator[Item, None]) -> list[Item]:
    return [piece async for piece in pieces]


async def ask(
    engine: Engine, chat: Inference | str, continues: str = "", thoughts: str = ""
) -> Outcome:
    """Return the complete answer, checked against the contract of the port."""
    work = chat_of(chat) if isinstance(chat, str) else chat
    *items, last = await pieces_of(engine.run(work, continues, thoughts))
    pieces: list[AnswerPiece] = [
        item for item in items if isinstance(item, str | Delta)
    ]
    assert all(pieces)
    assert len(pieces) == len(items)
    assert isinstance(last, Finished)
    return assemble(pieces, last.finish_reason, last.usage)


def tokens_of(outcome: Outcome) -> tuple[int, int]:
    """Return how many tokens the engine has read and written for an answer.

    How many of them it had read before depends on the jobs before this one.
    """
    assert outcome.usage is not None
    return outcome.usage.prompt_tokens, outcome.usage.completion_tokens
