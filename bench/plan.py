"""The hub's decisions while many owners and models wait: the cost of a job.

All of n owners wait for a model with one busy worker, one of them with n jobs more, and
n / 10 models wait for workers.  *plan*: a job ends, the plan is made, and the next job
begins.  *admit*: a job is checked against the queue, and joins it.  *restore*: n jobs
come back from the store, per job.  Calls are those of Python's profiler, which no other
load on the machine changes; CPU time is of this thread.
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any

from report import Goal, Results
from shoal.domain.facts import JobCompleted, JobSubmitted, WorkerJoined
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, TimeLimits
from shoal.domain.outcome import Outcome
from shoal.domain.work import Chat, JobKind
from shoal.domain.worker import Offer
from shoal.pool.job_admission import permanent_rejection, queue_rejection
from shoal.pool.plan import plan
from shoal.pool.state import PoolState

ROUNDS = 5
SIZES = (10, 100, 1000, 10_000)
JOBS = 50  # that are planned and admitted in a round
QUEUE_MAX = 1_000_000
WORKER = WorkerId("w")

PLAN, ADMIT, RESTORE = "plan", "admit", "restore"
CALLS, CPU = "calls", "µs"


def _row(what: str, owners: int, unit: str) -> str:
    return f"{what}, {owners:,} owners: {unit}"


GOALS = [
    Goal(_row(what, SIZES[-1], unit), _row(what, SIZES[0], unit), at_most=most)
    for what in (PLAN, ADMIT, RESTORE)
    for unit, most in ((CALLS, 2), (CPU, 4))
]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    for _ in range(rounds):
        for owners in SIZES:
            for measured, unit in ((_calls, CALLS), (_cpu, CPU)):
                each = Waiting(owners)
                restored = measured(each.restore) / each.pool.queued
                results[_row(RESTORE, owners, unit)].append(restored)
                each.start()
                took: Results = {ADMIT: [], PLAN: []}
                for _ in range(JOBS):
                    took[ADMIT].append(measured(each.admit))
                    took[PLAN].append(measured(each.plan))
                for what, values in took.items():
                    row = _row(what, owners, unit)
                    results[row].append(statistics.median(values))
    return results


class Waiting:
    """A pool with one worker, and owners that wait."""

    def __init__(self, owners: int) -> None:
        self.pool = PoolState()
        self.now = 0.0
        self._made = 0
        # Less than all jobs take, and more than the next one waits for.
        self._limits = TimeLimits(queue=1.5 * owners)
        self._owners = owners
        self._restored = [self._job(f"o{each}") for each in range(owners)]
        self._restored += [self._job("hog") for _ in range(owners)]
        self._restored += [
            self._job(f"o{each}", f"m{each}") for each in range(max(1, owners // 10))
        ]

    def restore(self) -> None:
        """Put all jobs into the queues."""
        for each in self._restored:
            self.pool.restore(each, LeaseNumber(0), self.now)

    def start(self) -> None:
        """Connect the worker, and end its first job."""
        offer = Offer(frozenset({JobKind.CHAT}), frozenset({"m"}), 1)
        self.pool.apply(WorkerJoined(WORKER, offer, True), self.now)
        for lease in plan(self.pool):
            self.pool.apply(lease, self.now)
        self.plan()

    def plan(self) -> None:
        """End the job that runs, and begin the next."""
        self.now += 1.0
        ((job_id, lease),) = self.pool.workers[WORKER].leases.items()
        self.pool.apply(JobCompleted(job_id, lease, Outcome("")), self.now)
        leases = plan(self.pool)
        assert len(leases) == 1
        self.pool.apply(leases[0], self.now)

    def admit(self) -> None:
        """Submit a job of an owner that had its turn."""
        job = self._job(f"o{self._made % self._owners}")
        assert permanent_rejection(self.pool, job, self.now) is None
        assert queue_rejection(self.pool, job, QUEUE_MAX) is None
        self.pool.apply(JobSubmitted(job), self.now)

    def _job(self, owner: str, model: str = "m") -> Job:
        self._made += 1
        chat = Chat(model, ({"role": "user", "content": "hi"},))
        return Job(JobId(f"j{self._made}"), chat, self._limits, owner)


def _calls(act: Callable[[], None]) -> float:
    """Return the calls of functions, in Python and in C, and turns of generators."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls


def _cpu(act: Callable[[], None]) -> float:
    began = time.thread_time()
    act()
    return 1e6 * (time.thread_time() - began)
