"""The coordinator's end of a connection, once a worker has registered."""

import base64
import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from harness.profiles import examples
from protocols.dispatch.recorded import (
    KEY,
    NOW,
    SIGNERS,
    answers,
    opened,
    registered,
    summary,
)
from protocols.pairs import CHAT, MEMBER, RUN, connect
from protocols.session_pair import messages_in, sent
from shoal.domain.errors import Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import JobTerms, Policy, Privacy
from shoal.domain.receipts import SignedReceipt
from shoal.domain.vocabulary import (
    CancelJob,
    Completed,
    Dismiss,
    Failed,
    HealthReported,
    ReceiptSent,
    Rejected,
    RunJob,
)
from shoal.domain.work import Chat, Completion, Embedding, Task
from shoal.domain.worker import MachineHealth
from shoal.protocols.dispatch import PROTOCOL
from shoal.protocols.dispatch.coordinator import (
    INVALID_IN_A_ROW_MAX,
    STRAYS_MAX,
    UNREGISTERED_MESSAGE_MAX,
    UNSIGNED_MAX,
)
from shoal.protocols.dispatch.ecmascript_json import canonical
from shoal.protocols.seam.session import Close, CoordinatorEnd, Data, Notice

TASK = RunJob(
    JobId("job"),
    LeaseNumber(2),
    Task("classify", {"task_type": "classify", "input": "great"}),
    terms=JobTerms(policy=Policy.CHEAP, user="u1"),
)
QUESTION = structs.replace(
    TASK, work=Chat("dispatch", ({"role": "user", "content": "hi"},), max_tokens=8)
)
FORMED = structs.replace(
    QUESTION, terms=JobTerms(form='{"prompt":"hi","max_tokens":8}')
)
OPEN = replace(MEMBER, only_for=frozenset(), token="")
HEARTBEAT = f'{{"type":"heartbeat","provider_pubkey":"{KEY}"}}'


def given_to_it(job: RunJob = TASK) -> CoordinatorEnd:
    session = registered()
    session.send(job, NOW)
    return session


def complete(output: str, **fields: object) -> str:
    """Return a completion; the output is JSON text, for it may be odd."""
    rest = json.dumps({"type": "job_complete", "job_id": "job"} | fields)
    return f'{rest[:-1]},"output":{output}}}'


def receipt(job_id: str = "job") -> tuple[dict[str, str | None], str]:
    body = {
        "job_id": job_id,
        "provider_pubkey": KEY,
        "output_hash": "x",
        "completed_at": "2026-02-09T12:00:05.000Z",
        "payment_ref": None,
    }
    signed = SIGNERS["A"].sign(canonical(json.dumps(body)))
    return body, base64.b64encode(signed).decode()


def submit(job_id: str = "job") -> str:
    body, signature = receipt(job_id)
    return json.dumps(
        {"type": "receipt_submit", "receipt": body, "signature": signature}
    )


def errors(session: CoordinatorEnd, *texts: Data) -> list[str]:
    """Return the codes of the errors that messages are answered with."""
    outputs = session.receive(list(texts), NOW)
    assert not messages_in(outputs)
    return [each.get("code", each["type"]) for each in answers(outputs)]


# Jobs.


def assigned(session: CoordinatorEnd, job: RunJob) -> dict[str, Any]:
    (message,) = answers(session.send(job, NOW))
    return message


def test_a_job_in_the_original_form_is_sent_verbatim() -> None:
    form = '{"2":1,"1":2,"prompt":"hi","max_tokens":8.0,"a":"\\ud800"}'
    job = structs.replace(
        QUESTION, terms=JobTerms(form=form, privacy=Privacy.PRIVATE, user="ü")
    )

    (text,) = sent(registered().send(job, NOW))

    assert text == (
        '{"type":"job_assign","job_id":"job","job_type":"LLM_INFER","payload":'
        f'{form},"policy":"FAST","privacy_class":"PRIVATE","user_id":"ü"}}'
    )


