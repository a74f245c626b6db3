"""A worker that is there, and how much it has to do."""

import math
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.worker import Offer, WorkerLoad

LOAD_SLOTS_MAX = 256  # more slots than this say nothing about a worker's speed
PREFETCH_BELOW = 0.05  # seconds in which calls end that are given to workers ahead
PREFETCH_MAX = 128  # calls that a worker is given ahead at the most
NO_LOAD = WorkerLoad()

CostLevel: TypeAlias = tuple[float, int | None]
"""How much a worker has to do with one more job, and its pace as a power of two.

The first is the share of its slots in use, with the jobs that others have there, and
the more the slower it says that it is at the moment.  The second is None where no job
was measured yet.  Paces are taken in such steps so that workers of about the same speed
are equals and take turns.
"""


@dataclass(frozen=True, slots=True)
class Penalty:
    """Points against a worker, and until when they stand.

    ``public_key`` is as in ``WorkerMarked``.
    """

    until: float
    worker_id: WorkerId
    public_key: str
    points: int

    def applies_to(self, worker: "Worker") -> bool:
        """Say whether they are against ``worker``.

        Else who has lost its standing would only have to leave out its proof.
        """
        if self.public_key:
            return worker.offer.public_key == self.public_key
        return worker.id == self.worker_id


@dataclass(slots=True)
class Worker:
    """A worker that is there."""

    id: WorkerId
    offer: Offer
    cancels: bool
    leases: dict[JobId, LeaseNumber] = field(default_factory=dict)
    draining: str = ""  # why it takes nothing new
    load: WorkerLoad = NO_LOAD
    pace: float | None = None  # tokens per second of one answer, lately; None: unknown
    points: int = 0  # against it; see ``Pool.penalties``
    streams: set[JobId] = field(default_factory=set)  # of the leases, those on lanes
    prefetch_max: int = 0  # calls that it may have beyond its slots; see ``called``
    indexed_as: CostLevel | None = None  # what it stands under in ``Roster.available``
    queues: frozenset[str] = field(init=False)  # of the offer, asked for all the time

    def __post_init__(self) -> None:
        self.queues = self.offer.queues

    @property
    def free_slots(self) -> int:
        """How many more jobs it may be given."""
        return self.offer.slots + self.prefetch - len(self.leases)

    @property
    def prefetch(self) -> int:
        """How many calls it may have beyond its slots now."""
        return 0 if self.streams else self.prefetch_max

    def record_call(self, seconds: float) -> None:
        """Learn how long a call took, from its lease to its end.

        Each lease and each end waits for the disk, which takes longer than short calls
        do: slots would mostly be idle.  So a worker is given more ahead, one for each
        call that ended soon, until they do not any more.
        """
        soon = seconds <= PREFETCH_BELOW
        more = self.prefetch_max + (1 if soon else -1)
        self.prefetch_max = max(0, min(PREFETCH_MAX, more))

    @property
    def accepts_jobs(self) -> bool:
        """Whether it takes new jobs, as soon as it has a free slot."""
        return not (self.draining or self.load.unfit)

    def utilization(self, promised: int = 0) -> float:
        """Return the share of its slots in use, with ``promised`` more jobs.

        Jobs that others have there count, so it may be more than 1; but they take no
        slot, for only the worker knows when it comes to ours.
        """
        jobs = len(self.leases) + self.load.queued + promised
        return jobs / min(self.offer.slots, LOAD_SLOTS_MAX)

    def cost_level(self, promised: int = 0) -> CostLevel:
        """Return how busy and how quick it is, with ``promised`` more jobs."""
        step = None if self.pace is None else round(math.log2(self.pace))
        return self.utilization(promised + 1) / self.load.speed, step
