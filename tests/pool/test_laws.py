"""Invariants of the pool under any order of events."""

from collections import Counter

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
from pool.builders import CHAT_ONLY, job
from pool.gang_laws import check_gangs, check_plan, check_waiting
from shoal.domain.errors import ShoalError
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobHedged,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    JobUnhedged,
    WorkerApproved,
    WorkerDisapproved,
    WorkerLeft,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId, peer_of
from shoal.domain.job import Gang, Job, JobTerms, Priority, TimeLimit
from shoal.domain.money import Micros
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.vocabulary import Completed, Draining, Failed, Rejected
from shoal.domain.work import Feature
from shoal.domain.worker import Offer, Suspension, TokenPrices, WorkerLoad
from shoal.pool.departures import departures, overdue_drains
from shoal.pool.eligibility import ineligibility, suitable_for
from shoal.pool.hedge import HEDGED_SHARE, hedges, next_hedge
from shoal.pool.inputs import (
    AnswerRejected,
    Cancellation,
    DrainAnnounced,
    FirstOutput,
    HubInput,
    LeaseResult,
    LimitReached,
    LoadReported,
    Submission,
    WorkerApproval,
    WorkerConnected,
    WorkerDisconnected,
    WorkerResumption,
    WorkerSuspension,
)
from shoal.pool.job_admission import permanent_rejection
from shoal.pool.last_resort import last_resorts, next_resort
from shoal.pool.lifecycle import ENDED, JobState
from shoal.pool.plan import plan
from shoal.pool.react import react, revocations
from shoal.pool.state import PoolState
from shoal.pool.suspensions import Approvals
from shoal.pool.worker import CostLevel, Worker

ENDS = (JobCompleted, JobFailed, JobCancelled, JobExpired)
WORKERS = st.sampled_from([WorkerId(name) for name in ("s/x", "s/y", "t", "u/x")])
NAMES = st.sampled_from(["s", "s/x", "s/y", "t", "u", "u/x"])  # also of machines
GANGS = st.sampled_from(["a" * 32, "b" * 32, "c" * 32])
LIMITS = st.sampled_from([None, 0.0, 10.0])
PENDING, *ORDERS = Suspension
KEYS = st.sampled_from(["", "k1", "k2"])
MODELS = st.sampled_from("xy")
OWNERS = st.sampled_from(["al", "bo", "cy"])
OFFERS = st.builds(
    Offer,
    st.just(CHAT_ONLY),
    st.frozensets(MODELS, max_size=2),
    st.integers(0, 3),
    st.frozensets(st.sampled_from([Feature.CONTINUE, Feature.STOP])),
    st.sampled_from([0, 100, 10_000]),
    st.just(frozenset[str]()) | st.frozensets(OWNERS),
    public_key=KEYS,
    proven=st.booleans(),
    neighbour=st.booleans(),
) | st.builds(
    Offer,
    st.just(CHAT_ONLY),
    st.frozensets(MODELS, max_size=2),
    st.just(2),
    engine=st.just("e"),
)
OFFERS |= st.builds(
    Offer,
    st.just(CHAT_ONLY),
    st.frozensets(MODELS, max_size=2),
    st.integers(0, 2),
    last_resort=st.just(TokenPrices(Micros(1), Micros(2))),
)
CONDITIONS = st.builds(
    WorkerLoad,
    st.sampled_from(["", "", "is too hot"]),
    st.integers(0, 5),
    st.sampled_from([0.01, 0.5, 1.0]),
)
TERMS = st.builds(
    JobTerms, near=st.booleans(), hosted_after=st.sampled_from([None, 0.0, 10.0])
)
JOBS = st.builds(
    job,
    st.just("unnamed"),
    MODELS,
    stop=st.booleans(),
    owner=OWNERS,
    priority=st.sampled_from(Priority),
    session=st.sampled_from(["", "one", "two"]),
    prompt=st.sampled_from(["hi", "long " * 1000]),
)


