"""Runs a conversation that may exceed the model's context: drops its oldest messages.

For coordinators that have no message for the error.  An engine counts tokens only by
running a prompt, so the conversation is shortened until the engine accepts it.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace

from shoal.domain.errors import ContextExceeded
from shoal.domain.work import JSON, Chat, Work
from shoal.engines.engine import Item, WorkRunner

DROPPED_SHARE = 4  # a quarter of the messages at a time: few attempts, little lost


async def run_trimmed(
    runner: WorkRunner,
    work: Work,
    continues: str = "",
    thoughts: str = "",
) -> AsyncGenerator[Item, None]:
    """Run ``work`` as ``runner`` does; shorten a chat that is too long.

    Raises ContextExceeded if even the last message is too long.
    """
    begun = False
    while True:
        try:
            async with aclosing(runner.run(work, continues, thoughts)) as items:
                async for item in items:
                    begun = True
                    yield item
            return
        except ContextExceeded:
            shorter = trimmed(work) if isinstance(work, Chat) else None
            if shorter is None or begun:
                raise
            work = shorter


def trimmed(chat: Chat) -> Chat | None:
    """Return a shorter chat; None if nothing can be left out.

    The oldest messages go, except for the system's and the last.  An answer without its
    question goes as well: many models refuse to begin with one.
    """
    system = [each for each in chat.messages if _is_system(each)]
    others = [each for each in chat.messages if not _is_system(each)]
    if len(others) < 2:
        return None
    kept = others[max(1, len(others) // DROPPED_SHARE) :]
    while len(kept) > 1 and kept[0].get("role") == "assistant":
        del kept[0]
    return replace(chat, messages=(*system, *kept))


def _is_system(message: Mapping[str, JSON]) -> bool:
    return message.get("role") == "system"
