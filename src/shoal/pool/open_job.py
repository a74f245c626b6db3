"""A job that has not ended, and who works on it."""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.domain.ids import LeaseNumber, WorkerId
from shoal.domain.work import Call, CallStream, Feature, Job, JobKind, Task, Work
from shoal.pool.lifecycle import JobState

NO_LEASE = LeaseNumber(0)
CHARACTERS_PER_TOKEN = 4  # where a wire counts no tokens; about right for English
CHARACTERS_PER_TOKEN_MAX = 8  # characters: no text but odd ones has more in a token

MatchingClass: TypeAlias = tuple[
    str, JobKind, frozenset[Feature], str | None, str | None, frozenset[WorkerId], bool
]


def size_of(job: Job) -> int:
    """Return about how much there is to remember of a job, in characters."""
    work = job.work
    if isinstance(work, Call):
        return len(work.args) + len(work.kwargs)
    return len(work.text) + len(job.terms.form)


def required_name(work: Work) -> str | None:
    """Return the name that a worker must know for some work; None: it need not."""
    match work:
        case Task(name=name):
            return name
        case Call(name=name) | CallStream(name=name):
            return None if Feature.CODE in work.needs else name
        case _:
            return None


@dataclass(frozen=True, slots=True)
class HedgeLease:
    """A worker's lease on a job, and since when."""

    worker_id: WorkerId
    lease: LeaseNumber
    since: float


@dataclass(slots=True)
class OpenJob:
    """A job that has not ended."""

    job: Job
    submitted_at: float
    since: float  # when it came into its present state
    queued_at: float  # when it began to wait; a refusal does not begin it anew
    leased_at: float = 0.0  # when its present worker was given it
    state: JobState = JobState.QUEUED
    worker_id: WorkerId | None = None
    lease: LeaseNumber = NO_LEASE  # that of its present worker, or of the last one
    last_lease: LeaseNumber = NO_LEASE  # the highest number of a lease so far
    hedge: HedgeLease | None = None  # a second worker, until one of the two begins
    started: bool = False  # whether text has ever reached the client
    lost: int = 0  # workers that went away with it
    refused_by: dict[WorkerId, str] = field(default_factory=dict)
    kind: JobKind = field(init=False)
    model: str = field(init=False)
    characters: int = field(init=False)  # of what the model is to read
    size: int = field(init=False)  # see ``size_of``
    needs: frozenset[Feature] = field(init=False)
    task: str | None = field(init=False)  # see ``task_of``
    trusted_keys: Set[str] | None = None
    """Public keys of the workers that may have it, which may grow; None: any may."""

    def __post_init__(self) -> None:
        # Looked at for each worker while the job waits, and never changed.
        self.kind = self.job.kind
        self.model = self.job.model
        self.characters = len(self.job.work.text)
        self.size = size_of(self.job)
        self.needs = self.job.work.needs
        self.task = required_name(self.job.work)

    @property
    def matching_class(self) -> MatchingClass:
        """What it has in common with jobs that the same workers can take."""
        terms = self.job.terms
        private = None if self.trusted_keys is None else terms.user
        rest = (self.task, private, terms.avoid, terms.near)
        return self.job.owner, self.kind, self.needs, *rest

    @property
    def tokens_min(self) -> int:
        """Return how many tokens the model has to read at the least."""
        return self.characters // CHARACTERS_PER_TOKEN_MAX

    @property
    def tokens(self) -> int:
        """Return how many tokens question and answer may have, as a guess."""
        wanted = getattr(self.job.work, "max_tokens", None) or 0
        return self.characters // CHARACTERS_PER_TOKEN + wanted

    @property
    def holders(self) -> Iterator[tuple[WorkerId, LeaseNumber]]:
        """Yield who works on it, and under which lease: nobody, one worker or two."""
        if self.worker_id is not None:
            yield self.worker_id, self.lease
        if self.hedge is not None:
            yield self.hedge.worker_id, self.hedge.lease
