"""Both of our ends against peers that know nothing of us."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from originals.dispatch import OriginalCoordinator, OriginalWorker
from protocols.dispatch.recorded import NOW, SIGNERS, opened
from protocols.pairs import MEMBER
from protocols.session_pair import messages_in, sent
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Delta, Fault
from shoal.domain.receipts import Verdict
from shoal.domain.vocabulary import (
    AnswerChunk,
    Command,
    Completed,
    Event,
    Failed,
    HealthReported,
    Joined,
    Rejected,
    RunJob,
)
from shoal.domain.work import Chat, Task
from shoal.domain.worker import DeviceKind, MachineHealth
from shoal.ledger.worker_receipts import verify
from shoal.protocols.dispatch import ProviderDialer
from shoal.protocols.seam.session import Close, CoordinatorEnd, Notice, WorkerEnd

A = SIGNERS["A"]
WORKER = replace(
    MEMBER,
    identity=A,
    tasks=frozenset({"classify"}),
    only_for=frozenset({"42"}),  # the coordinator's user is the number 42
    price="",
    epoch=1_770_638_400.0,  # 2026-02-09T12:00:00Z
)


# Our coordinator, an original worker.


def serve(worker: OriginalWorker) -> tuple[CoordinatorEnd, list[Event]]:
    session = opened()
    outputs = session.receive([worker.register()], NOW)
    for text in sent(outputs):
        assert worker.receive(str(text)) == []
    return session, messages_in(outputs)


@pytest.mark.parametrize(
    ("work", "output"),
    [
        (
            Task("classify", {"input": "fine"}),
            '{"sentiment":"neutral","confidence":0.9000000000000001}',
        ),
        (
            Chat("dispatch", ({"role": "user", "content": "hello"},)),
            '{"text":"[stub] 5 characters","model":"stub-v1","stub":true}',
        ),
        (Task("juggle"), '{"error":"Unsupported job payload"}'),
    ],
)
def test_an_original_worker_is_served_and_its_receipts_verify(
    work: Chat | Task, output: str
) -> None:
    worker = OriginalWorker()
    session, (joined,) = serve(worker)
    assert isinstance(joined, Joined)
    assert len(worker.worker_id) == 36

    (text,) = sent(session.send(RunJob(JobId("j"), LeaseNumber(1), work), NOW))
    (answer,) = worker.receive(str(text))
    outputs = session.receive([answer], NOW)

    (completed,) = messages_in(outputs)
    assert not sent(outputs)
    assert isinstance(completed, Completed)
    assert completed.receipt is not None
    said = completed.output or str(completed.rest[0])
    assert said == output
    verdict = verify(
        completed.receipt,
        job_id=JobId("j"),
        public_key=bytes.fromhex(joined.offer.public_key),
        output_json=said.encode(),
    )
    assert verdict is Verdict.VALID


def test_heartbeats_keep_an_original_worker_connected() -> None:
    worker = OriginalWorker()
    session, _ = serve(worker)

    for now in range(10, 600, 10):
        outputs = session.receive([worker.heartbeat()], float(now))
        assert [worker.receive(str(text)) for text in sent(outputs)] == [[]]
        assert session.tick(float(now)) == ()


# Our worker, an original coordinator.


@dataclass
class Service:
    """Our worker at an original coordinator, across connections."""

    dialer: ProviderDialer = field(
        default_factory=lambda: ProviderDialer("http://127.0.0.1:4010", WORKER)
    )
    coordinator: OriginalCoordinator = field(default_factory=OriginalCoordinator)

    def connect(self) -> WorkerEnd:
        session = self.dialer.start_session({"upgrade": "websocket"})
        self.hear(session, session.tick(0.0))
        return session

    def hear(self, session: WorkerEnd, outputs: Any, now: float = 5.0) -> None:
        """Bring what was sent to the coordinator, and its answers back."""
        for text in sent(outputs):
            for answer in self.coordinator.receive(str(text)):
                more = session.receive([answer], now)
                assert not messages_in(more)
                self.hear(session, more, now)

    def assign(
        self, session: WorkerEnd, job_id: str, job_type: str, payload: Any
    ) -> list[Command]:
        text = self.coordinator.assign(job_id, job_type, payload)
        outputs = session.receive([text], 5.0)
        self.hear(session, outputs)
        return messages_in(outputs)

    def send(self, session: WorkerEnd, *events: Event) -> None:
        for event in events:
            self.hear(session, session.send(event, 5.0))


def test_a_shoal_worker_registers_as_original_ones_do() -> None:
    service = Service()
    session = service.dialer.start_session({})

    (text,) = sent(session.tick(0.0))

    assert text == OriginalWorker().register()
    assert sent(session.tick(9.0)) == []


def test_a_phone_registers_as_a_seeker() -> None:
    member = replace(WORKER, device=DeviceKind.PHONE, tasks=frozenset())

    (text,) = sent(ProviderDialer("http://h", member).start_session({}).tick(0.0))

    message = json.loads(text)
    assert message["provider_type"] == "SEEKER"
    assert message["capabilities"] == ["LLM_INFER"]


def test_a_shoal_worker_runs_chats_of_an_original_coordinator() -> None:
    service = Service()
    session = service.connect()

    (run,) = service.assign(
        session, "j1", "LLM_INFER", {"prompt": "hi \ud83d", "max_tokens": 8, "x": [1]}
    )

    assert run == RunJob(
        JobId("j1"),
        LeaseNumber(1),
        Chat(MEMBER.model.name, ({"role": "user", "content": "hi \ufffd"},), 8),
    )
    service.send(
        session,
        AnswerChunk(run.job_id, run.lease, ["héllo", " "]),
        AnswerChunk(run.job_id, run.lease, ["wörld"]),
        Completed(run.job_id, run.lease, "length"),
    )
    output = {"text": "héllo wörld", "model": MEMBER.model.name}
    assert service.coordinator.done == {"j1": (output, True)}


@pytest.mark.parametrize(
    ("payload", "limit"),
    [
        ({}, 256),
        ({"max_tokens": None}, 256),
        ({"max_tokens": "many"}, 256),
        ({"max_tokens": 8.7}, 8),
        ({"max_tokens": 0}, 1),
    ],
)
def test_a_job_without_a_limit_ends_as_early_as_at_original_workers(
    payload: dict[str, Any], limit: int
) -> None:
    service = Service()
    session = service.connect()

    (run,) = service.assign(session, "j1", "LLM_INFER", {"prompt": "hi", **payload})

    assert isinstance(run, RunJob)
    assert isinstance(run.work, Chat)
    assert run.work.max_tokens == limit


def test_receipts_have_the_form_of_original_workers() -> None:
    service = Service()
    session = service.connect()
    service.assign(session, "j1", "TASK", {"task_type": "classify", "input": "x"})
    session.send(AnswerChunk(JobId("j1"), LeaseNumber(1), ['{"a": 1.0}']), 5.0)

    (text,) = sent(session.send(Completed(JobId("j1"), LeaseNumber(1)), 5.25))

    message = json.loads(text)
    assert list(message) == [
        "type", "job_id", "output", "output_hash", "receipt", "receipt_signature",
    ]  # fmt: skip
    receipt = message["receipt"]
    assert receipt["completed_at"] == "2026-02-09T12:00:05.250Z"
    assert receipt["output_hash"] == message["output_hash"]
    assert message["output_hash"].startswith("sha256:")
    assert list(receipt) == sorted(receipt)
    assert '"output":{"a":1},' in str(text)


def test_a_shoal_worker_runs_tasks_of_an_original_coordinator() -> None:
    service = Service()
    session = service.connect()
    payload = {"task_type": "classify", "input": "great"}

    (run,) = service.assign(session, "j1", "TASK", payload)

    assert isinstance(run, RunJob)
    assert run.work == Task("classify", payload)
    service.send(
        session,
        Completed(run.job_id, run.lease, rest=('{ "sentiment": "positive" }',)),
    )
    assert service.coordinator.done == {"j1": ({"sentiment": "positive"}, True)}


@pytest.mark.parametrize(
    ("job_type", "payload"),
    [
        ("LLM_INFER", {}), ("LLM_INFER", "str"), ("LLM_INFER", {"prompt": 5}),
        ("TASK", [1]), ("TASK", {"input": "x"}), ("TASK", None),
        ("OTHER", {"prompt": "x"}), (None, {"prompt": "x"}),
    ],
)  # fmt: skip
def test_an_unsupported_job_is_answered_with_an_error(
    job_type: Any, payload: Any
) -> None:
    service = Service()
    session = service.connect()

    assert service.assign(session, "j1", job_type, payload) == []

    output, verified = service.coordinator.done["j1"]
    assert output["error"].startswith("Unsupported job payload")
    assert verified
    assert service.coordinator.forgotten == []


def test_a_job_of_a_user_that_the_owner_excludes_does_not_hang() -> None:
    member = replace(WORKER, only_for=frozenset({"ada"}))
    service = Service(ProviderDialer("http://127.0.0.1:4010", member))
    session = service.connect()

    assert service.assign(session, "j1", "LLM_INFER", {"prompt": "x"}) == []

    output, verified = service.coordinator.done["j1"]
    assert output == {"error": "this worker accepts the jobs of some users only"}
    assert verified
    assert service.coordinator.forgotten == []


def test_a_failure_is_sent_as_an_output_and_never_as_a_rejection() -> None:
    service = Service()
    session = service.connect()
    assert Rejected not in session.accepts
    (run,) = service.assign(session, "j1", "LLM_INFER", {"prompt": "x"})
    assert isinstance(run, RunJob)

    service.send(session, Failed(run.job_id, run.lease, "too long", Fault.CONTEXT))

    assert service.coordinator.done == {"j1": ({"error": "too long"}, True)}


@pytest.mark.parametrize("text", ["", "no JSON", "{} {}"])
def test_a_task_without_a_json_answer_fails(text: str) -> None:
    service = Service()
    session = service.connect()
    (run,) = service.assign(session, "j1", "TASK", {"task_type": "classify"})
    assert isinstance(run, RunJob)

    service.send(session, Completed(run.job_id, run.lease, rest=(text,)))

    error = {"error": "the answer of the task is not JSON"}
    assert service.coordinator.done == {"j1": (error, True)}


def test_concurrent_jobs_are_all_answered() -> None:
    service = Service()
    session = service.connect()
    runs = [
        service.assign(session, f"j{n}", "LLM_INFER", {"prompt": str(n)})[0]
        for n in range(3)
    ]

    for run in reversed(runs):
        assert isinstance(run, RunJob)
        service.send(session, Completed(run.job_id, run.lease, rest=(run.job_id,)))

    done = service.coordinator.done
    assert {name: done[name][0]["text"] for name in done} == {
        f"j{n}": f"j{n}" for n in range(3)
    }


def test_a_duplicate_job_runs_once() -> None:
    service = Service()
    session = service.connect()
    service.assign(session, "j1", "LLM_INFER", {"prompt": "x"})

    text = service.coordinator.assign("j1", "LLM_INFER", {"prompt": "x"})
    outputs = session.receive([text], 5.0)

    assert [type(each) for each in outputs] == [Notice]


def test_heartbeats_have_the_latest_metrics() -> None:
    service = Service()
    session = service.connect()
    service.hear(session, session.tick(15.0), 15.0)
    service.send(session, HealthReported(MachineHealth(12.5, 50.0, 1)))
    service.hear(session, session.tick(30.0), 30.0)
    service.send(session, HealthReported(MachineHealth(cpu=1.0)))

    assert service.coordinator.beats == [
        None,
        {"cpu_pct": 12.5, "mem_pct": 50.0, "active_jobs": 1},
        {"cpu_pct": 12.5, "mem_pct": 50.0, "active_jobs": 1},
        {"cpu_pct": 1.0},
    ]


def test_an_original_coordinator_receives_the_text_of_an_answer_alone() -> None:
    service = Service()
    session = service.connect()
    (run,) = service.assign(session, "j1", "LLM_INFER", {"prompt": "x"})
    assert isinstance(run, RunJob)
    thoughts = Delta(0, {"reasoning_content": "hm"})

    service.send(
        session,
        AnswerChunk(run.job_id, run.lease, [thoughts, "text"]),
        Completed(run.job_id, run.lease),
    )

    output = {"text": "text", "model": MEMBER.model.name}
    assert service.coordinator.done == {"j1": (output, True)}


def test_unknown_messages_are_ignored() -> None:
    session = Service().connect()

    for text in (
        '{"type":"payment_posted","job_ids":[]}',
        '{"type":"job_cancel","job_id":"x"}',
        '{"type":5}',
        '{"type":"register_ack","status":"error"}',  # it has been acknowledged
        '{"type":"heartbeat_ack"}',
    ):
        assert list(session.receive([text], 5.0)) == []


@pytest.mark.parametrize(
    "data",
    ["", "null", "[]", "5", "{", b"\xff", '{"type":"job_assign"}',
     '{"type":"job_assign","job_id":5}', '{"type":"error","message":"\\u001b[31m"}',
     '{"type":"job_assign","job_id":"' + "x" * 300 + '"}', "[" * 100_000],
)  # fmt: skip
def test_an_invalid_message_is_logged_and_the_worker_stays_connected(
    data: str | bytes,
) -> None:
    session = Service().connect()

    (notice,) = session.receive([data], 5.0)

    assert isinstance(notice, Notice)
    assert notice.text.isascii()
    assert notice.text.isprintable()


def test_a_payload_nested_too_deeply_is_refused() -> None:
    service = Service()
    session = service.connect()
    deep: Any = []
    for _ in range(200):
        deep = [deep]

    assert service.assign(session, "j1", "TASK", {"task_type": "x", "a": deep}) == []
    assert service.coordinator.done["j1"][0]["error"].endswith("nested too deeply")


# Connections that come and go.


def test_answers_finished_while_disconnected_are_sent_after_registering() -> None:
    service = Service()
    first = service.connect()
    (run,) = service.assign(first, "j1", "LLM_INFER", {"prompt": "x"})
    assert isinstance(run, RunJob)
    first.send(AnswerChunk(run.job_id, run.lease, ["one "]), 5.0)

    second = service.dialer.start_session({})
    opening = sent(second.tick(20.0))
    assert list(second.send(AnswerChunk(run.job_id, run.lease, ["two"]), 20.0)) == []
    assert list(second.send(Completed(run.job_id, run.lease), 20.0)) == []
    assert len(opening) == 1
    acknowledged = service.coordinator.receive(str(opening[0]))
    service.hear(second, second.receive([*acknowledged], 20.0))

    output, verified = service.coordinator.done["j1"]
    assert output["text"] == "one two"
    assert verified


def test_unsent_answers_survive_a_connection_that_fails_before_it_registers() -> None:
    service = Service()
    first = service.connect()
    (run,) = service.assign(first, "j1", "LLM_INFER", {"prompt": "x"})
    assert isinstance(run, RunJob)
    broken = service.dialer.start_session({})
    broken.tick(20.0)
    broken.send(Completed(run.job_id, run.lease, rest=("text",)), 20.0)

    service.connect()

    assert service.coordinator.done["j1"][0]["text"] == "text"


def test_unsent_answers_are_limited() -> None:
    service = Service()
    first = service.connect()
    for number in range(100):
        service.assign(first, f"j{number}", "LLM_INFER", {"prompt": "x"})
    away = service.dialer.start_session({})
    away.tick(20.0)
    for number in range(100):
        away.send(Completed(JobId(f"j{number}"), LeaseNumber(1), rest=("text",)), 20.0)

    service.connect()

    assert list(service.coordinator.done) == [f"j{number}" for number in range(36, 100)]


def test_a_job_continues_across_connections_to_an_original_coordinator() -> None:
    service = Service()
    first = service.connect()
    (run,) = service.assign(first, "j1", "LLM_INFER", {"prompt": "x"})
    assert isinstance(run, RunJob)

    second = service.connect()
    service.send(second, Completed(run.job_id, run.lease, rest=("text",)))

    assert service.coordinator.done["j1"][0]["text"] == "text"


def test_a_coordinator_that_does_not_answer_is_disconnected() -> None:
    session = Service().dialer.start_session({})
    session.tick(0.0)

    assert session.deadline == 10.0
    (close,) = session.tick(10.0)

    assert isinstance(close, Close)
    assert "register_ack" in close.reason
    assert session.deadline is None


def test_a_refusal_is_final() -> None:
    service = Service()
    session = service.dialer.start_session({})
    session.tick(0.0)
    assert service.dialer.final_reason(1006, "") is None

    text = '{"type":"register_ack","status":"error","error":"no \\u001b entry"}'
    (close,) = session.receive([text], 1.0)

    assert isinstance(close, Close)
    final = service.dialer.final_reason(close.code, close.text)
    assert final == "the coordinator refuses this worker: no \\x1b entry"
