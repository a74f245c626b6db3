"""The states of a job and their transitions."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.builders import job
from shoal.domain.facts import (
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFact,
    JobFailed,
    JobHedged,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    JobUnhedged,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import TimeLimit
from shoal.domain.outcome import Outcome
from shoal.pool.lifecycle import (
    ENDED,
    TRANSITIONS,
    ImpossibleTransition,
    JobState,
    after,
)

ID = JobId("j")
ONE = LeaseNumber(1)
FACTS: dict[type[JobFact], JobFact] = {
    type(fact): fact
    for fact in (
        JobSubmitted(job()),
        JobLeased(ID, WorkerId("w"), ONE, ""),
        JobHedged(ID, WorkerId("v"), LeaseNumber(2), ""),
        JobUnhedged(ID, ONE, ""),
        JobStarted(ID, ONE),
        JobRequeued(ID, ONE, ""),
        JobCompleted(ID, ONE, Outcome("")),
        JobFailed(ID, ""),
        JobCancelled(ID, ""),
        JobExpired(ID, TimeLimit.TOTAL, ""),
    )
}

Q, L, S = JobState.QUEUED, JobState.LEASED, JobState.STREAMING
D, F, C, E = JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED

NO = None
#   submitted leased hedged unhedged started requeued completed failed cancelled expired
EXPECTED = {
    Q: (NO, L, NO, NO, NO, NO, NO, F, C, E),
    L: (NO, NO, L, L, S, Q, D, F, C, E),
    S: (NO, NO, NO, NO, NO, Q, D, F, C, E),
    D: (NO,) * 10,
    F: (NO,) * 10,
    C: (NO,) * 10,
    E: (NO,) * 10,
}
CELLS = [
    pytest.param(state, fact, row[column], id=f"{state.value}-{type(fact).__name__}")
    for state, row in EXPECTED.items()
    for column, fact in enumerate(FACTS.values())
]


@pytest.mark.parametrize(("state", "fact", "then"), CELLS)
def test_transitions_match_the_table(
    state: JobState, fact: JobFact, then: JobState | None
) -> None:
    if then is None:
        with pytest.raises(ImpossibleTransition, match=f"job j while {state.name}"):
            after(state, fact)
    else:
        assert after(state, fact) is then


def test_table_covers_every_state_and_fact() -> None:
    named = {fact for facts in TRANSITIONS.values() for fact in facts}

    assert TRANSITIONS.keys() == set(JobState)
    # Submission is the first fact of a job: it has no state before.
    assert named | {JobSubmitted} == set(get_args(JobFact)) == FACTS.keys()


@given(st.lists(st.sampled_from(list(FACTS.values())), max_size=30))
def test_ended_job_stays_ended(facts: list[JobFact]) -> None:
    state, ends = JobState.QUEUED, 0

    for fact in facts:
        try:
            then = after(state, fact)
        except ImpossibleTransition:
            continue
        assert state not in ENDED
        ends += then in ENDED
        state = then

    assert ends <= 1
