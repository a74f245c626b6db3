"""The life of a job: which fact may follow in which state, as a table."""

from collections.abc import Mapping
from enum import Enum

from shoal.domain import facts


class JobState(Enum):
    """The state of a job."""

    QUEUED = "queued"
    LEASED = "leased"  # one or two workers have it, without output yet
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    __hash__ = object.__hash__  # members are singletons, hashed very often


_ = JobState
_WITHOUT_WORKER: Mapping[type[facts.JobFact], JobState] = {
    facts.JobFailed: _.FAILED,
    facts.JobCancelled: _.CANCELLED,
    facts.JobExpired: _.EXPIRED,
}

END_STATES: Mapping[type[facts.JobFact], JobState] = {
    facts.JobCompleted: _.DONE,
    **_WITHOUT_WORKER,
}
"""The state after each end of a job."""


TRANSITIONS: dict[JobState, dict[type[facts.JobFact], JobState]] = {
    _.QUEUED: {facts.JobLeased: _.LEASED, **_WITHOUT_WORKER},
    _.LEASED: {
        facts.JobHedged: _.LEASED,
        facts.JobUnhedged: _.LEASED,
        facts.JobStarted: _.STREAMING,
        facts.JobRequeued: _.QUEUED,
        **END_STATES,
    },
    # Requeued with the text so far: another worker continues it.
    _.STREAMING: {facts.JobRequeued: _.QUEUED, **END_STATES},
    _.DONE: {},
    _.FAILED: {},
    _.CANCELLED: {},
    _.EXPIRED: {},
}

ENDED = frozenset(state for state, ways in TRANSITIONS.items() if not ways)


class ImpossibleTransition(AssertionError):
    """A fact that cannot follow from the job's state: a bug."""


def after(state: JobState, fact: facts.JobFact) -> JobState:
    """Return the state that ``fact`` leads to.

    Raises ImpossibleTransition if it cannot follow.
    """
    try:
        return TRANSITIONS[state][type(fact)]
    except KeyError:
        raise ImpossibleTransition(
            f"{type(fact).__name__} of job {fact.job_id} while {state.name}"
        ) from None
