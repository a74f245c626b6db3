"""What a worker needs from something that runs a model."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shoal.domain.work import Chat, Feature, Usage


@dataclass(frozen=True, slots=True)
class Finished:
    """The last item of an answer."""

    finish_reason: str = "stop"
    usage: Usage | None = None


Piece: TypeAlias = str | Finished


class Engine(Protocol):
    """Runs one model."""

    model: str
    """The name that users ask for."""

    features: frozenset[Feature]

    slots: int
    """How many chats run well at the same time."""

    async def start(self) -> None:
        """Make ready to answer.  Raises ConfigError if that can never work."""
        ...

    def chat(self, chat: Chat, continues: str = "") -> AsyncGenerator[Piece, None]:
        """Answer ``chat``: non-empty texts, then one Finished.

        With ``Feature.CONTINUE`` the answer begins after ``continues``, and its usage
        counts the beginning among the tokens written.  Closing the iterator stops the
        work.

        Raises Unavailable if the engine cannot take the chat now (another worker may),
        and JobError if the chat itself cannot be answered.
        """
        ...

    async def close(self) -> None:
        """Stop whatever runs and give everything back."""
        ...
