"""The Engine port: a worker's interface to what runs models."""

from collections.abc import AsyncGenerator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shoal.domain.outcome import AnswerPiece, Usage
from shoal.domain.work import Inference, Work
from shoal.domain.worker import ServedModel

TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")
"""The ``traceparent`` of the job that the current task runs, for engines that pass it
on; empty: it is not traced."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last item of an answer.

    ``finish_reason`` applies to all choices without one of their own.
    """

    finish_reason: str = "stop"
    usage: Usage | None = None


Item: TypeAlias = AnswerPiece | Finished


@dataclass(frozen=True, slots=True)
class Progress:
    """How far work has come that is no answer: a share from 0 to 1, if it is known."""

    share: float | None = None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process has done so far.

    ``seconds`` are those of processors; ``read`` and ``memory`` are in bytes, and so is
    what of the memory is ``mapped`` from files, which counts as free.
    """

    seconds: float
    read: int
    memory: int
    mapped: int = 0

    def has_moved_since(self, earlier: "Activity") -> bool:
        """Return whether the process has done anything since then."""
        return (self.seconds, self.read) != (
            earlier.seconds,
            earlier.read,
        ) or self.memory > earlier.memory


class Engine(Protocol):
    """Runs one or more models."""

    slots: int
    """Number of concurrent jobs, for all models together."""

    @property
    def models(self) -> Sequence[ServedModel]:
        """The models, as of ``start`` or the last ``refresh``."""

    async def start(self) -> None:
        """Start.  Raises ConfigError if the configuration is unusable."""

    async def refresh(self) -> None:
        """Check that the engine works, and update its models.

        Raises Unavailable while it accepts no jobs.
        """

    def run(
        self, work: Inference, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Item, None]:
        """Run ``work``: yield non-empty pieces, then one Finished.

        With ``Feature.CONTINUE`` the answer continues after ``continues``, and its
        usage counts those tokens as completion tokens.  It goes on in the ``thoughts``
        before that, if it has only these, or has others.  Closing the iterator aborts.

        Raises Unavailable if the engine cannot accept it now (another worker may),
        InvalidRequest or ContextExceeded if the request is at fault, and JobError if
        the work failed.
        """

    async def close(self) -> None:
        """Abort all jobs and release all resources."""


class WorkRunner(Protocol):
    """Runs work of any kind, for one of an engine's models."""

    def run(
        self, work: Work, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Item | Progress, None]:
        """Run ``work`` as ``Engine.run`` does; what is no inference may report."""
