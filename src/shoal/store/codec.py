"""Encodes jobs, outcomes and facts as JSON for the store, and calls as MessagePack.

Long texts are packed.

An update of a row rewrites all of it, and a job is updated several times.  So a row
holds a head instead of a large work, which is split into parts: a byte that names the
format, and JSON.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypedDict

import msgspec
from msgspec import structs

from shoal.domain import facts
from shoal.domain.credentials import tokens_to_read
from shoal.domain.errors import NotFound, StoreError
from shoal.domain.facts import FACT_NAMES, Fact
from shoal.domain.job import DEFAULT_TERMS, Job, JobTerms, TimeLimits
from shoal.domain.job_kinds import WORK_TYPES
from shoal.domain.json_limits import characters_in
from shoal.domain.outcome import AnswerSpan, Choice, Outcome, Usage
from shoal.domain.receipts import Verdict
from shoal.domain.work import (
    Call,
    Feature,
    JobKind,
    JsonWork,
    ModelAction,
    Work,
    values_of,
)
from shoal.domain.worker import LoadableModel, ModelLibrary, Offer
from shoal.store.blobs import BlobStore
from shoal.store.packing import pack, unpack
from shoal.store.port import RecordedFact

FACT_TYPES: Mapping[str, type[Fact]] = {
    name: type_ for type_, name in FACT_NAMES.items()
}


LARGE_FROM = 64 << 10  # bytes; values of this size go to the blob store


HEAD = b"\x02"
PART_SIZE = 256 << 10  # bytes of a part, before it is compressed


class LongTexts(TypedDict, total=False):
    """The texts of a job's terms that are stored with its work, and not listed."""

    form: str
    api_fields: str


class StoredWork(msgspec.Struct, frozen=True):
    """The texts of a request: its work as JSON, and the long texts of its terms."""

    work: dict[str, Any] | None = None
    form: str = ""
    api_fields: str = ""


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
    exact: bool = False


class StoredResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The metadata of a returned value."""

    blobs: list[bytes] = []  # msgspec copies it
    apart: bool = False


_LIMITS = {each.name: each.default for each in structs.fields(TimeLimits)}
_SHORT_TERMS = {
    each.name: each.default
    for each in structs.fields(JobTerms)
    if each.name not in LongTexts.__annotations__
}
_VERDICTS = {each: each.name for each in Verdict}
_USAGE_FIELDS = Usage.__struct_fields__
_works = msgspec.json.Decoder(StoredWork)
_line = msgspec.json.Decoder(tuple[float, str, dict[str, Any]])
_calls = msgspec.msgpack.Decoder(StoredCall)
_ends = msgspec.json.Decoder(StoredResult)


def encode_work(work: JsonWork | None, terms: JobTerms = DEFAULT_TERMS) -> bytes | None:
    """Encode work other than calls, and the long texts of its terms; None: neither."""
    texts = _long_texts(terms)
    if work is None and not texts:
        return None
    return msgspec.json.encode({"work": work, **texts})


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
        call.exact,
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
        stored.exact,
    )


def large_data_in(batch: Iterable[RecordedFact]) -> list[bytes]:
    """Return what goes to the blob store with facts."""
    values: list[bytes] = []
    for each in batch:
        fact = each.fact
        if isinstance(fact, facts.JobCompleted):
            values.append(fact.outcome.value)
        elif isinstance(fact, facts.JobSubmitted) and isinstance(fact.job.work, Call):
            values += (fact.job.work.args, fact.job.work.kwargs)
    return [each for each in values if len(each) >= LARGE_FROM]


def large_values_of(data: bytes) -> tuple[bytes, ...]:
    """Return the digests of a call's arguments in the blob store."""
    stored = _calls.decode(data)
    parts = (stored.args, stored.args_apart), (stored.kwargs, stored.kwargs_apart)
    return tuple(digest for digest, apart in parts if apart)


def decode_work(kind: str, stored: bytes | None) -> tuple[Work | None, LongTexts]:
    """Decode what ``encode_work`` encoded, which may be packed.

    The texts are those that are not empty.
    """
    read = StoredWork() if stored is None else _works.decode(unpack(stored))
    texts = _long_texts(read)
    if (found := read.work) is None:
        return None, texts
    for name in ("messages", "inputs"):
        if name in found:
            found[name] = tuple(found[name])
    if "action" in found and kind == JobKind.MODEL.value:
        found["action"] = ModelAction(found["action"])
    work: Work = WORK_TYPES[JobKind(kind)](**found)
    return work, texts


