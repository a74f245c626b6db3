"""Asks an engine and gathers what it answers."""

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Final

from shoal.domain.work import JSON, Chat, Outcome
from shoal.engines.port import Engine, Finished, Piece

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


async def pieces_of(pieces: AsyncGenerator[Piece, None]) -> list[Piece]:
    return [piece async for piece in pieces]


async def ask(engine: Engine, chat: Chat | str, continues: str = "") -> Outcome:
    """Return the whole answer, checked to have the form that the port promises."""
    work = chat_of(chat) if isinstance(chat, str) else chat
    *texts, last = await pieces_of(engine.chat(work, continues))
    assert all(isinstance(text, str) and text for text in texts)
    assert isinstance(last, Finished)
    return Outcome("".join(map(str, texts)), last.finish_reason, last.usage)
