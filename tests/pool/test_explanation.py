from dataclasses import dataclass

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
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerLoadChanged,
)
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, TimeLimit
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.work import ANY_MODEL, Chat, JobKind, Task
from shoal.domain.worker import Offer, WorkerLoad
from shoal.pool.explanation import explain

JOB = Job(JobId("j1"), Chat("m1", ({"role": "user", "content": "secret"},)), owner="al")
ONE, TWO = WorkerId("w:one"), WorkerId("w:two")
FIRST, SECOND = LeaseNumber(1), LeaseNumber(2)


@dataclass(frozen=True)
class RecordedAt:
    at: float
    fact: Fact


def explained(*facts: Fact) -> list[str]:
    """Return the explanation of facts a second apart, without the times."""
    story = [RecordedAt(1e9 + second, fact) for second, fact in enumerate(facts)]
    return [line.split("  ", 1)[1] for line in explain(story)]


def test_job_with_two_workers_is_explained() -> None:
    facts = (
        JobSubmitted(JOB),
        JobLeased(
            JOB.id,
            ONE,
            FIRST,
            "least busy: 0% of its slots in use",
            (
                PassedOver("all slots busy", 9, (TWO, WorkerId("w:three"))),
                PassedOver("does not have m1", 4),
                PassedOver("paused", 1),
                PassedOver("draining", 2, (TWO,)),
            ),
        ),
        JobStarted(JOB.id, FIRST),
        JobRequeued(JOB.id, FIRST, "worker lost: closed by peer"),
        JobLeased(JOB.id, TWO, SECOND, "least busy: 50% of its slots in use"),
        JobCompleted(JOB.id, SECOND, Outcome("secret", "length", Usage(3, 4))),
    )

    assert explained(*facts) == [
        "submitted by al for m1",
        "given to w:one, attempt 1: least busy: 0% of its slots in use",
        "  passed over: w:two, w:three and 7 others: all slots busy",
        "  passed over: 4 workers: does not have m1",
        "  passed over: 1 worker: paused",
        "  passed over: w:two and 1 other: draining",
        "first output of attempt 1",
        "back in the queue after attempt 1: worker lost: closed by peer",
        "given to w:two, attempt 2: least busy: 50% of its slots in use",
        "done by attempt 2: 3 prompt tokens, 4 output tokens, finish reason length",
    ]


def test_every_transition_and_end_has_a_reason() -> None:
    assert explained(
        JobHedged(JOB.id, TWO, SECOND, "attempt 1 silent for 9.0 s; idle"),
        JobUnhedged(JOB.id, FIRST, "the other one was faster", cut=True),
        JobRequeued(JOB.id, FIRST, "no room", ONE),
        JobFailed(JOB.id, "out of memory"),
        JobCancelled(JOB.id, "the client left"),
        JobExpired(JOB.id, TimeLimit.QUEUE, "no worker for m1: draining (1 worker)"),
        JobCompleted(JOB.id, FIRST, Outcome("secret")),
        LateResult(JOB.id, FIRST, ONE, "completed"),
    ) == [
        "given to w:two as well, attempt 2: attempt 1 silent for 9.0 s; idle",
        "attempt 1 ended, the other continues: the other one was faster",
        "refused by w:one, back in the queue: no room",
        "failed: out of memory",
        "cancelled: the client left",
        "given up: no worker for m1: draining (1 worker)",
        "done by attempt 1: finish reason stop",
        "too late: w:one reported 'completed' for attempt 1; recorded, not delivered",
    ]


def test_workers_are_explained() -> None:
    assert explained(
        WorkerJoined(ONE, Offer(frozenset({JobKind.CHAT})), cancels=True),
        WorkerDraining(ONE, "asked to"),
        WorkerLoadChanged(ONE, WorkerLoad("is too hot"), fitness_changed=True),
        WorkerLoadChanged(ONE, WorkerLoad(), fitness_changed=True),
        WorkerLeft(ONE, "silent for 30 s"),
    ) == [
        "w:one joined",
        "w:one takes no new jobs: asked to",
        "w:one is too hot",
        "w:one can take jobs",
        "w:one lost: silent for 30 s",
    ]


def test_lines_begin_with_the_time_in_utc() -> None:
    (line,) = explain([RecordedAt(1_000_000_000.0625, JobCancelled(JOB.id, "x"))])

    assert line == "2001-09-09 01:46:40.062  cancelled: x"


def test_explanation_has_no_prompt_and_no_answer() -> None:
    lines = explained(JobSubmitted(JOB), JobCompleted(JOB.id, FIRST, Outcome("secret")))

    assert not any("secret" in line for line in lines)


def test_job_without_a_model_is_described() -> None:
    task = JobSubmitted(Job(JOB.id, Task("classify")))
    chat = JobSubmitted(Job(JOB.id, Chat(ANY_MODEL, ())))

    assert explained(task, chat) == [
        "submitted for the task 'classify'",
        "submitted for any model",
    ]


def test_call_shows_the_size_of_its_value_only() -> None:
    small = JobCompleted(JOB.id, FIRST, Outcome("", value=b"secret"))
    large = JobCompleted(JOB.id, FIRST, Outcome("", blobs=(bytes(32),)))

    assert explained(small, large) == [
        "done by attempt 1: it returned a value of 6 B",
        "done by attempt 1: it returned a value that is stored in a separate file",
    ]


def test_traceback_is_cut_to_its_last_line() -> None:
    traceback = 'Traceback (most recent call last):\n  File "t.py"\nValueError: no\n'

    assert explained(JobFailed(JOB.id, traceback)) == ["failed: ValueError: no"]
