"""The worker's end."""

import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from protocols.dispatch.recorded import NOW, accept, summary
from protocols.pairs import (
    MEMBER,
    RUN,
    SIGNER,
    ChatPair,
    connect,
    tied,
)
from protocols.session_pair import messages_in, sent
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Privacy
from shoal.domain.outcome import Delta
from shoal.domain.receipts import Verdict
from shoal.domain.vocabulary import (
    AnswerChunk,
    Completed,
    Failed,
    HealthReported,
    RunJob,
)
from shoal.domain.work import JSON, JobKind, Task
from shoal.domain.worker import MachineHealth, ServedModel
from shoal.ledger.worker_receipts import verify
from shoal.protocols.dispatch import PROTOCOL
from shoal.protocols.dispatch.worker import ANSWER_MAX
from shoal.protocols.seam.context import Dialer, WorkerProfile
from shoal.protocols.seam.session import Close, Notice, Send, WorkerEnd

WORKER = replace(MEMBER, only_for=frozenset(), privacy=None)


def joined(member: WorkerProfile = WORKER) -> ChatPair:
    pair, _ = connect(PROTOCOL, member)
    return pair


def given_job(pair: ChatPair, job: RunJob = RUN) -> RunJob:
    (run,) = pair.command(job)
    assert isinstance(run, RunJob)
    return run


def test_an_answer_is_signed_in_the_documents_form() -> None:
    pair = joined()
    run = given_job(pair)

    (completed,) = pair.event(Completed(run.job_id, run.lease, rest=("text",)))

    assert isinstance(completed, Completed)
    assert completed.receipt is not None
    claims = json.loads(completed.receipt.body)
    assert claims["output_hash"].startswith("sha256:")
    verdict = verify(
        completed.receipt,
        job_id=RUN.job_id,
        public_key=SIGNER.public_key,
        output_json=completed.output.encode(),
    )
    assert verdict is Verdict.VALID
    assert completed.output == '{"text":"text","model":"family/model:7b"}'


def test_a_refusal_is_the_text_of_an_answer() -> None:
    pair = joined()
    run = given_job(pair)
    refusal = Delta(0, {"reasoning_content": "Hm.", "refusal": "No."})

    (completed,) = pair.event(Completed(run.job_id, run.lease, rest=(refusal,)))

    assert isinstance(completed, Completed)
    assert completed.output == '{"text":"No.","model":"family/model:7b"}'


