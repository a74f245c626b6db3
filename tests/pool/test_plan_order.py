"""The plan beside one that examines every waiting job."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from pool.builders import chat
from pool.reference import ReferencePlan
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobCompleted,
    JobRequeued,
    JobSubmitted,
    WorkerJoined,
    WorkerLeft,
)
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.job import Job, JobTerms, Priority, TimeLimits
from shoal.domain.outcome import Outcome
from shoal.domain.work import Call, CallStream, Feature, JobKind, Work
from shoal.domain.worker import Offer
from shoal.pool.plan import plan
from shoal.pool.state import PoolState

MODELS = ("x", "y", "z")
OWNERS = ("al", "bo", "cy", "di", "ed")
FUNCTIONS = ("f", "g")
STEPS = 60


class RandomPool:
    """A pool with a few workers, in which many jobs of many kinds wait."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.pool = PoolState()
        self.reference = ReferencePlan()
        self.now = 0.0
        self._made = 0

    def apply(self, fact: Fact) -> None:
        self.reference.apply(fact, self.pool)
        self.pool.apply(fact, self.now)

    def step(self) -> None:
        self.now += self.random.choice((0.01, 1.0))
        self.pool.expire_penalties(self.now)
        choose = (self.submit, self.submit, self.end, self.end, self.join, self.leave)
        self.random.choice(choose)()

    def submit(self) -> None:
        random = self.random
        for _ in range(random.randrange(8)):
            self._made += 1
            terms = JobTerms(
                near=random.random() < 0.2,
                whole=random.random() < 0.3,
                end_user=random.choice(("", "", "u", "v")),
            )
            job = Job(
                JobId(f"j{self._made}"),
                self._work(),
                TimeLimits(),
                random.choice(OWNERS),
                random.choice((Priority.NORMAL, Priority.NORMAL, Priority.HIGH)),
                terms=terms,
            )
            self.apply(JobSubmitted(job))

    def join(self) -> None:
        random = self.random
        worker_id = WorkerId(f"w{random.randrange(4)}")
        if worker_id in self.pool.workers:
            return
        calls = random.random() < 0.5
        offer = Offer(
            frozenset({JobKind.CALL, JobKind.CALL_STREAM} if calls else {JobKind.CHAT}),
            frozenset() if calls else frozenset(random.sample(MODELS, 2)),
            random.choice((1, 2, 3)),
            frozenset(random.sample((Feature.STOP, Feature.CONTINUE), 1)),
            random.choice((0, 0, 100)),
            frozenset(random.sample(OWNERS, random.choice((0, 0, 1, 2)))),
            tasks=frozenset(random.sample(FUNCTIONS, 1)) if calls else frozenset(),
            neighbour=random.random() < 0.3,
        )
        self.apply(WorkerJoined(worker_id, offer, cancels=True))

    def leave(self) -> None:
        if self.random.random() < 0.5 or not self.pool.workers:
            return
        worker_id = self.random.choice([*self.pool.workers])
        for job, lease in list(self.pool.leases_of(worker_id)):
            self.apply(JobRequeued(job.job.id, lease, "lost"))
        self.apply(WorkerLeft(worker_id, ""))

    def end(self) -> None:
        for job in self.random.sample([*self.pool.jobs.values()], len(self.pool.jobs)):
            chance = self.random.random()
            if job.worker_id is None:
                if chance < 0.02:
                    self.apply(JobCancelled(job.job.id, ""))
            elif chance < 0.5:
                self.apply(JobCompleted(job.job.id, job.lease, Outcome("")))
            elif chance < 0.6:
                refused = JobRequeued(job.job.id, job.lease, "no", job.worker_id)
                self.apply(refused)

    def _work(self) -> Work:
        random = self.random
        match random.randrange(5):
            case 0:
                return Call(random.choice(FUNCTIONS), b"", b"")
            case 1 if random.random() < 0.5:
                return CallStream(random.choice(FUNCTIONS))
            case _:
                prompt = random.choice(("hi", "hi", "long " * 1000))
                stop = random.random() < 0.3
                return chat(random.choice(MODELS), stop=stop, prompt=prompt)


@settings(max_examples=examples(0.4))
@given(st.integers(0, 1 << 32))
def test_plan_is_the_one_that_examines_every_job(seed: int) -> None:
    each = RandomPool(seed)
    for _ in range(STEPS):
        each.step()
        expected = each.reference.plan(each.pool)

        leases = plan(each.pool)

        assert [(one.job_id, one.worker_id, one.reason) for one in leases] == expected
        for lease in leases:
            each.apply(lease)
