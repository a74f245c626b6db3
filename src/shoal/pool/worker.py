"""A connected worker and its load, and what completed jobs say of speeds."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import Outcome
from shoal.domain.work import JobKind
from shoal.domain.worker import Offer, Suspension, WorkerLoad
from shoal.pool.context_limits import ContextKey, KnownContexts, least_known
from shoal.pool.open_job import CHARACTERS_PER_TOKEN, OpenJob

LOAD_SLOTS_MAX = 256  # more slots than this do not indicate a worker's speed
FAILURES_MAX = 3  # jobs in a row at which its engine fails, before a worker rests
REST_MIN = 5.0  # seconds; doubled by each trial that fails
REST_MAX = 60.0  # seconds
PREFETCH_BELOW = 0.05  # seconds; workers prefetch calls that end sooner
PREFETCH_MAX = 128  # calls that a worker may prefetch
NEWEST = 0.25  # the share that the newest measurement has in an average
TOKENS_MIN = 8  # shorter answers do not measure a worker's speed
NO_LOAD = WorkerLoad()

CostLevel: TypeAlias = tuple[float, int | None]
"""A worker's utilization with one more job, and its pace as a power of two.

The first includes the jobs of other pools, and is divided by the speed that the worker
reports.  The second is None before the first measured job.  Paces are rounded to powers
of two so that workers of about the same speed take turns.
"""


@dataclass(frozen=True, slots=True)
class Penalty:
    """Points against a worker, and when they expire.

    ``public_key`` is as in ``WorkerMarked``.
    """

    until: float
    worker_id: WorkerId
    public_key: str
    points: int

    def applies_to(self, worker: "Worker") -> bool:
        """Return whether they count against ``worker``.

        A key counts even if unproven: else omitting the proof would clear the points.
        """
        if self.public_key:
            return worker.offer.public_key == self.public_key
        return worker.id == self.worker_id


@dataclass(slots=True)
class EngineWorkers:
    """The workers of one engine, whose slots they share."""

    workers: dict[WorkerId, "Worker"] = field(default_factory=dict)
    used: int = 0  # slots that the leases of all of them take


@dataclass(slots=True)
class Worker:
    """A connected worker."""

    id: WorkerId
    offer: Offer
    cancels: bool
    shared: bool = False  # whether other workers may share its connection
    keeps_jobs: bool = False  # as in ``WorkerJoined``
    since: float = 0.0  # when it joined
    used: float = 0.0  # when its last lease began, or was completed
    leases: dict[JobId, LeaseNumber] = field(default_factory=dict)
    draining: str = ""  # why it takes no new jobs
    suspension: Suspension | None = None  # by an operator
    dismissed: bool = False  # whether it is being disconnected
    load: WorkerLoad = NO_LOAD
    pace: float | None = (
        None  # tokens per second of one answer, recently; None: unknown
    )
    failures: int = 0  # jobs in a row at which its engine failed
    resting: str = ""  # why it temporarily gets no jobs: what its engine reported
    rests_until: float = 0.0
    points: int = 0  # against it; see ``PoolState.penalties``
    streams: set[JobId] = field(default_factory=set)  # the leases on call streams
    members: dict[JobId, int] = field(default_factory=dict)
    """The leases of gangs' members, with the slots that each takes."""

    extra_slots: int = 0  # of these, beyond one for each
    prefetch_max: int = 0  # calls it may have beyond its slots; see ``record_call``
    contexts: KnownContexts | None = None  # None: it refused nothing for its length
    indexed_as: CostLevel | None = None  # its level in ``Roster.available``
    engine: EngineWorkers | None = None  # None: it shares its slots with no other
    queues: frozenset[str] = field(init=False)  # cached from the offer
    slots: int = field(init=False)
    """The slots of its offer, and those that its waiting tasks lend.

    After a rest, one job tries whether its engine has recovered.
    """

    busy_slots: int = field(init=False)
    """Of its slots, those that its leases take, or all leases at its engine."""

    prefetch: int = field(init=False)
    """The number of calls it may now have beyond its slots."""

    free_slots: int = field(init=False)
    """The number of further jobs it may be given."""

    def __post_init__(self) -> None:
        self.queues = self.offer.queues
        self.count_slots()

    @property
    def used_slots(self) -> int:
        """The slots that its leases take: one each, except for members of gangs."""
        return len(self.leases) + self.extra_slots

    @property
    def sharing(self) -> Iterable["Worker"]:
        """The workers with the same slots: itself, and the others of its engine."""
        return (self,) if self.engine is None else self.engine.workers.values()

    def count_slots(self) -> None:
        """Update its slots, after a change of what they depend on.

        They are read for each job, and change less often.
        """
        used = len(self.leases) + self.extra_slots
        self.busy_slots = used if self.engine is None else self.engine.used
        self.slots = self.offer.slots + self.load.lent
        if self.failures >= FAILURES_MAX:
            self.slots = min(self.slots, self.busy_slots + (not used))
        self.prefetch = 0 if self.streams or self.members else self.prefetch_max
        self.free_slots = self.slots + self.prefetch - self.busy_slots

    def record_call(self, seconds: float) -> None:
        """Adjust the prefetch by the duration of a call, from its lease to its end.

        Each lease and each end waits for the disk, which takes longer than a short
        call: slots would mostly be idle.  Each short call raises the prefetch by one,
        each longer one lowers it.
        """
        soon = seconds <= PREFETCH_BELOW
        more = self.prefetch_max + (1 if soon else -1)
        self.prefetch_max = max(0, min(PREFETCH_MAX, more))

    def add_member(self, job_id: JobId, slots: int) -> None:
        """Count the slots of a gang's member, which has a lease."""
        self.members[job_id] = slots
        self.extra_slots += slots - 1

    def remove_member(self, job_id: JobId) -> None:
        """Release the slots of a lease if it is that of a gang's member."""
        slots = self.members.pop(job_id, 1)
        self.extra_slots -= slots - 1

    def slots_of_member(self, slots: int) -> int:
        """Return how many of its slots a gang's member takes; 0 stands for all."""
        return slots or max(1, self.offer.slots)

    def context_of(self, key: ContextKey) -> int:
        """Return the context that it offers or has stated, in tokens; 0: unknown."""
        if self.contexts is None:
            return self.offer.context
        return least_known(self.offer.context, self.contexts.stated.get(key, 0))

    @property
    def accepts_jobs(self) -> bool:
        """Whether it takes new jobs, as soon as it has a free slot."""
        return not (self.draining or self.suspension or self.load.unfit or self.resting)

    @property
    def unfit(self) -> str:
        """Why it gets no jobs for now; empty: it may get some."""
        return self.load.unfit or self.resting

    @property
    def counted_slots(self) -> int:
        """Its slots in a sum over workers: the first of an engine's counts for all."""
        first = self.engine is None or next(iter(self.sharing)) is self
        return self.offer.slots if first else 0

    def utilization(self, promised: int = 0) -> float:
        """Return the share of its slots in use, with ``promised`` more jobs.

        Jobs of other pools count, so it may exceed 1; but they take no slot, because
        only the worker knows their order.
        """
        jobs = self.busy_slots + self.load.queued + promised
        return jobs / min(self.offer.slots, LOAD_SLOTS_MAX)

    def cost_level(self, promised: int = 0) -> CostLevel:
        """Return its utilization and pace, with ``promised`` more jobs."""
        step = None if self.pace is None else round(math.log2(self.pace))
        # As ``utilization``, but without a call: it is asked several times a job.
        jobs = self.busy_slots + self.load.queued + promised + 1
        share = jobs / min(self.offer.slots, LOAD_SLOTS_MAX)
        return share / self.load.speed, step