def test_a_task_has_its_name_in_the_payload() -> None:
    message = assigned(registered(), TASK)

    assert list(message) == [
        "type", "job_id", "job_type", "payload", "policy", "privacy_class", "user_id",
    ]  # fmt: skip
    assert message["job_type"] == "TASK"
    assert message["payload"]["task_type"] == "classify"
    assert message["payload"]["input"] == "great"
    assert message["policy"] == "CHEAP"
    bare = structs.replace(TASK, work=Task("summarize", "text"))
    payload = assigned(registered(), bare)["payload"]
    assert payload == {"job_type": "TASK", "task_type": "summarize", "input": "text"}


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([("user", "hi")], "hi"),
        (
            [("system", "Be brief."), ("user", "hi")],
            "Be brief.\n\nUser: hi\n\nAssistant:",
        ),
        (
            [("user", "a"), ("assistant", "b"), ("user", "c")],
            "User: a\n\nAssistant: b\n\nUser: c\n\nAssistant:",
        ),
    ],
)
def test_a_conversation_becomes_one_prompt(
    messages: list[tuple[str, str]], prompt: str
) -> None:
    chat = Chat("m", tuple({"role": r, "content": c} for r, c in messages))

    message = assigned(registered(), structs.replace(RUN, work=chat))

    assert message["payload"] == {
        "job_type": "LLM_INFER",
        "prompt": prompt,
        "max_tokens": 1024,
    }


@pytest.mark.parametrize(
    "job",
    [
        structs.replace(RUN, continues="so far"),
        structs.replace(RUN, work=Completion("m", "once")),
        structs.replace(RUN, work=Embedding("m", ("a",))),
    ],
)
def test_a_plain_worker_gets_plain_jobs_only(job: RunJob) -> None:
    with pytest.raises(Unsupported):
        registered().send(job, NOW)


def test_a_lone_surrogate_is_not_passed_on() -> None:
    job = structs.replace(
        RUN,
        work=structs.replace(CHAT, messages=({"role": "user", "content": "\ud800"},)),
    )

    assert assigned(registered(), job)["payload"]["prompt"] == "\ufffd"


def test_a_job_of_10_mb_fits_both_ways() -> None:
    text = 'a "quoted" text, with ümlauts.\n' * 1000 + "x" * 10_000_000
    chat = structs.replace(CHAT, messages=({"role": "user", "content": text},))
    pair, _ = connect(PROTOCOL, OPEN)

    (run,) = pair.command(structs.replace(QUESTION, work=chat))
    assert isinstance(run, RunJob)
    (completed,) = pair.event(Completed(run.job_id, run.lease, rest=(text,)))

    assert run.work == structs.replace(chat, max_tokens=1024)
    assert isinstance(completed, Completed)
    assert completed.rest == (text,)
    assert json.loads(completed.output)["text"] == text


# Answers.


def test_the_answer_of_a_task_is_its_output_as_signed() -> None:
    text = '{"b": 1.0, "10": "\\u00fc", "2": [1e21, -0]}'

    (completed,) = messages_in(given_to_it().receive([complete(text)], NOW))

    written = '{"2":[1e+21,0],"10":"ü","b":1}'
    assert completed == Completed(TASK.job_id, TASK.lease, rest=(written,))


@pytest.mark.parametrize("prefix", ["", "sha256:"])
@pytest.mark.parametrize("job", [TASK, QUESTION])
def test_an_output_hashed_as_it_was_sent_is_kept_so(job: RunJob, prefix: str) -> None:
    sent = r'{"text": "\u00fc", "score": 1.0}'
    digest = prefix + hashlib.sha256(sent.encode()).hexdigest()

    outputs = given_to_it(job).receive([complete(sent, output_hash=digest)], NOW)

    (completed,) = outputs
    written = '{"text":"ü","score":1}' if job is TASK else "ü"
    assert completed == Completed(job.job_id, job.lease, rest=(written,), output=sent)


