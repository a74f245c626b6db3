"""Where a job is done: by which runner, in whose slots."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from shoal.domain.work import Work
from shoal.engines.port import Runner
from shoal.worker.slots import Slots


def _untroubled() -> None:
    """Take note of nothing."""


@dataclass(slots=True, eq=False)
class Place:
    """One of an engine's models, as one coordinator's jobs find it.

    ``trouble`` is told when the engine did not take a job, and ``jobs`` counts those
    that the coordinator has here, also those that wait for a slot.
    """

    runner: Runner
    slots: Slots
    trouble: Callable[[], None] = _untroubled
    jobs: int = 0

    @property
    def free(self) -> int:
        """How many more jobs would run at once, whichever models they are for."""
        return self.slots.size - self.slots.jobs


Find: TypeAlias = Callable[[Work], Place | None]
"""Says where work is to be done; None: nowhere here."""


def only(
    runner: Runner, slots: Slots, trouble: Callable[[], None] = _untroubled
) -> Find:
    """Return what sends all work to one place, on wires that know one model."""
    place = Place(runner, slots, trouble)
    return lambda work: place