def test_an_answer_over_the_limit_fails() -> None:
    pair = joined()
    run = given_job(pair)
    piece = "x" * (ANSWER_MAX // 8)

    heard = [
        event
        for _ in range(10)
        for event in pair.event(AnswerChunk(run.job_id, run.lease, [piece]))
    ]

    (failed,) = heard
    assert isinstance(failed, Failed)
    assert "exceeds the limit" in failed.error
    assert pair.event(Completed(run.job_id, run.lease)) == []


def test_concurrent_jobs_of_a_coordinator_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.protocols.dispatch.worker.JOBS_MAX", 20)
    pair = joined()
    for number in range(20):
        given_job(pair, structs.replace(RUN, job_id=JobId(f"j{number}")))

    outputs = pair.coordinator.send(structs.replace(RUN, job_id=JobId("one more")), NOW)
    answers = pair.worker.receive(sent(outputs), NOW)

    assert not messages_in(answers)
    assert [type(each) for each in answers if isinstance(each, Notice)] == [Notice]
    (failed,) = messages_in(pair.coordinator.receive(sent(answers), NOW))
    assert failed == Failed(JobId("one more"), RUN.lease, "more than 20 jobs at a time")


def test_health_is_reported() -> None:
    pair = joined()

    assert pair.event(HealthReported(MachineHealth(1.5, 20.0, 3))) == [
        HealthReported(MachineHealth(1.5, 20.0, 3))
    ]


def test_a_model_that_cannot_chat_is_not_offered() -> None:
    model = ServedModel("e", frozenset({JobKind.EMBEDDING}))
    dialer = PROTOCOL.dial("http://host", replace(MEMBER, model=model))

    (said,) = sent(dialer.start_session({}).tick(NOW))

    assert json.loads(said)["capabilities"] == []


def test_a_worker_without_slots_does_not_register() -> None:
    session = PROTOCOL.dial("http://h", replace(WORKER, slots=0)).start_session({})

    assert list(session.tick(NOW)) == []
    assert session.deadline is None


def reconnected(pair: ChatPair) -> ChatPair:
    """Let the worker dial again; the new connection is open, nobody has spoken."""
    accepted = accept()
    accepted.session.tick(NOW)
    return tied(accepted, pair.dialer)


def test_after_a_reconnect_answers_from_the_time_between_are_late() -> None:
    pair = joined()
    done = given_job(pair, structs.replace(RUN, job_id=JobId("done")))
    again = reconnected(pair)
    register = sent(again.worker.tick(NOW))
    # The agent says at once what it could not say before.
    assert list(again.worker.send(Completed(done.job_id, done.lease), NOW)) == []

    acknowledged = again.coordinator.receive(register, NOW)
    outputs = again.worker.receive(sent(acknowledged), NOW)

    assert messages_in(outputs) == []
    heard = again.coordinator.receive(sent(outputs), NOW)
    assert messages_in(heard) == [Completed(JobId("done"), LeaseNumber(0))]
    assert [summary(text) for text in sent(heard)] == ["error NOT_YOUR_JOB"]


def test_a_refused_worker_does_not_reconnect() -> None:
    pair = joined()
    answer = '{"type":"register_ack","status":"error","error":"Invalid token"}'
    session = pair.dialer.start_session({})
    session.tick(NOW)

    session.receive([answer], NOW)

    assert "Invalid token" in (pair.dialer.final_reason(1000, "") or "")


def test_a_task_is_answered_with_its_json() -> None:
    pair = joined(replace(WORKER, tasks=frozenset({"classify"})))
    run = given_job(pair, structs.replace(RUN, work=Task("classify", {"input": "x"})))

    pair.event(AnswerChunk(run.job_id, run.lease, ['{"sentiment": ']))
    pair.event(AnswerChunk(run.job_id, run.lease, ['"positive"}']))
    (completed,) = pair.event(Completed(run.job_id, run.lease))

    assert isinstance(completed, Completed)
    assert completed.rest == ('{"sentiment":"positive"}',)


ASSIGNED = """{
"type": "job_assign",
"job_id": "a1b2c3d4-e5f6-7890-abcd-ef1234567890",
"job_type": "TASK",
"payload": {
"task_type": "classify",
"input": "This product is amazing."
},
"policy": "CHEAP",
"privacy_class": "PUBLIC",
"user_id": "user_abc123"
}"""  # as in the document


ACK = '{"type":"heartbeat_ack","status":"ok"}'
REGISTERED = '{"type":"register_ack","status":"ok","worker_id":"worker_abc123"}'


def at_original(**terms: Any) -> tuple[Dialer, WorkerEnd, list[object]]:
    """Register at an original coordinator; return also what came of its answer."""
    dialer = PROTOCOL.dial("http://host", replace(WORKER, **terms))
    session = dialer.start_session({})
    (said,) = sent(session.tick(NOW))
    assert json.loads(said)["type"] == "register"
    return dialer, session, [*session.receive([REGISTERED], NOW)]


def test_the_owners_price_is_sent_where_the_document_has_it() -> None:
    dialer = PROTOCOL.dial("http://host", replace(MEMBER, price="$0.010"))

    (said,) = sent(dialer.start_session({}).tick(NOW))

    assert list(json.loads(said)) == [
        "type", "provider_pubkey", "provider_type", "capabilities", "pricing_hint",
    ]  # fmt: skip
    assert json.loads(said)["pricing_hint"] == "$0.010"


def test_no_price_is_no_hint() -> None:
    dialer = PROTOCOL.dial("http://host", replace(MEMBER, price=""))

    (said,) = sent(dialer.start_session({}).tick(NOW))

    assert "pricing_hint" not in json.loads(said)


def test_the_log_has_the_id_and_the_errors_of_a_coordinator() -> None:
    _, session, registered = at_original()
    error = """{
"type": "error",
"code": "invalid_message",
"message": "Failed to parse WebSocket message"
}"""  # as in the document

    (notice,) = session.receive([error], NOW)

    assert registered == [Notice("registered, worker_id worker_abc123", routine=True)]
    text = "invalid_message: Failed to parse WebSocket message"
    assert notice == Notice(f"the coordinator reports an error, {text}")


def beats(session: WorkerEnd, count: int) -> list[object]:
    """Let that many heartbeats come due; return the outputs beside them."""
    outputs: list[object] = []
    for _ in range(count):
        assert session.deadline is not None
        outputs += session.tick(session.deadline)
    return [each for each in outputs if not isinstance(each, Send)]


def test_a_coordinator_that_stops_acknowledging_is_left() -> None:
    dialer, session, _ = at_original()
    beats(session, 1)
    session.receive([ACK], NOW + 10)

    notice, close = beats(session, 4)

    assert notice == Notice("the coordinator has not acknowledged a heartbeat")
    assert close == Close("no heartbeat_ack within 30 s")
    assert session.deadline is None
    assert dialer.final_reason(1006, "") is None  # it dials again


def test_a_vanished_coordinator_is_noticed_after_a_reconnect_as_well() -> None:
    dialer, session, _ = at_original()
    beats(session, 1)
    session.receive([ACK], NOW + 10)
    again = dialer.start_session({})
    again.tick(NOW)
    again.receive([REGISTERED], NOW)

    assert beats(again, 4)[-1] == Close("no heartbeat_ack within 30 s")


def test_another_coordinator_that_never_acknowledges_is_left_once() -> None:
    dialer, session, _ = at_original()
    beats(session, 1)
    session.receive([ACK], NOW + 10)

    left = 0
    for _ in range(3):
        session = dialer.start_session({})
        session.tick(NOW)
        session.receive([REGISTERED], NOW)
        left += sum(isinstance(each, Close) for each in beats(session, 4))

    assert left == 1


def test_a_coordinator_that_says_something_else_is_not_left() -> None:
    _, session, _ = at_original()
    beats(session, 1)
    session.receive([ACK], NOW + 10)

    for number in range(2, 20):
        session.receive(['{"type":"payment_posted"}'], NOW + 10 * number)
        assert Close not in map(type, beats(session, 1))


def test_a_coordinator_that_never_acknowledges_is_not_left() -> None:
    _, session, _ = at_original()

    assert beats(session, 100) == [
        Notice("the coordinator has not acknowledged a heartbeat")
    ]


def test_health_reports_do_not_hide_a_vanished_coordinator() -> None:
    _, session, _ = at_original()
    beats(session, 1)
    session.receive([ACK], NOW + 10)
    report = HealthReported(MachineHealth(1.5, 20.0, 3))

    outputs = [
        output
        for number in range(50)
        for output in session.send(report, NOW + 11 + number)
    ]

    assert Close("no heartbeat_ack within 30 s") in outputs


def assigned_by_original(message: str = ASSIGNED, **terms: Any) -> list[object]:
    """Return what a worker does with a job of an original coordinator."""
    _, session, _ = at_original(**terms)
    return [*session.receive([message], NOW)]


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"only_for": frozenset({"ada", "user_abc123"})},
        {"privacy": Privacy.PUBLIC},
    ],
)
def test_a_job_that_the_owner_accepts_is_run(terms: dict[str, Any]) -> None:
    (run,) = assigned_by_original(**terms)

    assert isinstance(run, RunJob)
    assert run.work == Task("classify", json.loads(ASSIGNED)["payload"])


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        (
            {"only_for": frozenset({"ada"})},
            "this worker accepts the jobs of some users only",
        ),
        ({"privacy": Privacy.PRIVATE}, "this worker accepts private jobs only"),
    ],
)
def test_a_job_that_the_owner_does_not_accept_ends_with_an_error(
    terms: dict[str, Any], reason: str
) -> None:
    notice, answer = assigned_by_original(**terms)

    assert isinstance(notice, Notice)
    assert reason in notice.text
    assert isinstance(answer, Send)
    message = json.loads(answer.data)
    assert message["type"] == "job_complete"  # a rejected job hangs there
    assert message["output"] == {"error": reason}
    assert message["receipt_signature"]


@pytest.mark.parametrize(
    "field",
    [{"user_id": 5}, {"user_id": None}, {"user_id": ["ada"]}, {"user_id": "Ada"}],
)
def test_a_restricted_worker_runs_no_job_of_an_unknown_user(
    field: dict[str, JSON],
) -> None:
    message = json.dumps(json.loads(ASSIGNED) | field)

    _, answer = assigned_by_original(message, only_for=frozenset({"ada"}))

    assert isinstance(answer, Send)


@pytest.mark.parametrize("privacy", [Privacy.PUBLIC, Privacy.PRIVATE])
@pytest.mark.parametrize("given", ["public", "", None, 1])
def test_an_unknown_privacy_class_is_neither(given: JSON, privacy: Privacy) -> None:
    message = json.dumps(json.loads(ASSIGNED) | {"privacy_class": given})

    _, answer = assigned_by_original(message, privacy=privacy)

    assert isinstance(answer, Send)