@lru_cache(256)  # most jobs have the same limits
def encode_limits(limits: TimeLimits) -> str:
    return _encode_differences(limits, _LIMITS)


def decode_limits(text: str) -> TimeLimits:
    return msgspec.json.decode(text, type=TimeLimits)


def encode_outcome(outcome: Outcome, blobs: BlobStore) -> tuple[bytes, bytes | None]:
    """Encode an outcome, and separately the value that a call returned, if any."""
    if not outcome.value:
        return pack(msgspec.json.encode(_plain(outcome))), None
    value, apart = _store_large(outcome.value, blobs)
    return msgspec.json.encode(StoredResult(list(outcome.blobs), apart)), value


def decode_outcome(stored: bytes, value: bytes | None = None) -> Outcome:
    """Decode an outcome.

    A value in the blob store is left there: its digest is the first of ``blobs``, and
    ``value`` is empty.
    """
    text = unpack(stored)
    if value is not None:
        end = _ends.decode(text)
        if end.apart:
            return Outcome("", blobs=(value, *end.blobs))
        return Outcome("", value=value, blobs=tuple(end.blobs))
    found = msgspec.json.decode(text)
    usage = found["usage"]
    return Outcome(
        found["text"],
        found["finish_reason"],
        None if usage is None else Usage(**usage),
        tuple(map(_choice, found.get("choices", ()))),
        found.get("output", ""),
    )


def _plain(outcome: Outcome) -> dict[str, Any]:
    """Return the fields of an outcome; of its usage those that are known."""
    found = structs.asdict(outcome)
    if outcome.usage is not None:
        found["usage"] = {
            name: count
            for name in _USAGE_FIELDS
            if (count := getattr(outcome.usage, name)) is not None
        }
    return found


def _choice(found: dict[str, Any]) -> Choice:
    order = tuple(AnswerSpan(*span) for span in found.pop("order", ()))
    return Choice(**found, order=order)


def encode_terms(terms: JobTerms) -> str:
    """Encode terms without their long texts, which are stored with the work."""
    return _encode_differences(terms, _SHORT_TERMS)


def decode_terms(text: str) -> JobTerms:
    return msgspec.json.decode(text, type=JobTerms)


def encode_fact(fact: Fact) -> str:
    """Encode a fact for a row of its own."""
    return msgspec.json.encode(_fields_of(fact)).decode()


def encode_history(recorded: Sequence[RecordedFact]) -> bytes:
    """Encode facts about a job for its row, one a line; lines can be appended."""
    lines = bytearray()
    for each in recorded:
        found: dict[str, Any] = msgspec.to_builtins(_fields_of(each.fact))
        del found["job_id"]  # it is the row's
        lines += msgspec.json.encode((each.at, FACT_NAMES[type(each.fact)], found))
        lines += b"\n"
    return bytes(lines)


def decode_history(
    lines: bytes, job: Job, outcome: Outcome | None
) -> list[RecordedFact]:
    """Decode facts about a job, and add the job and its outcome.

    An end that says when the first output came stands for two facts.
    """
    found: list[RecordedFact] = []
    for at, name, fields_ in map(_line.decode, lines.splitlines()):
        if (first := fields_.pop("first_output", 0.0)) and "lease" in fields_:
            began = facts.JobStarted(job.id, fields_["lease"])
            found.append(RecordedFact(first, began))
        found.append(RecordedFact(at, _decode_fields(name, fields_, job, outcome)))
    return found


def decode_marked(text: str) -> facts.WorkerMarked:
    return msgspec.json.decode(text, type=facts.WorkerMarked)


def decode_joined(text: str) -> facts.WorkerJoined:
    return msgspec.json.decode(text, type=facts.WorkerJoined)


def decode_worker_fact(name: str, text: str) -> Fact:
    """Decode a fact that is about no job."""
    fact: Fact = msgspec.json.decode(text, type=FACT_TYPES[name])
    return fact


def decode_fact(name: str, text: str, job: Job, outcome: Outcome | None) -> Fact:
    """Decode a fact about a job, and add the job and its outcome."""
    return _decode_fields(name, msgspec.json.decode(text), job, outcome)


def _long_texts(given: JobTerms | StoredWork) -> LongTexts:
    """Return those that are not empty."""
    texts: LongTexts = {}
    if given.form:
        texts["form"] = given.form
    if given.api_fields:
        texts["api_fields"] = given.api_fields
    return texts


