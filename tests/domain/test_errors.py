"""Errors by fault."""

import pytest

from shoal.domain import errors
from shoal.domain.errors import (
    ClientError,
    InvalidRequest,
    JobError,
    LimitExceeded,
    PeerError,
    Refused,
    ShoalError,
    StoreError,
    Unavailable,
    Unsupported,
)

FAULTS = (PeerError, ClientError, Unavailable, JobError, StoreError)
RAISED = [
    error
    for error in vars(errors).values()
    if isinstance(error, type) and error.__module__ == errors.__name__
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: error.__name__)
def test_every_error_has_at_most_one_fault(error: type[Exception]) -> None:
    faults = [fault for fault in FAULTS if issubclass(error, fault)]

    assert len(faults) <= 1
    # Errors that only a bug can cause are not caught with the others.
    assert issubclass(error, ShoalError) != issubclass(error, Unsupported)


def test_errors_carry_the_fields_of_responses() -> None:
    assert Unavailable("busy").retry_after == 5
    assert InvalidRequest("wrong", "model").field == "model"
    assert Refused(4002, "Invalid token").code == 4002
    exceeded = LimitExceeded("frame payload", 20, 10)
    assert str(exceeded) == "frame payload of 20 bytes exceeds the limit of 10"
    assert (exceeded.size, exceeded.limit) == (20, 10)
