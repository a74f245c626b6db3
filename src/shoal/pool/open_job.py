"""A job that has not ended, and its leases."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.domain import work as works
from shoal.domain.ids import LeaseNumber, WorkerId
from shoal.domain.job import Job
from shoal.domain.job_kinds import INFERENCE_KINDS
from shoal.domain.json_limits import characters_in
from shoal.domain.outcome import ENGINE_FAULTS, Fault
from shoal.pool.beginnings import Beginning, beginnings_of
from shoal.pool.context_limits import ContextKey, RequestLength, length_of
from shoal.pool.gangs.open_gangs import OpenGang
from shoal.pool.lifecycle import JobState

NO_LEASE = LeaseNumber(0)
CHARACTERS_PER_TOKEN = 4  # where a wire reports no tokens; typical of English
CHARACTERS_PER_TOKEN_MAX = 8  # characters; only unusual texts have more in a token

FUNCTION_KINDS = frozenset(
    {works.JobKind.TASK, works.JobKind.CALL, works.JobKind.CALL_STREAM}
)
_RESUMED_KINDS = INFERENCE_KINDS | FUNCTION_KINDS

Need: TypeAlias = tuple[
    works.JobKind,
    frozenset[works.Feature],
    str | None,
    str,
    tuple[str, str] | None,
    frozenset[WorkerId],
    bool,
    str,
    bool,
    int | None,
    bool,
]
"""What a job needs of a worker, besides the model."""


def size_of(job: Job) -> int:
    """Estimate the memory of a job, in characters: all its strings count."""
    work = job.work
    if isinstance(work, works.Call):
        return len(work.args) + len(work.kwargs)
    return characters_in([job.terms.form, job.terms.api_fields, *works.values_of(work)])


def required_name(work: works.Work) -> str | None:
    """Return the name that a worker must offer to run the work; None: any worker."""
    match work:
        case works.Task(name=name):
            return name
        case works.Call(name=name) | works.CallStream(name=name):
            return None if works.Feature.CODE in work.needs else name
        case works.ModelOrder(machine=machine):
            return machine
        case _:
            return None


def has_question(work: works.Work) -> bool:
    """Return whether the work is other than a chat without a question."""
    if not isinstance(work, works.Chat):
        return True
    messages = work.messages
    last = messages[-1].get("role") if messages else None
    # Nearly always the last one is a question, and the others need no look.
    return last == "user" or work.has_question


@dataclass(frozen=True, slots=True)
class HedgeLease:
    """A worker's lease on a job, and its start."""

    worker_id: WorkerId
    lease: LeaseNumber
    since: float


def python_of(work: works.Work) -> str:
    """Return the version of Python that the code in a call is for; empty: any."""
    return work.python if isinstance(work, works.Call | works.CallStream) else ""