def _store_large(data: bytes, blobs: BlobStore) -> tuple[bytes, bool]:
    return (data, False) if len(data) < LARGE_FROM else (blobs.keep(data), True)


def _load_large(data: bytes, apart: bool, blobs: BlobStore) -> bytes:
    if not apart:
        return data
    try:
        return bytes(blobs.read(data))
    except NotFound:
        return b""


def _encode_differences(value: object, defaults: Mapping[str, object]) -> str:
    """Encode the fields that differ.

    To change a default, migrate what is stored without the field.
    """
    differences = {
        name: found
        for name, default in defaults.items()
        if (found := getattr(value, name)) != default
    }
    return msgspec.json.encode(differences).decode()


def _fields_of(fact: Fact) -> object:
    """Return what is stored of a fact: no prompts, answers and hashes of them.

    The job's row has those, and its receipt.
    """
    match fact:
        case facts.JobSubmitted(job):
            return {"job_id": job.id}
        case facts.JobCompleted(job_id, lease, _, verdict):
            end = {"job_id": job_id, "lease": lease, "verdict": _VERDICTS[verdict]}
            first = fact.first_output
            return end | {"first_output": first} if first else end
        case facts.WorkerJoined(offer=Offer(library=ModelLibrary(models=models))):
            # The names: all the rest would be 70 kB for each change of a library.
            library = ModelLibrary(tuple([LoadableModel(each.name) for each in models]))
            return structs.replace(
                fact, offer=structs.replace(fact.offer, library=library)
            )
        case facts.ReceiptPresented(job_id, worker_id, verdict):
            return {"job_id": job_id, "worker_id": worker_id, "verdict": verdict}
        case _:
            return fact


def _decode_fields(
    name: str, found: dict[str, Any], job: Job, outcome: Outcome | None
) -> Fact:
    type_ = FACT_TYPES[name]
    if type_ is facts.JobSubmitted:
        return facts.JobSubmitted(job)
    if type_ is facts.JobCompleted:
        verdict = Verdict[found.get("verdict", Verdict.UNSIGNED.name)]
        return facts.JobCompleted(
            job.id, found["lease"], outcome or Outcome(""), verdict
        )
    fact: Fact = msgspec.convert(found | {"job_id": job.id}, type_)
    return fact


class WorkHead(msgspec.Struct, frozen=True):
    """What a row says of a large work; ``tokens`` is ``tokens_to_read`` of it."""

    parts: int
    tokens: int


class SplitWork(msgspec.Struct, frozen=True):
    """What goes to the row of a job, and the parts that do not, in order."""

    row: bytes | None
    parts: Sequence[bytes] = ()


def is_large(job: Job) -> bool:
    """Say whether a job has so much text that its work may have to be split.

    Takes microseconds.  Arguments of calls have a store of their own.
    """
    values = [job.terms.form, job.terms.api_fields, *values_of(job.work)]
    return characters_in(values, LARGE_FROM) >= LARGE_FROM


def split_work(work: JsonWork | None, terms: JobTerms = DEFAULT_TERMS) -> SplitWork:
    """Encode and compress work that is not a call, and the long texts of its terms.

    Takes tens of milliseconds for the largest.
    """
    text = encode_work(work, terms)
    if text is None:
        return SplitWork(None)
    if len(text) <= PART_SIZE:
        packed = pack(text)
        if len(packed) < LARGE_FROM:
            return SplitWork(packed)
    starts = range(0, len(text), PART_SIZE)
    parts = [pack(text[start : start + PART_SIZE]) for start in starts]
    head = WorkHead(len(parts), 0 if work is None else tokens_to_read(work))
    return SplitWork(HEAD + msgspec.json.encode(head), parts)


def head_of(stored: bytes | None) -> WorkHead | None:
    """Return the head in a row; None if the row has the work itself, or none."""
    if stored is None or not stored.startswith(HEAD):
        return None
    return msgspec.json.decode(memoryview(stored)[1:], type=WorkHead)


def join_parts(head: WorkHead, parts: Iterable[bytes]) -> bytes:
    """Return the text of all parts.  Raises StoreError if some are missing."""
    texts = [unpack(part) for part in parts]
    if len(texts) != head.parts:
        raise StoreError(
            f"a work in the database has {len(texts)} of its {head.parts} parts"
        )
    return b"".join(texts)
