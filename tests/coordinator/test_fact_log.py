"""Log lines of facts."""

import logging

import pytest

from shoal.coordinator.fact_log import FactLog, describe, fields_of
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
    JobHedged,
    JobLeased,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    JobUnhedged,
    LateResult,
    PassedOver,
    WorkerApproved,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerLoadChanged,
    WorkerResumed,
    WorkerSuspended,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, TimeLimit
from shoal.domain.outcome import Outcome
from shoal.domain.work import Call, Chat, JobKind
from shoal.domain.worker import Offer, Suspension, WorkerLoad

J, W, TWO = JobId("7f3a"), WorkerId("wire:w/m"), LeaseNumber(2)
CHAT = Chat("m", ({"role": "user", "content": "a secret"},))


@pytest.mark.parametrize(
    ("fact", "line"),
    [
        (JobSubmitted(Job(J, CHAT)), "fact=JobSubmitted job=7f3a model='m' key=''"),
        (
            JobLeased(J, W, TWO, "least busy", (PassedOver("busy", 9),)),
            "fact=JobLeased job=7f3a worker='wire:w/m' lease=2 reason='least busy'",
        ),
        (
            JobHedged(J, W, TWO, "silent"),
            "fact=JobHedged job=7f3a worker='wire:w/m' lease=2 reason='silent'",
        ),
        (
            JobUnhedged(J, TWO, "quicker", cut=True),
            "fact=JobUnhedged job=7f3a lease=2 reason='quicker' lost=False cut=True"
            " too_long=False failed=False",
        ),
        (JobStarted(J, TWO), "fact=JobStarted job=7f3a lease=2"),
        (
            JobRequeued(J, TWO, "loading", W),
            "fact=JobRequeued job=7f3a lease=2 reason='loading' refused_by='wire:w/m'"
            " handed_over=False too_long=False failed=False",
        ),
        (
            JobCompleted(J, TWO, Outcome("a secret")),
            "fact=JobCompleted job=7f3a lease=2 verdict=unsigned",
        ),
        (
            JobFailed(J, "two\nlines", lost=True),
            r"fact=JobFailed job=7f3a error='two\nlines' lost=True cut=False"
            " fault=worker",
        ),
        (
            JobCancelled(J, "left", 9),
            "fact=JobCancelled job=7f3a reason='left' written=9",
        ),
        (
            JobExpired(J, TimeLimit.FIRST_OUTPUT, "late"),
            "fact=JobExpired job=7f3a limit=first_output error='late' written=0"
            " retry_after=0",
        ),
        (
            LateResult(J, TWO, W, "completed"),
            "fact=CameLate job=7f3a lease=2 worker='wire:w/m' what='completed'",
        ),
        (
            WorkerJoined(W, Offer(frozenset({JobKind.CHAT})), cancels=True),
            "fact=WorkerJoined worker='wire:w/m' cancels=True shared=False",
        ),
        (
            WorkerDraining(W, "bye"),
            "fact=WorkerDraining worker='wire:w/m' reason='bye'",
        ),
        (
            WorkerLoadChanged(
                W, WorkerLoad("is too hot", 3, 0.5), fitness_changed=True
            ),
            "fact=WorkerConditioned worker='wire:w/m' unfit='is too hot' queued=3"
            " speed=0.5",
        ),
        (
            WorkerSuspended("wire:w", Suspension.DRAINING, "al", 60.0),
            "fact=WorkerSuspended name='wire:w' how=draining by='al' within=60.0",
        ),
        (
            WorkerResumed("wire:w", "al"),
            "fact=WorkerResumed name='wire:w' by='al'",
        ),
        (
            WorkerApproved("wire:w", "al", "8a"),
            "fact=WorkerApproved name='wire:w' by='al' public_key='8a'",
        ),
        (WorkerLeft(W, "reset"), "fact=WorkerLost worker='wire:w/m' reason='reset'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_fact_is_logged_in_one_line_without_prompts_and_answers(
    fact: Fact, line: str
) -> None:
    assert describe(fields_of(fact)) == line


@pytest.mark.parametrize(("turned", "level"), [(True, "INFO"), (False, "DEBUG")])
def test_load_is_logged_only_if_it_changes_fitness(
    turned: bool, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "shoal.coordinator"):
        FactLog().on_facts([WorkerLoadChanged(W, WorkerLoad(queued=1), turned)])

    assert [record.levelname for record in caplog.records] == [level]


def test_facts_of_calls_are_logged_at_debug_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    facts = FactLog()

    with caplog.at_level(logging.DEBUG, "shoal.coordinator"):
        facts.on_facts([JobSubmitted(Job(J, Call("f", b"", b"")))])
        facts.on_facts([JobLeased(J, W, LeaseNumber(1), "")])
        facts.on_facts([JobCompleted(J, LeaseNumber(1), Outcome(""))])

    assert {record.levelname for record in caplog.records} == {"DEBUG"}


def test_only_what_is_unusual_of_a_job_has_a_line_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    facts = FactLog()

    with caplog.at_level(logging.INFO, "shoal.coordinator"):
        facts.on_facts([JobSubmitted(Job(J, CHAT))])
        facts.on_facts([JobLeased(J, W, LeaseNumber(1), "")])
        facts.on_facts([JobStarted(J, LeaseNumber(1))])
        facts.on_facts([JobRequeued(J, LeaseNumber(1), "lost")])
        facts.on_facts([JobCompleted(J, LeaseNumber(2), Outcome(""))])
        facts.on_facts([JobFailed(J, "refused")])

    logged = [record.getMessage().split()[0] for record in caplog.records]
    assert logged == ["fact=JobRequeued", "fact=JobFailed"]


@pytest.mark.parametrize(
    "fact",
    [
        JobSubmitted(Job(J, Chat("m\nfact=Forged", ()))),
        WorkerLeft(WorkerId("wire:w\nfact=Forged"), ""),
    ],
    ids=["model", "worker"],
)
def test_names_cannot_forge_log_lines(fact: Fact) -> None:
    assert "\n" not in describe(fields_of(fact))
