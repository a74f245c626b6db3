"""Invariants of gangs beside small jobs, under any order of events."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from msgspec.structs import replace

from harness.profiles import examples
from pool.builders import CHAT_ONLY, handle, job
from pool.gang_laws import (
    check_gangs,
    check_plan,
    check_waiting,
    open_gangs,
    suits,
    takes,
)
from shoal.domain.ids import WorkerId, peer_of
from shoal.domain.job import Gang, JobTerms, Priority, TimeLimit
from shoal.domain.outcome import Outcome
from shoal.domain.vocabulary import Completed, Failed, Rejected
from shoal.domain.worker import Offer, WorkerLoad
from shoal.pool.gangs.open_gangs import OpenGang
from shoal.pool.inputs import (
    Cancellation,
    HubInput,
    LeaseResult,
    LimitReached,
    LoadReported,
    Submission,
    WorkerConnected,
    WorkerDisconnected,
)
from shoal.pool.plan import plan
from shoal.pool.state import PoolState

WORKERS = tuple(map(WorkerId, ("s/x", "s/y", "t", "u/x", "v")))
ENDS = st.sampled_from([Completed, Completed, Failed, Rejected])
PRIORITIES = st.sampled_from(Priority)


class GangLaws(RuleBasedStateMachine):
    """Workers that take every job, and gangs of up to four members."""

    @initialize(slots=st.lists(st.integers(1, 4), min_size=5, max_size=5))
    def begin(self, slots: list[int]) -> None:
        self.pool = PoolState()
        self.now = 0.0
        self.submitted = 0
        for worker_id, number in zip(WORKERS, slots, strict=True):
            self.connect(worker_id, number)

    @rule(
        size=st.integers(1, 4),
        slots=st.integers(0, 2),
        least=st.integers(1, 4),
        priority=PRIORITIES,
    )
    def submit_gang(
        self, size: int, slots: int, least: int, priority: Priority
    ) -> None:
        gang = Gang(f"{self.submitted:032x}", 0, size, min(least, size), slots)
        for rank in range(size):
            self.submit(priority, JobTerms(gang=replace(gang, rank=rank)))

    @rule(count=st.integers(1, 6), priority=PRIORITIES)
    def submit_small_jobs(self, count: int, priority: Priority) -> None:
        for _ in range(count):
            self.submit(priority, JobTerms())

    @rule(worker_id=st.sampled_from(WORKERS), slots=st.integers(0, 4))
    def connect(self, worker_id: WorkerId, slots: int) -> None:
        self.handle(WorkerConnected(worker_id, Offer(CHAT_ONLY, MODELS, slots), True))

    @rule(worker_id=st.sampled_from(WORKERS))
    def disconnect(self, worker_id: WorkerId) -> None:
        self.handle(WorkerDisconnected(worker_id, "gone"))

    @rule(worker_id=st.sampled_from(WORKERS), unfit=st.sampled_from(["", "is too hot"]))
    def change_load(self, worker_id: WorkerId, unfit: str) -> None:
        self.handle(LoadReported(worker_id, WorkerLoad(unfit)))

    @precondition(lambda self: self.pool.queued < len(self.pool.jobs))
    @rule(data=st.data(), ends=st.lists(ENDS, min_size=1, max_size=6))
    def answer(
        self, data: st.DataObject, ends: list[type[Completed | Failed | Rejected]]
    ) -> None:
        for end in ends:
            held = [
                (worker_id, opened.job.id, lease)
                for opened in self.pool.jobs.values()
                for worker_id, lease in opened.holders
            ]
            if held:
                worker_id, job_id, lease = data.draw(st.sampled_from(held))
                event = end(job_id, lease, "")
                self.handle(LeaseResult(worker_id, event, Outcome("")))

    @precondition(lambda self: self.pool.jobs)
    @rule(data=st.data(), limit=st.sampled_from([None, *TimeLimit]))
    def give_up(self, data: st.DataObject, limit: TimeLimit | None) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.pool.jobs)))
        if limit is None:
            self.handle(Cancellation(job_id, "left"))
        else:
            self.handle(LimitReached(job_id, limit))

    @rule()
    def wait(self) -> None:
        self.now += 10.0
        self.pool.expire_penalties(self.now)

    @rule()
    def hand_out(self) -> None:
        planned = plan(self.pool)
        check_plan(self.pool, planned)
        for lease in planned:
            worker = self.pool.workers[lease.worker_id]
            assert takes(worker, self.pool.jobs[lease.job_id])
            self.pool.apply(lease, self.now)
        assert plan(self.pool) == []
        check_waiting(self.pool)

    @rule()
    def restart(self) -> None:
        """Lose all but the jobs, and the numbers of their leases."""
        before, self.pool = self.pool, PoolState()
        for opened in before.jobs.values():
            worker_id = opened.worker_id
            self.pool.restore(opened.job, opened.last_lease, self.now, worker_id)
        for gang in open_gangs(before):
            found = self.pool.gangs.get(gang.id)
            assert found is not None
            assert found.formed == gang.formed

    @rule()
    def finish(self) -> None:
        """Let small jobs end one by one: each gang that can begin does, in its order.

        Until then, small jobs keep arriving.
        """
        self.wait()
        for _ in range(1000):
            self.hand_out()
            small = [
                opened
                for opened in self.pool.jobs.values()
                if opened.worker_id is not None and opened.gang is None
            ]
            gang = self.first_gang_that_can_begin()
            if gang is None or not small:
                break
            done = small[0]
            assert done.worker_id is not None
            end = Completed(done.job.id, done.lease, "")
            self.handle(LeaseResult(done.worker_id, end, Outcome("")))
            self.submit(gang.priority, JobTerms())
        else:
            raise AssertionError("small jobs overtake a gang for ever")

    @invariant()
    def gangs_are_right(self) -> None:
        check_gangs(self.pool)

    def first_gang_that_can_begin(self) -> OpenGang | None:
        """Return the first gang that waits if only small jobs keep it waiting."""
        gang = next(iter(self.pool.gangs.in_order()), None)
        if gang is None:
            return None
        waiting = [self.pool.jobs[gang.waiting[rank]] for rank in gang.searching]
        if not waiting:
            return None
        machines = {
            peer_of(worker.id)
            for worker in self.pool.workers.values()
            if suits(worker, waiting[0])
            and sum(worker.members.values()) + worker.slots_of_member(gang.slots)
            <= worker.offer.slots
        }
        missing = 1 if gang.formed else len(waiting)
        enough = len(machines - gang.taken) >= missing
        return gang if enough else None

    def submit(self, priority: Priority, terms: JobTerms) -> None:
        self.submitted += 1
        new = job(f"j{self.submitted:04}", priority=priority)
        self.handle(Submission(replace(new, terms=terms)))

    def handle(self, input_: HubInput) -> None:
        handle(self.pool, input_, self.now)


MODELS = frozenset({"m"})
GangLaws.TestCase.settings = settings(
    stateful_step_count=40, max_examples=examples(0.6)
)
TestGangLaws = GangLaws.TestCase
