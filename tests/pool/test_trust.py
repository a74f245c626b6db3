"""Paired workers, and rejections of private jobs."""

import pytest
from msgspec.structs import replace

from pool.builders import job, joined, pool_after
from shoal.domain.facts import WorkerJoined, WorkerTrusted
from shoal.domain.job import JobTerms, Privacy
from shoal.pool.trust import pairing_rejection, trust_rejection

KEY = "aa" * 32
PRIVATE = replace(job(), terms=JobTerms(privacy=Privacy.PRIVATE, user="ada"))
TRUSTED = WorkerTrusted("", "ada", KEY)


def with_key(*, proven: bool, remark: str = "", key: str = KEY) -> WorkerJoined:
    fact = joined(remark=remark)
    return replace(fact, offer=replace(fact.offer, public_key=key, proven=proven))


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([], None),
        ([with_key(proven=True)], None),
        ([with_key(proven=False, key="bb" * 32)], None),
        ([with_key(proven=False)], "this worker has not proved its key"),
        ([with_key(proven=False, remark="is old")], "this worker is old"),
    ],
)
def test_only_a_worker_that_is_known_to_prove_nothing_is_refused(
    workers: list[WorkerJoined], reason: str | None
) -> None:
    assert pairing_rejection(pool_after(*workers), KEY) == reason


def test_a_key_that_one_of_two_workers_proved_can_be_paired() -> None:
    other = replace(with_key(proven=False), worker_id=joined("v").worker_id)

    assert pairing_rejection(pool_after(with_key(proven=True), other), KEY) is None


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ([], "no worker is paired with the user"),
        ([joined()], "no worker is paired with the user"),
        ([TRUSTED], "none of the paired workers is connected"),
        ([TRUSTED, with_key(proven=False)], "the paired worker has not proved its key"),
        (
            [with_key(proven=False, remark="is old")],
            "no worker is paired with the user; one that is connected is old",
        ),
    ],
)
def test_the_reason_says_what_to_change(
    facts: list[WorkerJoined | WorkerTrusted], problem: str
) -> None:
    rejection = trust_rejection(pool_after(*facts), PRIVATE)

    assert rejection == (
        "no_trusted_worker: only paired workers may run a private job, and " + problem
    )


def test_a_private_job_with_a_proven_worker_is_accepted() -> None:
    pool = pool_after(TRUSTED, with_key(proven=True))

    assert trust_rejection(pool, PRIVATE) is None
    assert trust_rejection(pool_after(), job()) is None
