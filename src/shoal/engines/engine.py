"""The Engine port: what a worker needs from something that runs models."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shoal.domain.outcome import AnswerPiece, Usage
from shoal.domain.work import Inference, Work
from shoal.domain.worker import ServedModel


@dataclass(frozen=True, slots=True)
class Finished:
    """The last item of an answer.

    ``finish_reason`` is that of every choice which had none of its own.
    """

    finish_reason: str = "stop"
    usage: Usage | None = None


Item: TypeAlias = AnswerPiece | Finished


class Engine(Protocol):
    """Runs one or more models."""

    slots: int
    """How many jobs run well at the same time, all models together."""

    @property
    def models(self) -> Sequence[ServedModel]:
        """What it can run, as known from ``start`` or the last ``refresh``."""
        ...

    async def start(self) -> None:
        """Make ready to answer.  Raises ConfigError if that can never work."""
        ...

    async def refresh(self) -> None:
        """Look whether it still works, and what it can run now.

        Raises Unavailable while it takes no jobs.
        """
        ...

    def run(self, work: Inference, continues: str = "") -> AsyncGenerator[Item, None]:
        """Do ``work``: pieces that are not empty, then one Finished.

        With ``Feature.CONTINUE`` the answer begins after ``continues``, and its usage
        counts the beginning among the tokens written.  Closing the iterator stops the
        work.

        Raises Unavailable if the engine cannot take it now (another worker may),
        InvalidRequest or ContextExceeded if the request is to blame, and JobError if
        the work failed.
        """
        ...

    async def close(self) -> None:
        """Stop whatever runs and give everything back."""
        ...


class WorkRunner(Protocol):
    """Does work of any kind, for one of an engine's models."""

    def run(self, work: Work, continues: str = "") -> AsyncGenerator[Item, None]:
        """Do ``work`` as ``Engine.run`` does."""
        ...
