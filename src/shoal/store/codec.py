"""Jobs, outcomes and facts as the JSON that a database keeps."""

from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from shoal.domain.facts import (
    AccountFact,
    CameLate,
    Fact,
    JobCompleted,
    JobFact,
    JobSubmitted,
    ReceiptPresented,
    WorkerFact,
    WorkerMarked,
)
from shoal.domain.outcome import Choice, Outcome, Usage
from shoal.domain.receipts import Verdict
from shoal.domain.work import WORKS, Job, Kind, Limits, Terms, Work

FACTS: Mapping[str, type[Fact]] = {
    fact.__name__: fact
    for fact in (
        *get_args(JobFact),
        *get_args(WorkerFact),
        *get_args(AccountFact),
        CameLate,
        ReceiptPresented,
    )
}


def encode_work(work: Work) -> str:
    return msgspec.json.encode(work).decode()


def decode_work(kind: str, text: str) -> Work:
    fields: dict[str, Any] = msgspec.json.decode(text)
    for name in ("messages", "inputs"):
        if name in fields:
            fields[name] = tuple(fields[name])
    work: Work = WORKS[Kind(kind)](**fields)
    return work


def encode_limits(limits: Limits) -> str:
    return msgspec.json.encode(limits).decode()


def decode_limits(text: str) -> Limits:
    return msgspec.json.decode(text, type=Limits)


def encode_outcome(outcome: Outcome) -> str:
    return msgspec.json.encode(outcome).decode()


def decode_outcome(text: str) -> Outcome:
    fields = msgspec.json.decode(text)
    usage = fields["usage"]
    return Outcome(
        fields["text"],
        fields["finish_reason"],
        None if usage is None else Usage(**usage),
        tuple(Choice(**choice) for choice in fields.get("choices", ())),
        fields.get("output", ""),
    )


def encode_terms(terms: Terms) -> str:
    return msgspec.json.encode(terms).decode()


def decode_terms(text: str) -> Terms:
    return msgspec.json.decode(text, type=Terms)


def encode_fact(fact: Fact) -> str:
    """Encode a fact without prompts and answers, which stand with the job."""
    match fact:
        case JobSubmitted(job):
            return msgspec.json.encode({"job_id": job.id}).decode()
        case JobCompleted(job_id, lease, _, verdict):
            fields = {"job_id": job_id, "lease": lease, "verdict": verdict.name}
            return msgspec.json.encode(fields).decode()
        case _:
            return msgspec.json.encode(fact).decode()


def decode_marked(text: str) -> WorkerMarked:
    return msgspec.json.decode(text, type=WorkerMarked)


def decode_fact(name: str, text: str, job: Job, outcome: Outcome | None) -> Fact:
    """Put a fact together again with the job it is about, and its outcome."""
    type_ = FACTS[name]
    if type_ is JobSubmitted:
        return JobSubmitted(job)
    if type_ is JobCompleted:
        fields = msgspec.json.decode(text)
        verdict = Verdict[fields.get("verdict", Verdict.UNSIGNED.name)]
        return JobCompleted(job.id, fields["lease"], outcome or Outcome(""), verdict)
    fact: Fact = msgspec.json.decode(text, type=type_)
    return fact
