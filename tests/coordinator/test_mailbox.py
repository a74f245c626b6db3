"""What waits for the hub, and its limits while the store fails."""

import pytest

from shoal.coordinator import mailbox
from shoal.coordinator.mailbox import Mailbox
from shoal.coordinator.receipt_verifier import HubMail
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import TimeLimit
from shoal.domain.vocabulary import Rejected
from shoal.domain.worker import CHAT_ONLY, Offer, WorkerLoad
from shoal.pool.inputs import (
    AnswerRejected,
    Cancellation,
    LeaseResult,
    LimitReached,
    LoadReported,
    WorkerConnected,
    WorkerDisconnected,
)

JOB, OTHER = JobId("j"), JobId("k")
WORKER, SECOND = WorkerId("w"), WorkerId("x")


def result(worker: WorkerId = WORKER, job: JobId = JOB) -> LeaseResult:
    return LeaseResult(worker, Rejected(job, LeaseNumber(1), "busy"))


def load(queued: int, worker: WorkerId = WORKER) -> LoadReported:
    return LoadReported(worker, WorkerLoad(queued=queued))


def test_all_is_kept_in_order() -> None:
    box = Mailbox()
    mail: list[HubMail] = [
        Cancellation(JOB, "a"),
        Cancellation(JOB, "b"),
        load(1),
        load(2),
        result(),
    ]

    for each in mail:
        box.post(each)

    assert box.take() == mail
    assert box.take() == []


def test_what_is_put_back_comes_first() -> None:
    box = Mailbox()
    box.hold()
    box.post(load(1))
    box.put_back([result()])
    box.post(load(2))

    assert box.take() == [result(), load(2)]


def test_held_mail_ends_a_job_once_in_each_way() -> None:
    box = Mailbox()
    box.hold()
    ends: list[HubMail] = [
        Cancellation(JOB, "the client left"),
        LimitReached(JOB, TimeLimit.TOTAL),
        AnswerRejected(JOB, "not JSON", lost=False),
        Cancellation(OTHER, "the client left"),
    ]

    for each in [*ends, *ends]:
        box.post(each)

    assert box.take() == ends


def test_the_last_report_of_each_worker_is_held() -> None:
    box = Mailbox()
    box.hold()

    for queued in range(1000):
        box.post(load(queued))
        box.post(load(queued, SECOND))

    assert box.take() == [load(999), load(999, SECOND)]


def test_a_report_does_not_overtake_a_new_connection() -> None:
    box = Mailbox()
    box.hold()
    came = WorkerConnected(WORKER, Offer(CHAT_ONLY), True)
    mail: list[HubMail] = [load(1), WorkerDisconnected(WORKER, "reset"), came, load(2)]

    for each in mail:
        box.post(each)

    assert box.take() == mail


def test_a_worker_that_sends_too_much_has_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox, "HELD_PER_WORKER_MAX", 3)
    box = Mailbox()
    box.hold()

    for _ in range(3):
        assert box.has_room(WORKER)
        box.post(result())

    assert not box.has_room(WORKER)
    assert box.has_room(SECOND)
    box.release()
    assert box.has_room(WORKER)


def test_when_all_is_full_nobody_may_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "HELD_MAX", 2)
    box = Mailbox()
    box.hold()
    box.post(result())
    assert box.has_room(None)

    box.post(result(SECOND))

    assert not box.has_room(None)
    assert not box.has_room(WorkerId("new"))
    box.post(WorkerDisconnected(WORKER, "left"))  # who is gone has to be known
    assert len(box) == 3