class PoolLaws(RuleBasedStateMachine):
    """A pool beside a simple model of the leases."""

    @initialize(approve_nodes=st.booleans())
    def begin(self, approve_nodes: bool) -> None:
        self.pool = PoolState(approvals=Approvals(required=approve_nodes))
        self.approved: set[tuple[str, str | None]] = set()  # names and keys
        self.now = 0.0
        self.submitted = 0
        self.ends: Counter[JobId] = Counter()
        self.leases: list[JobLeased | JobHedged] = []
        self.at_work: set[tuple[WorkerId, JobId, LeaseNumber]] = set()
        self.handed_over: set[JobId] = set()

    # Events.

    @rule(jobs=st.lists(JOBS, min_size=1, max_size=6), terms=TERMS)
    def submit(self, jobs: list[Job], terms: JobTerms) -> None:
        for each in jobs:
            self.submitted += 1
            job_id = JobId(f"j{self.submitted}")
            self.handle(Submission(replace(each, id=job_id, terms=terms)))

    @rule(
        example=JOBS,
        gang_id=GANGS,
        size=st.integers(1, 3),
        slots=st.integers(0, 2),
        data=st.data(),
    )
    def submit_gang(
        self, example: Job, gang_id: str, size: int, slots: int, data: st.DataObject
    ) -> None:
        """Submit members of a gang, mostly all, not always for the first time."""
        least = data.draw(st.integers(1, size))
        ranks = set(range(size))
        for rank in data.draw(st.just(ranks) | st.sets(st.sampled_from([*ranks]))):
            self.submitted += 1
            job_id = JobId(f"j{self.submitted}")
            terms = JobTerms(gang=Gang(gang_id, rank, size, least, slots))
            self.handle(Submission(replace(example, id=job_id, terms=terms)))

    @rule(worker_id=WORKERS, offer=OFFERS, cancels=st.booleans(), shared=st.booleans())
    def join(
        self, worker_id: WorkerId, offer: Offer, cancels: bool, shared: bool
    ) -> None:
        self.handle(WorkerConnected(worker_id, offer, cancels, shared))

    @rule(
        slots=st.lists(st.integers(1, 3), min_size=4, max_size=4),
        engine=st.sampled_from(["", "e"]),
    )
    def join_all(self, slots: list[int], engine: str) -> None:
        """Connect a fleet that takes every job."""
        for name, number in zip(("s/x", "s/y", "t", "u/x"), slots, strict=True):
            features = frozenset({Feature.STOP})
            offer = Offer(CHAT_ONLY, frozenset("xy"), number, features)
            if engine and name.startswith("s/"):
                offer = replace(offer, slots=2, engine=engine)
            self.handle(WorkerConnected(WorkerId(name), offer, cancels=True))

    @rule(worker_id=WORKERS)
    def disconnect(self, worker_id: WorkerId) -> None:
        self.handle(WorkerDisconnected(worker_id, "gone"))

    @rule(worker_id=WORKERS)
    def retire(self, worker_id: WorkerId) -> None:
        self.handle(DrainAnnounced(worker_id, Draining("")))

    @rule(name=NAMES, how=st.sampled_from(ORDERS), within=LIMITS)
    def suspend(self, name: str, how: Suspension, within: float | None) -> None:
        machine = [*map(self.pool.workers.get, self.pool.workers_named(name))]
        self.handle(WorkerSuspension(name, how, "al", within))
        if how is Suspension.REMOVED:
            assert all(each != name for each, _ in self.approved)
            proven = {each.offer.proven_key for each in machine if each} - {""}
            if "/" not in name:
                assert all(key not in proven for _, key in self.approved)

    @rule(name=NAMES)
    def approve(self, name: str) -> None:
        self.handle(WorkerApproval(name, "al"))
        assert react(self.pool, WorkerApproval(name, "al")) == [], "approved twice"
        named = [self.pool.workers[each] for each in self.pool.workers_named(name)]
        keyless = not any(each.offer.proven_key for each in named)
        for worker in named:
            if keyless or worker.offer.proven_key:
                assert worker.suspension is not PENDING

    @rule(name=NAMES)
    def resume(self, name: str) -> None:
        self.handle(WorkerResumption(name, "al"))
        for worker in self.pool.workers.values():
            ended = worker.suspension in (None, PENDING)
            assert name != peer_of(worker.id) or ended

    @rule()
    def end_drains(self) -> None:
        due = self.pool.suspensions.next_due
        facts = overdue_drains(self.pool, self.now)
        assert bool(facts) == (due is not None and due <= self.now)
        for fact in facts:
            self.apply(fact)
        assert overdue_drains(self.pool, self.now) == []

    @rule()
    def depart(self) -> None:
        dismissed = departures(self.pool)
        for each in dismissed:
            self.apply(each)
        assert departures(self.pool) == []
        for each in dismissed:
            self.handle(WorkerDisconnected(each.worker_id, each.reason))

    @rule(worker_id=WORKERS, condition=CONDITIONS)
    def change_load(self, worker_id: WorkerId, condition: WorkerLoad) -> None:
        self.handle(LoadReported(worker_id, condition))
        assert react(self.pool, LoadReported(worker_id, condition)) == [], "told twice"

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), end=st.sampled_from([Completed, Rejected, Failed]))
    def answer(
        self, data: st.DataObject, end: type[Completed | Rejected | Failed]
    ) -> None:
        """End any current or past lease of a worker."""
        lease = data.draw(st.sampled_from(self.leases))
        if lease.worker_id not in self.pool.workers:
            return
        self.at_work.discard((lease.worker_id, lease.job_id, lease.lease))
        event = end(lease.job_id, lease.lease, "")
        written = Usage(1, data.draw(st.integers(0, 1000)))
        self.handle(LeaseResult(lease.worker_id, event, Outcome("", usage=written)))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        opened = self.pool.jobs.get(lease.job_id)
        if opened is not None and opened.state is not JobState.STREAMING:
            facts = react(self.pool, FirstOutput(lease.job_id, lease.lease))
            for fact in facts:
                self.apply(fact)
            if facts:
                assert opened.lease == lease.lease, "not the first one goes on"

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.handle(Cancellation(self.any_job(data), "left"))

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), limit=st.sampled_from(TimeLimit))
    def expire(self, data: st.DataObject, limit: TimeLimit) -> None:
        self.handle(LimitReached(self.any_job(data), limit))

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        self.handle(AnswerRejected(self.any_job(data), "diverged", lost=True))

    @rule(seconds=st.floats(0.0, 1000.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def hand_out(self) -> None:
        again = self.pool.expire_penalties(self.now)
        assert again is None or again > self.now
        planned = plan(self.pool)
        check_plan(self.pool, planned)
        for lease in planned:
            opened = self.pool.jobs[lease.job_id]
            worker = self.pool.workers[lease.worker_id]
            assert ineligibility(opened, worker) is None, (
                "given to one that cannot take it"
            )
            assert not worker.load.unfit, "given to one that is unfit"
            assert not (opened.job.terms.near and worker.offer.neighbour)
            assert worker.offer.last_resort is None, "a machine could have taken it"
            self.check_is_new(lease)
            self.apply(lease)

        assert plan(self.pool) == []
        for lease in last_resorts(self.pool, self.now, lambda job, worker: True):
            opened = self.pool.jobs[lease.job_id]
            worker = self.pool.workers[lease.worker_id]
            assert ineligibility(opened, worker) is None
            assert worker.offer.last_resort is not None
            assert opened.job.terms.hosted_after is not None, "not permitted"
            assert not opened.started
            self.check_is_new(lease)
            self.apply(lease)
        due = next_resort(self.pool, self.now)
        assert due is None or due > self.now
        check_waiting(self.pool)

    @rule(after=st.sampled_from([0.0, 1.0, 100.0]))
    def hedge(self, after: float) -> None:
        running = len(self.pool.jobs) - self.pool.queued
        given = hedges(self.pool, self.now, after)
        assert not given or self.pool.hedged + len(given) <= max(
            1, running // HEDGED_SHARE
        )
        for hedge in given:
            opened = self.pool.jobs[hedge.job_id]
            worker = self.pool.workers[hedge.worker_id]
            assert ineligibility(opened, worker) is None, (
                "given to one that cannot take it"
            )
            assert not worker.leases, "given to one that has something to do"
            assert worker.load.queued == 0, "given to one that others use"
            assert not worker.load.unfit, "given to one that is unfit"
            assert worker.offer.last_resort is None
            assert opened.state is JobState.LEASED
            assert opened.leased_at + after <= self.now
            self.check_is_new(hedge)
            self.apply(hedge)

        due = next_hedge(self.pool, self.now, after)
        assert due is None or due > self.now

    # Invariants.

    @invariant()
    def beginnings_are_those_of_connected_workers(self) -> None:
        known = self.pool.beginnings
        assert len(known) == sum(len(known.of_worker(w)) for w in self.pool.workers)

    @invariant()
    def slots_are_not_exceeded(self) -> None:
        for worker in self.pool.workers.values():
            working = sum(worker_id == worker.id for worker_id, _, _ in self.at_work)
            assert working <= worker.offer.slots
            assert 0 <= worker.free_slots <= worker.offer.slots
            taken = sum(each.used_slots for each in worker.sharing)
            assert taken == worker.busy_slots <= worker.offer.slots

    @invariant()
    def members_of_gangs_are_apart_and_counted(self) -> None:
        check_gangs(self.pool)

    @invariant()
    def every_job_ends_at_most_once(self) -> None:
        assert set(self.ends.values()) <= {1}
        assert self.pool.jobs.keys().isdisjoint(self.ends)
        assert len(self.pool.jobs) + len(self.ends) == self.submitted

    @invariant()
    def queues_hold_waiting_jobs(self) -> None:
        queued = [
            turn.job.job.id
            for queue in self.pool.queues.values()
            for turn in queue.in_order()
        ]
        waiting = [job for job in self.pool.jobs.values() if job.worker_id is None]

        assert sorted(queued) == sorted(job.job.id for job in waiting)
        assert self.pool.queued == len(waiting)
        assert all(self.pool.queues.values()), "an empty queue is left behind"
        assert all(job.state not in ENDED for job in self.pool.jobs.values())

    @invariant()
    def jobs_and_leases_agree(self) -> None:
        held = {
            (worker_id, job.job.id, lease)
            for job in self.pool.jobs.values()
            for worker_id, lease in job.holders
        }
        taken = {
            (worker.id, job_id, lease)
            for worker in self.pool.workers.values()
            for job_id, lease in worker.leases.items()
        }

        assert held <= taken
        for worker_id, job_id, _ in taken - held:
            # Ended at a worker that cannot cancel.
            assert not self.pool.workers[worker_id].cancels
            known = job_id in self.ends or job_id in self.handed_over
            assert known or self.pool.jobs[job_id].last_lease > 1

    @invariant()
    def removed_workers_leave_without_jobs(self) -> None:
        suspensions = self.pool.suspensions
        for worker in self.pool.workers.values():
            expected = suspensions.of(worker.id)
            if expected is None and not self.may_work(worker):
                expected = PENDING
            assert worker.suspension is expected
            goes = any(
                order.disconnects(worker.id, shared=worker.shared)
                for order in suspensions.about(worker.id)
            )
            assert goes == (worker.id in self.pool.leaving)
            if worker.suspension is Suspension.REMOVED:
                assert not any(self.pool.leases_of(worker.id))
        assert self.pool.leaving.keys() <= self.pool.workers.keys()
        for order in suspensions:
            assert order.workers == {*self.pool.workers_named(order.name)}

    @invariant()
    def counters_match_a_recount(self) -> None:
        jobs = self.pool.jobs.values()
        running = Counter(job.job.owner for job in jobs if job.worker_id is not None)
        waiting = Counter(job.job.owner for job in jobs if job.worker_id is None)

        assert self.pool.shares.running == running
        assert self.pool.size == sum(job.size for job in jobs)
        assert self.pool.size == sum(self.pool.sizes_by_owner.values())
        assert self.pool.queued_by_owner == waiting
        assert self.pool.hedged == sum(job.hedge is not None for job in jobs)
        resorting = {each for found in self.pool.resorting.values() for each in found}
        assert resorting == {
            job.job.id
            for job in jobs
            if job.worker_id is None and job.job.terms.hosted_after is not None
        }
        hosted = [each.offer.last_resort for each in self.pool.workers.values()]
        assert self.pool.last_resorts == len(hosted) - hosted.count(None)
        for silent in self.pool.without_output.values():
            assert silent.state is JobState.LEASED
            assert silent.hedge is None
        since = [silent.leased_at for silent in self.pool.without_output.values()]
        assert since == sorted(since)

    @invariant()
    def what_was_found_about_workers_holds(self) -> None:
        jobs = [each for each in self.pool.jobs.values() if each.gang is None]

        def find() -> list[tuple[object, str]]:
            return [
                (suitable_for(self.pool, each), str(self.rejection(each.job)))
                for each in jobs
            ]

        found = find()
        self.pool.roster.findings.clear()
        assert find() == found  # and the next step begins with these

    def rejection(self, job: Job) -> ShoalError | None:
        return permanent_rejection(self.pool, job, 0.0)

    @invariant()
    def index_matches_a_rebuild(self) -> None:
        with_model: dict[str, set[WorkerId]] = {}
        available: dict[str, dict[CostLevel, set[WorkerId]]] = {}
        slots: Counter[str] = Counter()
        engines: set[tuple[str, str, str]] = set()
        hosted: dict[str, set[WorkerId]] = {}
        for worker in self.pool.workers.values():
            if worker.offer.last_resort is not None:
                for model in worker.offer.models:
                    hosted.setdefault(model, set()).add(worker.id)
                continue
            for model in worker.offer.queues:
                with_model.setdefault(model, set()).add(worker.id)
                if worker.draining or worker.suspension or worker.unfit:
                    continue
                if (engine := worker.offer.engine) == "":
                    slots[model] += worker.offer.slots
                else:
                    engines.add((model, peer_of(worker.id), engine))
                if worker.free_slots > 0:
                    levels = available.setdefault(model, {})
                    levels.setdefault(worker.cost_level(), set()).add(worker.id)

        for model, _, _ in engines:
            slots[model] += 2
        roster = self.pool.roster
        assert roster.wanted == self.pool.queues.keys()
        assert roster.matched == self.pool.queues.keys() & roster.available.keys()
        assert {m: set(ws) for m, ws in roster.with_model.items()} == with_model
        assert {
            model: {level: set(workers) for level, workers in levels.items()}
            for model, levels in roster.available.items()
        } == available
        assert {m: set(ws) for m, ws in roster.hosted.items()} == hosted
        assert +roster.slots == +slots
        assert roster.slots.keys() <= with_model.keys()

    # Helpers.

    def handle(self, input_: HubInput) -> None:
        for fact in react(self.pool, input_):
            self.apply(fact)

    def apply(self, fact: Fact) -> None:
        for worker_id, cancel in revocations(self.pool, fact):
            if self.pool.workers[worker_id].cancels:
                self.at_work.discard((worker_id, cancel.job_id, cancel.lease))
        if isinstance(fact, ENDS):
            self.ends[fact.job_id] += 1
        self.pool.apply(fact, self.now)
        match fact:
            case JobLeased(job_id, worker_id, lease) | JobHedged(
                job_id, worker_id, lease
            ):
                self.leases.append(fact)
                self.at_work.add((worker_id, job_id, lease))
            case JobRequeued(job_id, handed_over=True):
                self.handed_over.add(job_id)
            case WorkerLeft(worker_id):
                self.at_work = {each for each in self.at_work if each[0] != worker_id}
            case WorkerApproved(name, public_key=key):
                self.approved.discard((name, None))
                self.approved.add((name, key))
            case WorkerDisapproved(name, public_key=key):
                self.approved.remove((name, key))
            case JobSubmitted(each):
                assert each.id in self.pool.jobs
            case JobStarted(job_id, lease) | JobUnhedged(job_id, lease):
                assert len(list(self.pool.jobs[job_id].holders)) == 1
            case _:
                pass

    def may_work(self, worker: Worker) -> bool:
        if not self.pool.approvals.required:
            return True
        names, key = (worker.id, peer_of(worker.id)), worker.offer.proven_key
        assert self.approved.isdisjoint((each, None) for each in names)
        return any(
            given == key and (key != "" or name in names)
            for name, given in self.approved
        )

    def check_is_new(self, fact: JobLeased | JobHedged) -> None:
        numbers = {each.lease for each in self.leases if each.job_id == fact.job_id}
        assert fact.lease == len(numbers) + 1, "a lease has a number of its own"

    def any_job(self, data: st.DataObject) -> JobId:
        return JobId(f"j{data.draw(st.integers(1, self.submitted))}")


PoolLaws.TestCase.settings = settings(
    stateful_step_count=50, max_examples=examples(0.6)
)
TestPoolLaws = PoolLaws.TestCase