@dataclass(slots=True)
class SpeedEstimates:
    """Moving averages of the speed of workers and the duration of jobs."""

    typical_pace: float | None = None  # tokens per second of one answer, of all workers
    answer_tokens: float = 128.0  # of a typical answer; at first a guess
    job_seconds: dict[str, float] = field(default_factory=dict)
    """How long workers take for a job, by model."""

    jobs_done: Counter[str] = field(default_factory=Counter)
    """Jobs that these durations are of, by model."""

    def measure(
        self, job: OpenJob, worker: Worker, outcome: Outcome, now: float
    ) -> None:
        """Update the estimates by a job that ``worker`` completed.

        The whole duration counts, not only from the first piece: some workers send the
        answer in one piece at the end.
        """
        if job.kind is JobKind.CALL_STREAM or job.gang is not None:
            return  # their durations say nothing about those of other jobs
        model = job.model
        seconds = now - job.leased_at
        before = self.job_seconds.get(model)
        self.job_seconds[model] = _average(before, seconds)
        self.jobs_done[model] += 1
        if job.kind is JobKind.CALL:
            worker.record_call(seconds)
            return
        if outcome.usage is not None:
            tokens = outcome.usage.completion_tokens
        else:
            tokens = len(outcome.text) // CHARACTERS_PER_TOKEN
        if tokens < TOKENS_MIN or seconds <= 0:
            return
        self.answer_tokens = _average(self.answer_tokens, tokens)
        worker.pace = _average(worker.pace, tokens / seconds)
        self.typical_pace = _average(self.typical_pace, tokens / seconds)

    def forget(self, model: str) -> None:
        """Drop the estimate of a model that no worker offers any more."""
        self.job_seconds.pop(model, None)
        self.jobs_done.pop(model, None)


def _average(before: float | None, value: float) -> float:
    return value if before is None else before + NEWEST * (value - before)