@pytest.mark.parametrize("output", ["null", "5", '"x"', "[]", '{"error":"no"}'])
def test_any_json_is_the_answer_of_a_task(output: str) -> None:
    (completed,) = messages_in(given_to_it().receive([complete(output)], NOW))

    assert completed == Completed(TASK.job_id, TASK.lease, rest=(output,))


def test_the_text_of_an_answer_is_well_formed_and_its_output_unchanged() -> None:
    session = given_to_it(QUESTION)

    (completed,) = messages_in(
        session.receive([complete('{"text":"a\\ud83d..."}')], NOW)
    )

    assert isinstance(completed, Completed)
    assert completed.rest == ("a\ufffd...",)
    assert completed.output == '{"text":"a\\ud83d..."}'


@pytest.mark.parametrize(
    ("output", "text"), [('"é"', "é"), (r'"a\ud83d"', "a\ufffd"), (r'"\""', '"')]
)
def test_an_output_that_is_a_text_is_an_answer(output: str, text: str) -> None:
    session = given_to_it(QUESTION)

    (completed,) = messages_in(session.receive([complete(output)], NOW))

    assert isinstance(completed, Completed)
    assert (completed.rest, completed.output) == ((text,), output)


def test_an_empty_text_is_an_answer() -> None:
    (completed,) = messages_in(
        given_to_it(QUESTION).receive([complete('{"text":""}')], NOW)
    )

    assert isinstance(completed, Completed)
    assert completed.rest == ()


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ('{"error":"Unsupported job payload"}', "Unsupported job payload"),
        ('{"error":5}', "the worker's answer has no text"),
        ('{"text":null}', "the worker's answer has no text"),
        ('{"text":0.00001}', "the worker's answer has no text"),
        ("null", "the worker's answer has no text"),
        ('["text"]', "the worker's answer has no text"),
        ('{"error":"\\ud800"}', "\ufffd"),
        ('["\\ud800"]', "the worker's answer has no text"),
        ('{"\\ud800":1}', "the worker's answer has no text"),
    ],
)
def test_an_answer_without_a_text_is_a_failure(output: str, error: str) -> None:
    (failed,) = messages_in(given_to_it(QUESTION).receive([complete(output)], NOW))

    assert failed == Failed(TASK.job_id, TASK.lease, error)


@pytest.mark.parametrize("output", ['{"error":"no"}', "null", '{"text":5}'])
def test_a_job_in_the_original_form_accepts_any_output(output: str) -> None:
    (completed,) = messages_in(given_to_it(FORMED).receive([complete(output)], NOW))

    assert completed == Completed(TASK.job_id, TASK.lease, output=output)


def test_a_job_is_requeued_if_its_output_is_nested_too_deeply() -> None:
    session = given_to_it()
    deep = "[" * 200 + "]" * 200

    outputs = session.receive([complete(deep)], NOW)

    assert [type(each) for each in messages_in(outputs)] == [Rejected]
    assert [each["code"] for each in answers(outputs)] == ["INVALID_MESSAGE"]


@pytest.mark.parametrize(
    ("reason", "recorded"),
    [
        ({"reason": "Ollama not available"}, "Ollama not available"),  # the document's
        ({}, "no reason given"),
        ({"reason": None}, "no reason given"),
        ({"reason": ""}, ""),
        ({"reason": {"code": 5}}, "no reason given"),
    ],
)
def test_a_rejected_job_goes_to_another_worker_with_or_without_a_reason(
    reason: dict[str, object], recorded: str
) -> None:
    session = given_to_it()

    outputs = session.receive(
        [json.dumps({"type": "job_reject", "job_id": "job"} | reason)], NOW
    )

    assert list(outputs) == [Rejected(TASK.job_id, TASK.lease, recorded)]


# Receipts.


def test_an_early_receipt_is_passed_on_with_its_answer() -> None:
    session = given_to_it()
    body, signature = receipt()

    assert list(session.receive([submit()], NOW)) == []
    (completed,) = messages_in(session.receive([complete("{}")], NOW))

    assert isinstance(completed, Completed)
    assert completed.receipt == SignedReceipt(
        canonical(json.dumps(body)), base64.b64decode(signature)
    )


