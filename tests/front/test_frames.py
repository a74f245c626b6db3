"""What the two ends of a link send arrives as it was."""

import inspect

import pytest

from shoal.domain import errors
from shoal.domain.errors import JobError, ShoalError
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.job import Job, JobTerms, Policy, Priority, Privacy, TimeLimits
from shoal.domain.outcome import Choice, Delta, Outcome, Usage
from shoal.domain.work import Chat, Completion, Embedding, Rerank, Work
from shoal.front import frames
from shoal.protocols.shoal.codec import encode

ERRORS = [
    each
    for _, each in inspect.getmembers(errors, inspect.isclass)
    if issubclass(each, ShoalError)
]
ARGUMENTS = {
    errors.LimitExceeded: ("body", 3, 2),
    errors.ModelLoading: ("loading", 7, {"model": "m", "bytes": 5, "step": None}),
    errors.PaymentDue: ("pay", {"x-price": "1"}),
    errors.Refused: (4001, "no"),
}
TERMS = JobTerms(
    Policy.CHEAP,
    Privacy.PRIVATE,
    "user",
    price=3,
    avoid=frozenset({WorkerId("w")}),
    left_out=("tools",),
    whole=True,
)


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_arrive_with_all_that_they_say(kind: type[ShoalError]) -> None:
    error = kind(*ARGUMENTS.get(kind, ("why",)))
    sent = frames.Ended(1, None, frames.Failure.of(error))

    arrived: object = frames.OF_HUBS.decode(encode(sent))

    assert isinstance(arrived, frames.Ended)
    assert arrived.failure is not None
    same = arrived.failure.error()
    assert (type(same), str(same), vars(same)) == (kind, str(error), vars(error))


def test_an_error_of_a_newer_release_is_one_of_the_job() -> None:
    assert type(frames.Failure("Unheard", "of").error()) is JobError


@pytest.mark.parametrize(
    "work",
    [
        Chat("m", ({"role": "user", "content": "hi"},), temperature=0.0),
        Completion("m", "once"),
        Embedding("m", ("a", "b")),
        Rerank("m", "q", ("a",)),
    ],
    ids=lambda work: type(work).__name__,
)
def test_jobs_arrive_whole(work: Work) -> None:
    job = Job(
        JobId("j"), work, TimeLimits(), "al", Priority.LOW, "session", "key", TERMS
    )
    seen = ("once", Delta(0, {"reasoning_content": "hm"}))
    sent = frames.Submit(7, b"digest", job, again=True, seen=seen)

    arrived: object = frames.OF_FRONTS.decode(encode(sent))
    assert arrived == sent


def test_outcomes_arrive_whole() -> None:
    choice = Choice({"content": "x", "tool_calls": [{"id": "c"}]}, "stop")
    sent = frames.Ended(7, Outcome("x", "stop", Usage(1, 2), (choice,)))

    arrived: object = frames.OF_HUBS.decode(encode(sent))
    assert arrived == sent