@dataclass(slots=True)
class OpenJob:
    """A job that has not ended."""

    job: Job
    submitted_at: float
    since: float  # when its present state began
    queued_at: float  # when it began to wait; a refusal does not reset it
    grace_until: float = 0.0  # until when workers may come back after a restart
    leased_at: float = 0.0  # when its present lease began
    state: JobState = JobState.QUEUED
    worker_id: WorkerId | None = None
    lease: LeaseNumber = NO_LEASE  # the present or last lease
    last_lease: LeaseNumber = NO_LEASE  # the highest number of a lease so far
    hedge: HedgeLease | None = None  # a second worker, until one of the two begins
    started: bool = False  # whether text has reached the client
    lost: int = 0  # number of its workers that were lost, or gave up an answer
    ran: float = 0.0  # seconds for which its former workers had it
    gang: OpenGang | None = None  # of a member
    last_worker: WorkerId | None = None  # that was lost, and may still run it
    awaits: WorkerId | None = None  # the same, for which it is kept out of the queue
    awaits_until: float = 0.0
    run_since: LeaseNumber = NO_LEASE  # the first lease under which that has run it
    settled: bool = False  # whether its last worker had it for ``MEMBER_SETTLED``
    failures: list[tuple[WorkerId, str]] = field(default_factory=list)
    """The workers whose engines failed at it, with what they said."""

    refused_by: dict[WorkerId, str] = field(default_factory=dict)
    too_long_for: dict[WorkerId, str] = field(default_factory=dict)
    """The workers that refused it for its length, with what they said."""

    kind: works.JobKind = field(init=False)
    model: str = field(init=False)
    characters: int = field(init=False)  # of the prompt
    tokens_min: int = field(init=False)  # the fewest that the prompt can have
    size: int = field(init=False)  # see ``size_of``
    needs: frozenset[works.Feature] = field(init=False)
    task: str | None = field(init=False)  # see ``required_name``
    python: str = field(init=False)  # as in ``Call``
    has_question: bool = field(init=False)  # or is not a chat
    need: Need = field(init=False)  # see ``_need_of``
    trusted_keys: Set[str] | None = None
    """Public keys of the workers that may run it, which may grow; None: any may."""

    number: int = 0  # in the order of arrivals at its queue
    round: int = 0  # of the turns that the users of its owner take
    known_length: RequestLength | None = None  # see ``length``
    known_beginnings: Sequence[Beginning] | None = None  # see ``beginnings``

    def __post_init__(self) -> None:
        # Read for each worker while the job waits, and never changed.
        self.kind = self.job.kind
        self.model = self.job.model
        self.characters = len(self.job.work.text)
        self.tokens_min = self.characters // CHARACTERS_PER_TOKEN_MAX
        self.size = size_of(self.job)
        self.needs = self.job.work.needs
        self.task = required_name(self.job.work)
        self.python = python_of(self.job.work)
        self.has_question = has_question(self.job.work)
        self.need = _need_of(self)

    def waited(self, since: float) -> float:
        """Return the seconds from its submission until ``since``."""
        return since - self.submitted_at

    def remaining(self, since: float) -> float:
        """Return the seconds of its total limit that were left at ``since``."""
        return max(0.0, self.job.limits.total - self.waited(since))

    @property
    def requirement(self) -> tuple[str, Need]:
        """The model and the need, which members of a gang have in common."""
        return self.model, self.need

    @property
    def rank(self) -> int:
        """The rank of a gang's member."""
        gang = self.job.terms.gang
        assert gang is not None, "only members of gangs have a rank"
        return gang.rank

    @property
    def tokens(self) -> int:
        """Estimate the tokens of the prompt and the answer together."""
        wanted = getattr(self.job.work, "max_tokens", None) or 0
        return max(self.characters // CHARACTERS_PER_TOKEN + wanted, self.tokens_min)

    @property
    def length(self) -> RequestLength:
        """The length, which is measured when it matters: that may take milliseconds."""
        if self.known_length is None:
            self.known_length = length_of(self.job.work)
        return self.known_length

    @property
    def beginnings(self) -> Sequence[Beginning]:
        """The beginnings of a chat, found when several workers have its model."""
        if self.known_beginnings is None:
            self.known_beginnings = beginnings_of(self.job, self.size)
        return self.known_beginnings

    @property
    def context_key(self) -> ContextKey:
        """What the context of a worker depends on."""
        return self.model, self.kind

    def is_of_engine(self, fault: Fault) -> bool:
        """Return whether a failure is an engine's: another may do the job."""
        inference = self.kind in INFERENCE_KINDS and self.gang is None
        return inference and fault in ENGINE_FAULTS

    @property
    def can_resume(self) -> bool:
        """Whether a worker that was lost may go on with it when it comes back.

        Members of gangs have their own way.
        """
        return self.kind in _RESUMED_KINDS and self.gang is None

    def was_run_by(self, worker_id: WorkerId, lease: LeaseNumber) -> bool:
        """Return whether a worker that was lost may still run it since this lease.

        It need not know of later leases, in which it was to go on.
        """
        same_run = self.run_since <= lease <= self.last_lease
        return same_run and self.last_worker == worker_id

    def is_run_since(self, lease: LeaseNumber) -> bool:
        """Return whether the worker of a lease has the job, or is awaited with it."""
        waits = self.awaits is None or self.awaits != self.last_worker
        if self.worker_id is None and waits:
            return False
        return self.run_since <= lease <= self.last_lease

    def may_have(self, lease: LeaseNumber) -> bool:
        """Return whether a worker may have got a call under a lease not recorded.

        The lease of a call that a stream carries is recorded after a while: then a
        worker that names the job, whose id is random, and its next lease, has it.
        """
        return self.kind is works.JobKind.CALL and lease == self.last_lease + 1

    @property
    def holders(self) -> Sequence[tuple[WorkerId, LeaseNumber]]:
        """The workers that have it, each with its lease: none, one or two."""
        if self.worker_id is None:
            return ()
        if self.hedge is None:
            return ((self.worker_id, self.lease),)
        hedge = self.hedge
        return (self.worker_id, self.lease), (hedge.worker_id, hedge.lease)


def _need_of(job: OpenJob) -> Need:
    """Return what a job needs of a worker, regardless of its owner and length.

    ``eligibility.unsuitability`` is the same for all jobs of one need.
    """
    terms = job.job.terms
    account = None if job.trusted_keys is None else (job.job.owner, terms.user)
    origin = (terms.avoid, terms.near, terms.peer)
    slots = None if terms.gang is None else terms.gang.slots
    return (
        *(job.kind, job.needs, job.task, job.python, account, *origin),
        *(job.has_question, slots, terms.hosted_after is not None),
    )
