"""Encodes jobs, outcomes and facts as JSON for the store, and calls as MessagePack."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from shoal.domain.errors import NotFound
from shoal.domain.facts import (
    FACT_NAMES,
    Fact,
    JobCompleted,
    JobSubmitted,
    ReceiptPresented,
    WorkerMarked,
)
from shoal.domain.job import DEFAULT_TERMS, Job, JobTerms, TimeLimits
from shoal.domain.job_kinds import WORK_TYPES
from shoal.domain.outcome import Choice, Outcome, Usage
from shoal.domain.receipts import Verdict
from shoal.domain.work import Call, Feature, JobKind, JsonWork, Work
from shoal.store.blobs import BlobStore

FACT_TYPES: Mapping[str, type[Fact]] = {
    name: type_ for type_, name in FACT_NAMES.items()
}


LARGE_FROM = 64 << 10  # bytes; values of this size go to the blob store


class StoredCall(msgspec.Struct, frozen=True, array_like=True):
    """A call; ``apart`` marks arguments replaced by their digest."""

    name: str
    args: bytes
    kwargs: bytes
    timeout: float | None
    needs: list[str]
    blobs: list[bytes]
    args_apart: bool
    kwargs_apart: bool
    python: str = ""


class StoredResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The metadata of a returned value."""

    blobs: list[bytes] = []  # msgspec copies it
    apart: bool = False


_calls = msgspec.msgpack.Decoder(StoredCall)
_ends = msgspec.json.Decoder(StoredResult)


def encode_work(work: JsonWork) -> str:
    return msgspec.json.encode(work).decode()


def encode_call(call: Call, blobs: BlobStore) -> tuple[bytes, tuple[bytes, ...]]:
    """Encode a call; return it, and the digests of its arguments in the blob store.

    Raises StoreError.
    """
    args, args_apart = _store_large(call.args, blobs)
    kwargs, kwargs_apart = _store_large(call.kwargs, blobs)
    stored = StoredCall(
        call.name,
        args,
        kwargs,
        call.timeout,
        [feature.value for feature in call.needs],
        list(call.blobs),
        args_apart,
        kwargs_apart,
        call.python,
    )
    parts = ((args, args_apart), (kwargs, kwargs_apart))
    apart = tuple(digest for digest, is_apart in parts if is_apart)
    return msgspec.msgpack.encode(stored), apart


def decode_call(data: bytes, blobs: BlobStore) -> Call:
    """Decode a call.  Arguments that the blob store evicted are empty."""
    stored = _calls.decode(data)
    return Call(
        stored.name,
        _load_large(stored.args, stored.args_apart, blobs),
        _load_large(stored.kwargs, stored.kwargs_apart, blobs),
        stored.timeout,
        frozenset(map(Feature, stored.needs)),
        tuple(stored.blobs),
        stored.python,
    )


def large_values_of(data: bytes) -> tuple[bytes, ...]:
    """Return the digests of a call's arguments in the blob store."""
    stored = _calls.decode(data)
    parts = (stored.args, stored.args_apart), (stored.kwargs, stored.kwargs_apart)
    return tuple(digest for digest, apart in parts if apart)


def decode_work(kind: str, text: str) -> Work:
    fields: dict[str, Any] = msgspec.json.decode(text)
    for name in ("messages", "inputs"):
        if name in fields:
            fields[name] = tuple(fields[name])
    work: Work = WORK_TYPES[JobKind(kind)](**fields)
    return work


@lru_cache(256)  # most jobs have the same limits
def encode_limits(limits: TimeLimits) -> str:
    return msgspec.json.encode(limits).decode()


def decode_limits(text: str) -> TimeLimits:
    return msgspec.json.decode(text, type=TimeLimits)


def encode_outcome(outcome: Outcome, blobs: BlobStore) -> tuple[str, bytes | None]:
    """Encode an outcome, and separately the value that a call returned, if any."""
    if not outcome.value:
        return msgspec.json.encode(outcome).decode(), None
    value, apart = _store_large(outcome.value, blobs)
    end = StoredResult(list(outcome.blobs), apart)
    return msgspec.json.encode(end).decode(), value


def decode_outcome(text: str, value: bytes | None = None) -> Outcome:
    """Decode an outcome.

    A value in the blob store is left there: its digest is the first of ``blobs``, and
    ``value`` is empty.
    """
    if value is not None:
        end = _ends.decode(text)
        if end.apart:
            return Outcome("", blobs=(value, *end.blobs))
        return Outcome("", value=value, blobs=tuple(end.blobs))
    fields = msgspec.json.decode(text)
    usage = fields["usage"]
    return Outcome(
        fields["text"],
        fields["finish_reason"],
        None if usage is None else Usage(**usage),
        tuple(Choice(**choice) for choice in fields.get("choices", ())),
        fields.get("output", ""),
    )


def encode_terms(terms: JobTerms) -> str:
    return _PLAIN_TERMS if terms == DEFAULT_TERMS else _encode_terms(terms)


def _encode_terms(terms: JobTerms) -> str:
    return msgspec.json.encode(terms).decode()


_PLAIN_TERMS = _encode_terms(DEFAULT_TERMS)


def decode_terms(text: str) -> JobTerms:
    return msgspec.json.decode(text, type=JobTerms)


def encode_fact(fact: Fact) -> str:
    """Encode a fact without prompts and answers, which the job's row holds."""
    match fact:
        case JobSubmitted(job):
            return msgspec.json.encode({"job_id": job.id}).decode()
        case JobCompleted(job_id, lease, _, verdict, output_hash):
            fields: dict[str, object] = {
                "job_id": job_id,
                "lease": lease,
                "verdict": verdict.name,
            }
            if output_hash:
                fields["output_hash"] = output_hash
            return msgspec.json.encode(fields).decode()
        case ReceiptPresented(job_id, worker_id, verdict):
            fields = {"job_id": job_id, "worker_id": worker_id, "verdict": verdict}
            return msgspec.json.encode(fields).decode()
        case _:
            return msgspec.json.encode(fact).decode()


def decode_marked(text: str) -> WorkerMarked:
    return msgspec.json.decode(text, type=WorkerMarked)


def decode_fact(name: str, text: str, job: Job, outcome: Outcome | None) -> Fact:
    """Decode a fact, and add the job it is about and its outcome."""
    type_ = FACT_TYPES[name]
    if type_ is JobSubmitted:
        return JobSubmitted(job)
    if type_ is JobCompleted:
        fields = msgspec.json.decode(text)
        verdict = Verdict[fields.get("verdict", Verdict.UNSIGNED.name)]
        return JobCompleted(
            job.id,
            fields["lease"],
            outcome or Outcome(""),
            verdict,
            fields.get("output_hash", ""),
        )
    fact: Fact = msgspec.json.decode(text, type=type_)
    return fact


def _store_large(data: bytes, blobs: BlobStore) -> tuple[bytes, bool]:
    return (data, False) if len(data) < LARGE_FROM else (blobs.keep(data), True)


def _load_large(data: bytes, apart: bool, blobs: BlobStore) -> bytes:
    if not apart:
        return data
    try:
        return bytes(blobs.read(data))
    except NotFound:
        return b""