def test_a_late_receipt_is_passed_on_once_per_job() -> None:
    session = registered()
    jobs = [f"job{number}" for number in range(UNSIGNED_MAX)]
    for name in jobs:
        session.send(structs.replace(TASK, job_id=JobId(name)), NOW)
        session.receive([complete("{}", job_id=name)], NOW)

    for name in jobs:
        (presented,) = messages_in(session.receive([submit(job_id=name)], NOW))
        assert isinstance(presented, ReceiptSent)
        assert presented.job_id == name


def test_receipts_for_unknown_jobs_are_limited() -> None:
    session = registered()

    outputs = session.receive([submit(job_id=f"x{n}") for n in range(80)], NOW)

    assert len(messages_in(outputs)) == STRAYS_MAX
    assert {each["code"] for each in answers(outputs)} == {"NOT_YOUR_JOB"}
    assert not messages_in(session.receive([submit(job_id="a\nb")], NOW))


def test_an_invalid_receipt_does_not_invalidate_the_answer() -> None:
    for bad in (
        {"receipt": "x", "receipt_signature": "AA=="},
        {"receipt": [], "receipt_signature": 5},
    ):
        outputs = given_to_it().receive([complete("{}", **bad)], NOW)

        (completed,) = messages_in(outputs)
        assert isinstance(completed, Completed)
        assert completed.receipt == SignedReceipt(b"", b"")
        assert [each["code"] for each in answers(outputs)] == ["INVALID_MESSAGE"]


# Words about jobs of others.


def test_completions_of_unknown_jobs_are_late_results_and_limited() -> None:
    session = registered()

    outputs = session.receive([complete("{}", job_id=f"x{n}") for n in range(80)], NOW)

    late = messages_in(outputs)
    assert late == [
        Completed(JobId(f"x{n}"), LeaseNumber(0)) for n in range(STRAYS_MAX)
    ]
    assert {each["code"] for each in answers(outputs)} == {"NOT_YOUR_JOB"}


def test_each_finished_job_allows_one_more_stray_report() -> None:
    session = registered()
    for number in range(STRAYS_MAX + 5):
        session.receive([complete("{}", job_id=f"x{number}")], NOW)
    session.send(TASK, NOW)
    session.receive([complete("{}")], NOW)

    heard = [
        messages_in(session.receive([complete("{}", job_id="y")], NOW))
        for _ in range(2)
    ]

    assert [len(each) for each in heard] == [1, 0]


def test_a_rejection_of_an_unknown_job_is_answered_with_an_error() -> None:
    text = '{"type":"job_reject","job_id":"x","reason":"r"}'

    assert errors(registered(), text) == ["NOT_YOUR_JOB"]


def test_a_job_cannot_be_cancelled() -> None:
    with pytest.raises(Unsupported):
        given_to_it().send(CancelJob(TASK.job_id, TASK.lease), NOW)


