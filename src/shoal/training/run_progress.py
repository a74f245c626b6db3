"""The course of one run in numbers: its loss and its pace, and how far each rank is.

It follows from what members report, and its memory is bounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

POINTS_MAX = 2000  # of a run; then every second one is left out
POINTS_OF_ENDED = 500  # of a run that has ended
RANKS_KEPT = 1024  # of which the progress is kept
INTEGER_MAX = 2**53  # larger ones are not exact as a float


class StepPoint(NamedTuple):
    """A step that was reported; ``seconds`` are those of a step since the last one.

    ``at`` is in Unix seconds.
    """

    step: int
    loss: float | None
    seconds: float | None
    at: float


class StepHash(NamedTuple):
    """The hash of a rank's parameters after a step."""

    step: int
    text: str


@dataclass(slots=True)
class RankProgress:
    """How far a rank is; ``running``: it has started and not ended."""

    running: bool = True
    step: int | None = None
    step_seconds: float | None = None
    reported_at: float = 0.0  # Unix seconds
    hash: StepHash | None = None  # the last one


@dataclass(slots=True)
class RunProgress:
    """The points of a run, and its ranks.

    The points are those of one rank, which has them for all: the first that reported a
    step, or a lower one.
    """

    ranks: dict[int, RankProgress] = field(default_factory=dict)
    _points: list[StepPoint] = field(default_factory=list)
    _latest: StepPoint | None = None  # if it is not among the points
    _gap: int = 1  # steps between two points
    _told_by: int | None = None  # the rank whose points these are
    _hashed: int | None = None  # the step of the last hash of any rank

    @property
    def points(self) -> list[StepPoint]:
        """The points, by their steps; the last one is the newest."""
        return self._points + ([] if self._latest is None else [self._latest])

    @property
    def last(self) -> StepPoint | None:
        """The newest point."""
        return self._latest or (self._points[-1] if self._points else None)

    def start(self, rank: int) -> None:
        """Note that a rank has started."""
        if (known := self._rank(rank)) is not None:
            known.running = True

    def end(self, rank: int) -> None:
        """Note that a rank has ended."""
        if (known := self._rank(rank)) is not None:
            known.running = False

    def report(self, rank: int, values: Mapping[str, object], at: float) -> None:
        """Note numbers that a rank reported, of which ``step`` and ``loss`` count."""
        known, step = self._rank(rank), values.get("step")
        if known is None or not isinstance(step, int | float):
            return
        if not 0 <= step <= INTEGER_MAX:  # also if it is not a number
            return
        step = int(step)
        seconds = known.step_seconds
        if known.step is not None and step > known.step and at > known.reported_at:
            seconds = (at - known.reported_at) / (step - known.step)
        known.step, known.step_seconds, known.reported_at = step, seconds, at
        if self._told_by is None or rank <= self._told_by:
            self._told_by = rank
            loss = values.get("loss")
            shown = float(loss) if isinstance(loss, int | float) else None
            self._add(StepPoint(step, shown, seconds, at))

    def report_hash(self, rank: int, found: StepHash) -> None:
        """Note the hash of a rank's parameters."""
        if (known := self._rank(rank)) is not None:
            known.hash, self._hashed = found, found.step

    def hash_of(self, rank: int) -> str | None:
        """Return the hash of a rank's parameters, if it is after the last such step.

        So all that are returned are of the same step, and can be compared.
        """
        known = self.ranks.get(rank)
        if known is None or known.hash is None or known.hash.step != self._hashed:
            return None
        return known.hash.text

    def shrink(self) -> None:
        """Leave out points of a run that has ended."""
        while len(self._points) > POINTS_OF_ENDED:
            self._thin()

    def _rank(self, rank: int) -> RankProgress | None:
        if rank not in self.ranks and len(self.ranks) >= RANKS_KEPT:
            return None
        return self.ranks.setdefault(rank, RankProgress())

    def _add(self, point: StepPoint) -> None:
        self._latest = None
        # A run that goes on from a checkpoint repeats steps.
        while self._points and self._points[-1].step >= point.step:
            self._points.pop()
        if self._points and point.step - self._points[-1].step < self._gap:
            self._latest = point
            return
        self._points.append(point)
        if len(self._points) >= POINTS_MAX:
            self._thin()

    def _thin(self) -> None:
        self._latest = self.last
        self._points = self._points[::2]
        if self._latest == self._points[-1]:
            self._latest = None
        self._gap *= 2
