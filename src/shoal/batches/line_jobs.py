"""The port to what the lines of a batch mean: their requests, jobs and results.

``shoal.gateway.batches`` fills it in.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shoal.store.batches import BatchStatus, LineResult, StoredBatch


@dataclass(frozen=True, slots=True)
class CheckedLine:
    """A line of an input file that names a request."""

    custom_id: str
    model: str


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A line to run.

    ``read`` returns it, and raises StoreError.  ``seconds`` is how long its batch still
    lasts.  Unless it ``may_begin``, it only waits for a job that it has already.
    """

    batch: StoredBatch
    line: int
    read: Callable[[], Awaitable[bytes]]
    seconds: float
    may_begin: bool


@dataclass(frozen=True, slots=True)
class LinePostponed:
    """The line has no result yet: try again after some seconds.

    ``alone``: the others of its batch may still begin.
    """

    seconds: float
    reason: str
    alone: bool = False


@dataclass(frozen=True, slots=True)
class LineGivenUp:
    """The line has no job, and its batch ends."""


@dataclass(frozen=True, slots=True)
class LineUnauthorized:
    """The key of the batch is no longer valid."""

    reason: str


LineEnd: TypeAlias = LineResult | LinePostponed | LineGivenUp | LineUnauthorized


class LineJobs(Protocol):
    """Runs the lines of batches as jobs."""

    def check(self, endpoint: str, data: bytes) -> CheckedLine:
        """Return what a line requests.  Raises InvalidRequest naming a wrong field."""

    def rejection(self, batch: StoredBatch, model: str) -> str | None:
        """Return why no line of a new batch can run; None: they can."""

    def room(self, owner: str, model: str) -> int:
        """Return how many lines of an owner may run or wait at once."""

    def on_room(self, call: Callable[[], None]) -> None:
        """Call ``call`` once, when there may be more room than now."""

    async def run(self, request: LineRequest) -> LineEnd:
        """Run a line to its end, once however often this is called for it."""

    def cancel(self, batch: StoredBatch) -> None:
        """Cancel the open jobs of the lines that run."""

    def left_out(
        self, batch: StoredBatch, line: int, data: bytes, status: BatchStatus
    ) -> LineResult:
        """Return the result of a line that its batch ended without.

        Called in a thread.
        """
