"""Errors of ended jobs."""

import pytest

from shoal.coordinator.open_answers import FAULT_ERRORS, LIMIT_ERRORS, error_of
from shoal.domain.errors import (
    Cancelled,
    ContextExceeded,
    InvalidRequest,
    JobError,
    NoFirstOutput,
    NoWorker,
    OutputStalled,
    ShoalError,
    TimedOut,
    TookTooLong,
    TooLarge,
    Unprocessable,
    WorkerLost,
)
from shoal.domain.facts import JobCancelled, JobExpired, JobFailed
from shoal.domain.ids import JobId
from shoal.domain.job import TimeLimit
from shoal.domain.outcome import Fault

J = JobId("j")


@pytest.mark.parametrize(
    ("fact", "error"),
    [
        (JobFailed(J, "boom"), JobError),
        (JobFailed(J, "boom", cut=True), JobError),
        (JobFailed(J, "boom", lost=True), WorkerLost),
        (JobFailed(J, "boom", lost=True, fault=Fault.REQUEST), WorkerLost),
        (JobFailed(J, "boom", fault=Fault.REQUEST), InvalidRequest),
        (JobFailed(J, "boom", fault=Fault.CONTEXT), ContextExceeded),
        (JobFailed(J, "boom", fault=Fault.SIZE), TooLarge),
        (JobFailed(J, "boom", fault=Fault.VALUES), Unprocessable),
        (JobCancelled(J, "boom"), Cancelled),
        (JobExpired(J, TimeLimit.QUEUE, "boom"), NoWorker),
        (JobExpired(J, TimeLimit.FIRST_OUTPUT, "boom"), NoFirstOutput),
        (JobExpired(J, TimeLimit.SILENCE, "boom"), OutputStalled),
        (JobExpired(J, TimeLimit.TOTAL, "boom"), TookTooLong),
    ],
)
def test_every_end_maps_to_its_own_error(
    fact: JobFailed | JobCancelled | JobExpired, error: type[ShoalError]
) -> None:
    raised = error_of(fact)

    assert type(raised) is error
    assert str(raised) == "boom"


def test_a_job_that_waited_in_vain_says_when_to_try_again() -> None:
    raised = error_of(JobExpired(J, TimeLimit.QUEUE, "boom", retry_after=42))

    assert isinstance(raised, NoWorker)
    assert raised.retry_after == 42


def test_every_fault_and_every_limit_has_an_error() -> None:
    assert FAULT_ERRORS.keys() == set(Fault)
    assert LIMIT_ERRORS.keys() == set(TimeLimit)
    assert all(
        issubclass(error, TimedOut)
        for limit, error in LIMIT_ERRORS.items()
        if limit is not TimeLimit.QUEUE
    )
