"""The stored names of facts: the database, the log and the metrics keep them."""

from typing import get_args

from shoal.domain.facts import (
    FACT_NAMES,
    AccountFact,
    JobFact,
    LateResult,
    ModelFact,
    ReceiptPresented,
    WorkerFact,
)


def test_every_fact_has_a_stored_name() -> None:
    assert set(FACT_NAMES) == {
        *get_args(JobFact),
        *get_args(WorkerFact),
        *get_args(AccountFact),
        *get_args(ModelFact),
        LateResult,
        ReceiptPresented,
    }


def test_stored_names_never_change() -> None:
    assert sorted(FACT_NAMES.values()) == [
        "AccountCredited",
        "AccountLimited",
        "AliasRemoved",
        "AliasSet",
        "CameLate",
        "DeploymentRemoved",
        "DeploymentSet",
        "JobCancelled",
        "JobCompleted",
        "JobExpired",
        "JobFailed",
        "JobHedged",
        "JobLeased",
        "JobRequeued",
        "JobStarted",
        "JobSubmitted",
        "JobUnhedged",
        "MachineCalled",
        "ReceiptPresented",
        "WorkerApproved",
        "WorkerConditioned",
        "WorkerDisapproved",
        "WorkerDismissed",
        "WorkerDistrusted",
        "WorkerDraining",
        "WorkerJoined",
        "WorkerLost",
        "WorkerMarked",
        "WorkerResumed",
        "WorkerSuspended",
        "WorkerTrusted",
    ]
