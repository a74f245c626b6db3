"""Builders of jobs, workers and pools for tests of decisions."""

from msgspec.structs import replace

from shoal.domain.facts import (
    Fact,
    JobLeased,
    JobSubmitted,
    WorkerJoined,
    WorkerLoadChanged,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Gang, Job, JobTerms, Priority, Privacy, TimeLimits
from shoal.domain.work import Chat, Feature, JobKind
from shoal.domain.worker import Offer, WorkerLoad
from shoal.pool.inputs import HubInput
from shoal.pool.plan import plan
from shoal.pool.react import react
from shoal.pool.state import PoolState

CHAT_ONLY = frozenset({JobKind.CHAT})
NOTHING: frozenset[Feature] = frozenset()
NO_OWNERS: frozenset[str] = frozenset()
LIMITS = TimeLimits()


def chat(model: str = "m", *, stop: bool = False, prompt: str = "hi") -> Chat:
    options = {"stop": "."} if stop else {}
    return Chat(model, ({"role": "user", "content": prompt},), options=options)


def job(
    name: str = "j",
    model: str = "m",
    limits: TimeLimits = LIMITS,
    *,
    stop: bool = False,
    owner: str = "",
    priority: Priority = Priority.NORMAL,
    session: str = "",
    prompt: str = "hi",
) -> Job:
    work = chat(model, stop=stop, prompt=prompt)
    return Job(JobId(name), work, limits, owner, priority, session)


RUN = "0123456789abcdef" * 2


def member(
    rank: int = 0,
    size: int = 2,
    least: int = 0,
    slots: int = 0,
    *,
    run: str = RUN,
    priority: Priority = Priority.NORMAL,
    limits: TimeLimits = LIMITS,
) -> Job:
    """Return a member of a gang, named r0, r1 and so on; ``least`` is 0 for all."""
    gang = Gang(run, rank, size, least or size, slots)
    name = f"r{rank}" if run == RUN else f"{run[0]}{rank}"
    made = job(name, limits=limits, priority=priority)
    return replace(made, terms=JobTerms(gang=gang))


def gang(
    size: int = 2,
    least: int = 0,
    slots: int = 0,
    *,
    run: str = RUN,
    priority: Priority = Priority.NORMAL,
) -> list[JobSubmitted]:
    """Return the facts that submit a gang."""
    return [
        JobSubmitted(member(rank, size, least, slots, run=run, priority=priority))
        for rank in range(size)
    ]


def joined(
    name: str = "w",
    *models: str,
    slots: int = 1,
    cancels: bool = True,
    features: frozenset[Feature] = NOTHING,
    kinds: frozenset[JobKind] = CHAT_ONLY,
    context: int = 0,
    only_for: frozenset[str] = NO_OWNERS,
    remark: str = "",
    neighbour: bool = False,
    needs_question: bool = False,
    privacy: Privacy | None = None,
    price: str = "",
    engine: str = "",
) -> WorkerJoined:
    offer = Offer(
        kinds,
        frozenset(models or ("m",)),
        slots,
        features,
        context,
        only_for,
        remark,
        neighbour=neighbour,
        needs_question=needs_question,
        privacy=privacy,
        price=price,
        engine=engine,
    )
    return WorkerJoined(WorkerId(name), offer, cancels)


def load_changed(
    name: str = "w", unfit: str = "", queued: int = 0, speed: float = 1.0
) -> WorkerLoadChanged:
    return WorkerLoadChanged(WorkerId(name), WorkerLoad(unfit, queued, speed))


def leased(name: str = "j", worker: str = "w", lease: int = 1) -> JobLeased:
    return JobLeased(JobId(name), WorkerId(worker), LeaseNumber(lease), "")


def pool_after(*facts: Fact, now: float = 0.0) -> PoolState:
    """Return a pool after these facts."""
    pool = PoolState()
    for fact in facts:
        pool.apply(fact, now)
    return pool


def handle(pool: PoolState, input_: HubInput, now: float = 0.0) -> list[Fact]:
    """Apply the facts that follow from an input; return them."""
    facts = react(pool, input_)
    for fact in facts:
        pool.apply(fact, now)
    return facts


def assign(pool: PoolState, now: float = 0.0) -> list[tuple[str, str]]:
    """Lease all jobs that can be leased; return (job, worker) in order."""
    leases = plan(pool)
    for lease in leases:
        pool.apply(lease, now)
    return [(lease.job_id, lease.worker_id) for lease in leases]
