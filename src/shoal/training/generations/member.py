"""One rank's side of the rendezvous, without I/O.

A rank is in one generation at a time, and runs one operation at a time.  It reports the
end of a generation once: when its operation has failed, or, if it computes meanwhile,
as soon as it hears of the end.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

from shoal.training.generations.messages import (
    NO_GENERATION,
    EndCause,
    EndReport,
    Formation,
    RankState,
    RunMessage,
    cause_of,
    number,
    text,
)

LATE_FACTOR = 8.0  # medians; an operation that takes longer is late
LATE_MIN = 1.0  # seconds; no operation is late before
LATE_FIRST = 2.0  # seconds; for operations that have no median yet
LATE_INTERVAL = 1.0  # seconds until the others are asked again
SAMPLES_MIN = 5
SAMPLES_MAX = 32
BEAT = 5.0  # seconds between the announcements of a rank that waits


class Reaction(NamedTuple):
    """What follows from a message: replies, and why to end the connections, if so."""

    send: tuple[RunMessage, ...] = ()
    end: str = ""


class GenerationMember:
    """The state of a rank: its view of the run, and its last messages.

    The methods return messages to the rendezvous.  Times are monotonic seconds.
    """

    def __init__(self, state: RankState) -> None:
        self.state = state
        self.generation = NO_GENERATION
        self.formation: Formation | None = None
        """The present generation; None: it has ended, or there was none yet."""
        self.out = ""
        """Why this rank takes no part any more; empty: it does."""
        self.waiting = 0
        """How many new ranks wait to be admitted."""
        self.renews = False
        """Whether this rank waits for a generation with new ranks."""
        self._latest: Formation | None = None
        self._report: EndReport | None = None  # of the present generation
        self._ending = ""  # the generation is to be ended, and is not reported yet
        self._running: Hashable | None = None
        self._began = 0.0
        self._asked_at = 0.0
        self._no_transfer_at = 0.0  # when it last had no transfer
        self._announced_at: float | None = None
        self._seconds: defaultdict[Hashable, deque[float]] = defaultdict(
            lambda: deque(maxlen=SAMPLES_MAX)
        )

    @property
    def operation(self) -> int:
        """The last operation that this rank has completed."""
        return self.state.operation

    def greeting(self) -> tuple[RunMessage, ...]:
        """Return the first messages over a connection."""
        if self.out:
            return ()
        known = {} if self._latest is None else self._latest.message()
        if self._report is not None:
            return ({**self._ended(self._report), **known},)
        return ({"announce": self.generation, **self.state.message(), **known},)

    def set_step(self, step: int) -> None:
        """Set the step of training, for the run's history."""
        self.state = replace(self.state, step=step)

    def begin(self, key: Hashable, now: float) -> None:
        """An operation begins; those with one key take about as long."""
        assert self.formation is not None, "the generation has ended"
        self._running, self._began, self._asked_at = key, now, now

    def complete(self, now: float, *, counts: bool = True) -> tuple[RunMessage, ...]:
        """The operation is complete; ``counts``: it is one of the sequence."""
        if counts:
            self._seconds[self._running].append(now - self._began)
            self.state = replace(self.state, operation=self.operation + 1)
        self._running = None
        return self._report_end(EndReport(self._ending)) if self._ending else ()

    def adopt(self) -> None:
        """The next operation is complete: another rank has its result."""
        self.state = replace(self.state, operation=self.operation + 1)

    def fail(self, report: EndReport) -> tuple[RunMessage, ...]:
        """The operation has failed, and with it the generation."""
        self._running = None
        return self._report_end(report)

    def receive(self, message: RunMessage) -> Reaction:
        """Handle a message from the rendezvous.  Raises PeerError."""
        if self.out:
            return Reaction()
        if "ping" in message:
            return Reaction(({"pong": number(message, "ping", 0)},))
        if "end" in message:
            if cause_of(message) is EndCause.ADMISSION:
                return Reaction()  # this rank is about to report the same
            return self._on_end(number(message, "end", 0), text(message, "reason"))
        if "formation" in message:
            return self._on_formation(Formation.of(message))
        if "waiting" in message:
            self.waiting = number(message, "waiting", 0)
        if "out" in message:
            self.set_out(text(message, "out"))
            return Reaction(end=self.out)
        return Reaction()

    def set_out(self, reason: str) -> None:
        """This rank takes no part any more."""
        self.out = self.out or reason or "the run has ended"
        self.formation = None

    def tick(self, now: float, *, transfers: bool = False) -> tuple[RunMessage, ...]:
        """Say that an operation is late, or that this rank waits for a generation.

        ``transfers``: it waits for arrays that are sent from rank to rank.
        """
        if not transfers:
            self._no_transfer_at = now
        if self.out:
            return ()
        if self.generation == NO_GENERATION:
            before = self._announced_at
            if before is None or now - before >= BEAT:
                self._announced_at = now
                return () if before is None else self.greeting()
        elif self._is_late(now) and now - self._asked_at >= LATE_INTERVAL:
            self._asked_at = now
            return ({"late": self.generation},)
        return ()

    def _is_late(self, now: float) -> bool:
        runs = self._running is not None and now - self._began >= self._late_after()
        return runs or now - self._no_transfer_at >= LATE_FIRST

    def _late_after(self) -> float:
        seconds = self._seconds[self._running]
        if len(seconds) < SAMPLES_MIN:
            return LATE_FIRST
        return max(LATE_MIN, LATE_FACTOR * statistics.median(seconds))

    def _on_end(self, generation: int, reason: str) -> Reaction:
        if generation != self.generation or self._report is not None:
            return Reaction()
        self._ending = self._ending or reason or "another rank has ended it"
        if self._running is not None:
            return Reaction(end=self._ending)
        cause = EndCause.ADMISSION if self.renews else EndCause.FAILURE
        report = EndReport(self._ending, cause)
        return Reaction(self._report_end(report), report.reason)

    def _on_formation(self, formation: Formation) -> Reaction:
        if formation.generation <= self.generation or self.out:
            return Reaction()
        assert self._running is None, "only ranks that have reported are in the next"
        joins = self.generation == NO_GENERATION
        self.generation, self.formation = formation.generation, formation
        self._report, self._ending, self.waiting = None, "", 0
        self._latest = formation
        if joins:
            furthest = max(formation.ranks, key=lambda rank: rank.operation)
            self.state = replace(
                self.state, operation=formation.newest, step=furthest.step
            )
        return Reaction()

    def _report_end(self, report: EndReport) -> tuple[RunMessage, ...]:
        self.formation = None
        self._ending = ""
        self._report = report
        return (self._ended(report),)

    def _ended(self, report: EndReport) -> RunMessage:
        return {
            "ended": self.generation,
            **report.message(),
            **self.state.message(),
        }