# Bad input.


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ("", "PARSE_ERROR"),
        ("{", "PARSE_ERROR"),
        (b"\xff", "PARSE_ERROR"),
        (b'{"type":"\xff"}', "PARSE_ERROR"),
        ("null", "INVALID_MESSAGE"),
        ("[" * 100_000, "INVALID_MESSAGE"),
        ('{"type":"heartbeat","a":' + "[" * 200 + "]" * 200 + "}", "INVALID_MESSAGE"),
        ("[1]", "UNKNOWN_MSG"),
        ('{"type":"drain"}', "UNKNOWN_MSG"),
        ('{"type":"job_assign"}', "UNKNOWN_MSG"),
        ('{"type":"heartbeat"}', "INVALID_MESSAGE"),
        ('{"type":"heartbeat","provider_pubkey":5}', "INVALID_MESSAGE"),
        (HEARTBEAT.replace(KEY, "0" * 64), "INVALID_MESSAGE"),
        ('{"type":"job_complete","output":{}}', "INVALID_MESSAGE"),
        ('{"type":"job_complete","job_id":null,"output":{}}', "INVALID_MESSAGE"),
        ('{"type":"job_complete","job_id":"","output":{}}', "INVALID_MESSAGE"),
        (complete("{}", job_id="x" * 257), "INVALID_MESSAGE"),
        ('{"type":"job_reject","job_id":[],"reason":""}', "INVALID_MESSAGE"),
        ('{"type":"receipt_submit"}', "INVALID_MESSAGE"),
        ('{"type":"receipt_submit","receipt":{},"signature":""}', "INVALID_MESSAGE"),
        ('{"type":"receipt_submit","receipt":null,"signature":""}', "INVALID_MESSAGE"),
        ('{"type":"receipt_submit","receipt":{},"signature":5}', "INVALID_MESSAGE"),
    ],
)  # fmt: skip
def test_an_invalid_message_is_answered_with_an_error(data: Data, code: str) -> None:
    session = given_to_it()

    assert errors(session, data) == [code]
    (completed,) = messages_in(session.receive([complete("{}")], NOW))
    assert isinstance(completed, Completed)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"type":"x\\ud800"}', "Unknown type: x\ufffd"),
        ('{"type":1.50}', "Unknown type: 1.5"),
        ('{"type":["a",null,{}]}', "Unknown type: a,,[object Object]"),
        ('{"type":"' + "x" * 9999 + '"}', "Unknown type: " + "x" * 100),
    ],
)
def test_an_unknown_type_is_answered_as_in_the_original(text: str, said: str) -> None:
    (answer,) = answers(opened().receive([text], NOW))

    assert answer == {"type": "error", "code": "UNKNOWN_MSG", "message": said}


def test_an_error_names_the_field() -> None:
    (answer,) = answers(registered().receive(['{"type":"heartbeat"}'], NOW))

    assert "heartbeat" in answer["message"]
    assert "provider_pubkey" in answer["message"]


def test_consecutive_invalid_messages_end_the_connection() -> None:
    session = opened()

    outputs = session.receive(["{"] * (INVALID_IN_A_ROW_MAX + 50), NOW)

    assert len(sent(outputs)) == INVALID_IN_A_ROW_MAX
    (close,) = [each for each in outputs if isinstance(each, Close)]
    assert outputs[-1] == close
    assert close.code == 1008


def test_a_valid_message_resets_the_count_of_invalid_ones() -> None:
    session = registered()

    for _ in range(5):
        outputs = session.receive([*["{"] * (INVALID_IN_A_ROW_MAX - 1), HEARTBEAT], NOW)
        assert not [each for each in outputs if isinstance(each, Close)]


@pytest.mark.parametrize(
    "text",
    [
        HEARTBEAT,
        complete("{}"),
        '{"type":"job_reject","job_id":"x","reason":""}',
        submit(),
    ],
)
def test_messages_before_registration_are_invalid(text: str) -> None:
    assert errors(opened(), text) == ["NOT_REGISTERED"]


def test_large_messages_before_registration_are_not_parsed() -> None:
    large = (
        '{"type":"register","capabilities":['
        + '"TASK",' * UNREGISTERED_MESSAGE_MAX
        + '"TASK"]}'
    )

    assert errors(opened(), large) == ["NOT_REGISTERED"]


@settings(max_examples=examples(0.4))
@given(data=st.data())
def test_any_field_is_accepted_or_refused(data: st.DataObject) -> None:
    values = st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(st.characters(exclude_categories=[])),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
        ),
        max_leaves=5,
    )
    message = data.draw(
        st.sampled_from(
            [json.loads(HEARTBEAT), json.loads(complete("{}")), json.loads(submit()),
             {"type": "job_reject", "job_id": "job", "reason": "r"}]
        )
    )  # fmt: skip
    field = data.draw(st.sampled_from([*message, "receipt", "output_hash"]))
    message[field] = data.draw(values)

    text = json.dumps(message).replace("Infinity", "1e999")
    outputs = given_to_it().receive([text], NOW)

    for answer in sent(outputs):
        assert summary(answer)
    for event in messages_in(outputs):
        repr(event).encode()  # no half characters go on from here


