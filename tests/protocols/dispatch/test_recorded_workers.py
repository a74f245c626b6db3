"""The coordinator's end against what real workers, and others, sent to a real one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from protocols.dispatch.recorded import (
    CASES,
    KEY,
    NOW,
    SIGNERS,
    Case,
    accept,
    summary,
)
from protocols.each_case import in_each_case
from protocols.session_pair import messages_in, sent
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import JobTerms, Policy, Privacy
from shoal.domain.receipts import Verdict
from shoal.domain.vocabulary import (
    Completed,
    Event,
    Joined,
    ReceiptSent,
    Rejected,
    RunJob,
)
from shoal.domain.work import Chat, Task, Work
from shoal.ledger.worker_receipts import verify
from shoal.protocols.dispatch.ecmascript_json import stringify
from shoal.protocols.seam.session import CoordinatorEnd, Data, Output

# What we say where the original says something else, or dies; the rest is the same.
DIFFERENT: dict[str, tuple[str, list[str]]] = {
    "ws-path-ignored": (
        "a heartbeat counts for the connection that it comes on",
        ["register_ack ok", "error NOT_REGISTERED"],
    ),
    "ws-heartbeat-unregistered": (
        "its key is none, and who is not registered is told that, too",
        ["error INVALID_MESSAGE"],
    ),
    "ws-register-bad-type": (
        "a field that is no good is named",
        ["register_ack error"],
    ),
    "poison-worker-no-capabilities": (
        "a worker that can do nothing is not let in",
        ["register_ack error"],
    ),
    "rest-dashboard-injection": ("that is no key", ["register_ack error"]),
    "crash-null": ("the original dies", ["error INVALID_MESSAGE"]),
    "crash-register-no-key": ("the original dies", ["register_ack error"]),
    "crash-register-num-key": ("the original dies", ["register_ack error"]),
    "crash-complete-null-id": (
        "the original dies",
        ["register_ack ok", "error INVALID_MESSAGE"],
    ),
    "crash-reject-null-id": (
        "the original dies",
        ["register_ack ok", "error INVALID_MESSAGE"],
    ),
    "crash-receipt-unknown-job": ("the original dies", ["error NOT_REGISTERED"]),
    "crash-receipt-missing": ("the original dies", ["error INVALID_MESSAGE"]),
    "crash-receipt-empty": ("the original dies", ["error INVALID_MESSAGE"]),
    "life-output-hash-ignored": (
        "a hash of something else is worth a word",
        ["register_ack ok", "job_assign", "error INVALID_MESSAGE"],
    ),
    "life-output-swapped": (
        "a hash of something else is worth a word",
        ["register_ack ok", "job_assign", "error INVALID_MESSAGE"],
    ),
    "life-forged-completion": (
        "only who has a job can end it",
        ["register_ack ok", "job_assign", "error NOT_REGISTERED"],
    ),
    "life-forged-reject": (
        "only who has a job can end it",
        ["register_ack ok", "job_assign", "error NOT_REGISTERED"],
    ),
    "life-duplicate-complete": (
        "only who has a job can end it",
        ["register_ack ok", "job_assign", "error NOT_YOUR_JOB"],
    ),
    "life-receipt-squat": (
        "receipts are taken from workers",
        ["register_ack ok", "job_assign", "error NOT_REGISTERED"],
    ),
    "life-complete-no-output": (
        "an answer without an output is none",
        ["register_ack ok", "job_assign", "error INVALID_MESSAGE"],
    ),
}

# The gateway refuses a misspelt class, so that there is no such job.
NEVER_GIVEN = {"life-private-lowercase"}

# What comes of the receipt that came with the answer, or after it.
VERDICTS = {
    "life-complete": Verdict.VALID,
    "life-complete-fast-llm": Verdict.VALID,
    "life-duplicate-complete": Verdict.VALID,
    "life-late-worker": Verdict.VALID,
    "life-busy-second-job": Verdict.VALID,
    "life-output-hash-ignored": Verdict.VALID,
    "life-bad-signature": Verdict.BAD_SIGNATURE,
    "life-receipt-tampered": Verdict.WRONG_OUTPUT,
    "life-output-swapped": Verdict.WRONG_OUTPUT,
    "life-foreign-key": Verdict.WRONG_WORKER,
    "life-complete-crash-unknown-receipt-job": Verdict.WRONG_JOB,
    "life-receipt-submit": Verdict.WRONG_OUTPUT,
}

ON_THE_SOCKET = {
    name: case
    for name, case in CASES.items()
    if case["kind"] == "live" and any("open" in step for step in case["transcript"])
}
every_case = in_each_case(ON_THE_SOCKET)


@dataclass
class Replay:
    """One recorded exchange, on sessions of ours."""

    case: Case
    sessions: dict[str, CoordinatorEnd] = field(default_factory=dict)
    jobs: dict[str, RunJob] = field(default_factory=dict)
    heard: list[Event] = field(default_factory=list)
    replies: list[tuple[str, str]] = field(default_factory=list)  # with the recipient
    recorded: list[tuple[str, str]] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)  # as sent, by placeholder
    workers: dict[str, int] = field(default_factory=dict)  # their ids, as they came

    def run(self) -> None:
        for step in self.case["transcript"]:
            if "open" in step:
                session = accept(path=step["path"]).session
                self.take(step["open"], session.tick(NOW))
                self.sessions[step["open"]] = session
            elif "http" in step:
                self.commit(step)
            elif (text := self.text_of(step)) is not None:
                name, data = text
                self.take(name, self.sessions[name].receive([data], NOW))
            for name, texts in step.get("received", {}).items():
                self.recorded += [(name, text) for text in texts]
                for text in texts:
                    self.give(name, text)

    def text_of(self, step: Case) -> tuple[str, Data] | None:
        """Return what is sent in a step, and by whom."""
        for kind in ("complete", "submit"):
            if kind in step:
                return step[kind]["conn"], self.filled(step["concrete"], step[kind])
        if "send" in step:
            data = step["send"]
            for placeholder, name in self.ids.items():
                data = data.replace(placeholder, name)
            return step["conn"], data
        if "send_binary_utf8" in step:
            return step["conn"], step["send_binary_utf8"].encode()
        return None

    def filled(self, concrete: str, about: dict[str, Any]) -> str:
        assert self.ids[about["job"]] in concrete
        return concrete

    def commit(self, step: Case) -> None:
        """Note the job that a client has committed."""
        if not step["http"]["path"].startswith("/v1/jobs/commit/"):
            return
        given = json.loads(step["http"]["body"])
        placeholder = (
            json.loads(step["response"]["body"]).get("job_id")
            if (step["response"]["status"] in (201, 422))
            else None
        )
        if placeholder is None or given.get("privacy_class") == "private":
            return
        payload = given["payload"]
        tier = step["http"]["path"].rpartition("/")[2]
        terms = JobTerms(
            policy=Policy[tier.upper()],
            privacy=Privacy[given.get("privacy_class", "PUBLIC")],
            user=given["user_id"],
            form=stringify(payload).decode(),
        )
        name = self.concrete(placeholder)
        self.ids[placeholder] = name
        work: Work = Task(payload.get("task_type", ""), payload)
        if given["job_type"] == "LLM_INFER":
            question = {"role": "user", "content": payload["prompt"]}
            work = Chat("dispatch", (question,), payload["max_tokens"])
        self.jobs[name] = RunJob(JobId(name), LeaseNumber(1), work, terms=terms)

    def concrete(self, placeholder: str) -> str:
        """Return the id that was signed, if any was."""
        for step in self.case["transcript"]:
            for kind in ("complete", "submit"):
                if kind in step and step[kind]["job"] == placeholder:
                    job_id: str = (
                        json.loads(step["concrete"]).get("job_id")
                        or (json.loads(step["concrete"])["receipt"]["job_id"])
                    )
                    return job_id
        return placeholder.strip("{}")

    def give(self, name: str, text: str) -> None:
        """Give the job that the original gave to somebody then."""
        if '"job_assign"' not in text:
            return
        job = self.jobs.get(self.ids.get(json.loads(text)["job_id"], ""))
        if job is not None and any(isinstance(each, Joined) for each in self.heard):
            self.take(name, self.sessions[name].send(job, NOW))

    def take(self, name: str, outputs: Sequence[Event | Output]) -> None:
        self.heard += messages_in(outputs)
        for data in sent(outputs):
            text = str(data)
            for placeholder, id_ in self.ids.items():
                text = text.replace(id_, placeholder)
            said = json.loads(text)
            if "worker_id" in said:
                workers = self.workers
                number = workers.setdefault(said["worker_id"], len(workers))
                text = text.replace(said["worker_id"], f"{{{{worker{number}}}}}")
            self.replies.append((name, text))


@every_case
def test_real_workers_receive_what_the_original_sent_them(case: Case) -> None:
    replay = Replay(case)

    replay.run()

    if case["id"] in ("ws-double-register", "ghost-worker-job"):
        # The same worker registers twice: it has one place, and one id.
        said = [text.replace("worker0", "worker1") for _, text in replay.replies]
        assert said[1:] == [text for _, text in replay.recorded][1:][: len(said) - 1]
    elif case["id"] in DIFFERENT:
        _, expected = DIFFERENT[case["id"]]
        assert [summary(text) for _, text in replay.replies] == expected
    elif case["id"] in NEVER_GIVEN:
        assert not replay.jobs
    else:
        assert replay.replies == replay.recorded


@every_case
def test_invalid_messages_do_not_disconnect_a_worker(case: Case) -> None:
    replay = Replay(case)
    replay.run()

    for name, session in replay.sessions.items():
        text = f'{{"type":"heartbeat","provider_pubkey":"{KEY}"}}'
        (answer,) = sent(session.receive([text], NOW))
        assert summary(answer) in ("heartbeat_ack ok", "error NOT_REGISTERED"), name
        assert session.deadline is not None


@pytest.mark.parametrize(("name", "verdict"), VERDICTS.items(), ids=str)
def test_receipts_are_passed_on_as_signed(name: str, verdict: Verdict) -> None:
    replay = Replay(CASES[name])
    replay.run()

    ends = [each for each in replay.heard if isinstance(each, Completed)]
    end = ends[0]
    receipt = end.receipt
    if receipt is None:
        (presented,) = [each for each in replay.heard if isinstance(each, ReceiptSent)]
        assert presented.job_id == end.job_id
        receipt = presented.receipt
    output = end.output or str(end.rest[0])
    found = verify(
        receipt,
        job_id=end.job_id,
        public_key=SIGNERS["A"].public_key,
        output_json=output.encode(),
    )
    assert found is verdict


@pytest.mark.parametrize("name", ["life-no-receipt", "life-no-signature"])
def test_a_receipt_without_its_signature_is_none(name: str) -> None:
    replay = Replay(CASES[name])
    replay.run()

    (end,) = [each for each in replay.heard if isinstance(each, Completed)]
    assert end.receipt is None
    assert end.rest == ('{"sentiment":"positive","confidence":0.5}',)


def test_a_second_completion_is_a_late_result() -> None:
    replay = Replay(CASES["life-duplicate-complete"])
    replay.run()

    first, second = [each for each in replay.heard if isinstance(each, Completed)]
    assert first.lease == LeaseNumber(1)
    assert second == Completed(first.job_id, LeaseNumber(0))


def test_a_job_is_requeued_if_its_answer_has_no_output() -> None:
    replay = Replay(CASES["life-complete-no-output"])
    replay.run()

    (rejected,) = [each for each in replay.heard if isinstance(each, Rejected)]
    assert rejected.reason == "job_complete: output is missing"


def test_a_rejected_job_is_requeued() -> None:
    replay = Replay(CASES["life-reject"])
    replay.run()

    (rejected,) = [each for each in replay.heard if isinstance(each, Rejected)]
    assert rejected.reason == "Ollama not available"


@pytest.mark.parametrize("name", ["life-forged-completion", "life-forged-reject"])
def test_forged_messages_are_refused(name: str) -> None:
    replay = Replay(CASES[name])
    replay.run()

    assert [type(each) for each in replay.heard] == [Joined]


def test_a_worker_that_only_names_a_trusted_key_is_not_trusted() -> None:
    replay = Replay(CASES["life-impersonated-trust"])
    replay.run()

    (joined,) = [each for each in replay.heard if isinstance(each, Joined)]
    assert joined.offer.public_key == KEY
    assert not joined.offer.proven


def test_a_silent_worker_is_disconnected_sooner_than_by_the_original() -> None:
    case = CASES["timed-prune"]
    replay = Replay(CASES["ws-register"])
    replay.run()
    session = replay.sessions["w1"]

    assert session.deadline == NOW + 30.0
    assert session.deadline - NOW < case["closed_after_s"]


def test_of_two_connections_with_one_key_the_newer_is_the_worker() -> None:
    # The recording of it is timed: the original gives up the one that is alive.
    assert CASES["timed-same-key-reconnect"]["pruned_socket"] == "second (live one)"
    replay, other = Replay(CASES["ws-register"]), Replay(CASES["ws-register"])
    replay.run()
    other.run()

    (one,), (two,) = (messages_in(each.heard) for each in (replay, other))
    assert isinstance(one, Joined)
    assert isinstance(two, Joined)
    assert one.name == two.name  # the hub lets the newer replace the older