# Time, and health.


def test_health_reports_are_rate_limited() -> None:
    session = registered()
    metrics = ',"metrics":{"cpu_pct":45.2,"mem_pct":62.1,"active_jobs":1}}'
    text = HEARTBEAT[:-1] + metrics

    outputs = session.receive([text] * 5, NOW)

    assert messages_in(outputs) == [HealthReported(MachineHealth(45.2, 62.1, 1))]
    assert len(answers(outputs)) == 5
    assert messages_in(
        session.receive([HEARTBEAT[:-1] + ',"metrics":{}}'], NOW + 1)
    ) == [HealthReported(MachineHealth())]


@pytest.mark.parametrize(
    ("metrics", "health"),
    [
        (
            '{"cpu_pct":230.5,"mem_pct":62.1,"active_jobs":1}',
            MachineHealth(None, 62.1, 1),
        ),
        ('{"cpu_pct":101}', MachineHealth()),
        ('{"cpu_pct":1,"mem_pct":-1}', MachineHealth(1.0)),
        ('{"cpu_pct":1,"mem_pct":1e400}', MachineHealth(1.0)),
        ('{"mem_pct":2,"active_jobs":"1"}', MachineHealth(None, 2.0)),
        ('{"mem_pct":2,"cpu_pct":{"all":1}}', MachineHealth(None, 2.0)),
        ("[]", MachineHealth()),
        ('"\\ud800"', MachineHealth()),
        ('{"\\ud800":1,"cpu_pct":45.2}', MachineHealth()),
    ],
)
def test_unusable_metrics_are_dropped_and_do_not_count_against_a_worker(
    metrics: str, health: MachineHealth
) -> None:
    session = registered()
    beat = HEARTBEAT[:-1] + f',"metrics":{metrics}}}'

    outputs = [
        output
        for number in range(INVALID_IN_A_ROW_MAX + 1)
        for output in session.receive([beat], NOW + 10 * number)
    ]

    assert {each["type"] for each in answers(outputs)} == {"heartbeat_ack"}
    assert messages_in(outputs) == [HealthReported(health)] * (INVALID_IN_A_ROW_MAX + 1)
    assert [type(each) for each in outputs].count(Notice) == 1  # logged once
    assert not [each for each in outputs if isinstance(each, Close)]


def test_a_heartbeat_without_metrics_reports_no_health() -> None:
    session = registered()

    for beat in (HEARTBEAT, HEARTBEAT[:-1] + ',"metrics":null}'):
        outputs = session.receive([beat], NOW)
        assert answers(outputs) == [{"type": "heartbeat_ack", "status": "ok"}]
        assert messages_in(outputs) == []


def test_a_worker_that_does_not_register_is_disconnected() -> None:
    session = opened()
    session.receive([HEARTBEAT], NOW + 20)

    assert session.deadline == NOW + 30
    (close,) = session.tick(NOW + 30)

    assert isinstance(close, Close)
    assert "not registered" in close.reason


def test_any_message_keeps_a_worker_alive() -> None:
    session = registered()
    session.receive(["nonsense"], NOW + 20)

    assert session.tick(NOW + 30) == ()
    assert session.deadline == NOW + 50
    (close,) = session.tick(NOW + 50)
    assert isinstance(close, Close)
    assert close.code == 4008


def test_a_replaced_worker_receives_an_error() -> None:
    outputs = registered().send(Dismiss("a newer connection", replaced=True), NOW)

    assert [each["code"] for each in answers(outputs)] == ["REPLACED"]
    assert outputs[-1] == Close("a newer connection", 4000, "Replaced")


def test_a_dismissed_worker_receives_the_reason() -> None:
    outputs = registered().send(Dismiss("removed by an operator"), NOW)

    assert answers(outputs) == [
        {
            "type": "error",
            "code": "DISMISSED",
            "message": "removed by an operator",
        }
    ]
    assert outputs[-1] == Close(
        "removed by an operator", 4000, "removed by an operator"
    )
