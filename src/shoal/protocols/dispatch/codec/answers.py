"""Answers on the wire: the worker encodes them, the coordinator decodes them.

Source: the WebSocket protocol document, "job_complete", what original workers send, and
what clients of original coordinators read.
"""

from dataclasses import astuple, dataclass
from itertools import zip_longest
from typing import Annotated, Any

import msgspec
from msgspec import Raw, UnsetType

from shoal.domain.answer_assembly import (
    CHOICES_MAX,
    describe_invalid_fields,
    disassemble,
)
from shoal.domain.errors import PeerError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.json_limits import NESTING_MAX, has_more_values, is_too_deep
from shoal.domain.outcome import THOUGHTS, AnswerPiece, Choice, Outcome, Usage
from shoal.domain.receipts import SignedReceipt
from shoal.domain.vocabulary import Completed, Failed
from shoal.domain.work import JSON, JobKind
from shoal.protocols.dispatch.codec.ecmascript_json import (
    NotJson,
    canonical,
    parse,
    stringify,
    to_json,
    well_formed,
    with_lone_surrogates_replaced,
)
from shoal.protocols.dispatch.codec.extension import CompletionExtension, TokenCounts
from shoal.protocols.dispatch.codec.messages import MESSAGE_MAX, REASON_MAX, JobComplete
from shoal.protocols.dispatch.codec.receipts import HASH, hash_of, read_bundled, sign
from shoal.protocols.seam.context import Identity

LOGPROBS_MAX = 500_000  # values in an answer's extension field: 50 ms to decode
NO_TEXT = "the worker's answer has no text"


@dataclass(slots=True)
class AssignedJob:
    """A job assigned to a worker, as the coordinator records it.

    ``accepts_any_output``: the client accepts an output without a text, too.
    ``continues`` is the beginning of the answer's text, and ``thoughts`` of those
    before it, which the client has already.
    ``receipt`` is one that arrived separately, before the answer.
    """

    job_id: JobId
    lease: LeaseNumber
    kind: JobKind
    accepts_any_output: bool
    continues: str = ""
    thoughts: str = ""
    receipt: SignedReceipt | None = None


class _Choice(msgspec.Struct, frozen=True):
    """One of several answers in an output."""

    message: dict[str, Any] = {}
    finish_reason: Annotated[str, msgspec.Meta(max_length=64)] = "stop"


class _TextOutput(msgspec.Struct, frozen=True):
    """The human-readable part of an output."""

    text: Any = None
    error: Any = None
    choices: Any = None


_Choices = Annotated[list[_Choice], msgspec.Meta(max_length=CHOICES_MAX)]


# For the coordinator.


def read_answer(
    job: AssignedJob, message: JobComplete, *, extended: bool
) -> tuple[Completed | Failed, str]:
    """Decode the result of a job; also return a warning about the message, or "".

    Raises PeerError if the output is missing or invalid.
    """
    if isinstance(message.output, UnsetType):
        raise PeerError("job_complete: output is missing")
    output = canonical(bytes(message.output))
    ending = _extension(message) if extended else CompletionExtension()
    warning = _mismatch(message, output)
    receipt = read_bundled(message.receipt, message.receipt_signature) or job.receipt
    text = output.decode()
    if job.kind is JobKind.TASK:
        rest: tuple[AnswerPiece, ...] = (text,)
        text = ""
    else:
        fields = _text_output(output)
        found = _pieces(fields, ending if extended else None, job)
        if found is None and not job.accepts_any_output:
            error = fields.error if isinstance(fields.error, str) else ""
            reason_text = well_formed(error[:REASON_MAX]) or NO_TEXT
            return Failed(job.job_id, job.lease, reason_text), warning
        rest = found or ()
    usage = None
    if (tokens := ending.usage) is not None:
        usage = Usage(
            *(tokens.prompt_tokens, tokens.completion_tokens),
            *(tokens.cached_tokens, tokens.reasoning_tokens),
        )
    reason = ending.finish_reason
    return (
        Completed(job.job_id, job.lease, reason, usage, rest, text, receipt),
        warning,
    )


# For the worker.


def encode_answer(
    wire_id: str,
    output: bytes,
    identity: Identity,
    at: float,
    ending: CompletionExtension | None = None,
) -> str:
    """Encode an answer with its receipt.

    Args:
        output: JSON as JavaScript serializes it.
        at: seconds since the epoch.
        ending: extension field for Shoal's coordinators.

    Raises PeerError if the message exceeds the coordinator's size limit.
    """
    digest = hash_of(output)
    receipt, signature = sign(wire_id, identity.public_key, digest, at, identity.sign)
    message: dict[str, object] = {
        "type": "job_complete",
        "job_id": wire_id,
        "output": Raw(output),
        "output_hash": digest,
        "receipt": Raw(receipt),
        "receipt_signature": signature,
    }
    if ending is not None:
        message["shoal"] = ending
    text = to_json(message)
    if len(text) * 4 > MESSAGE_MAX and len(text.encode()) > MESSAGE_MAX:
        raise PeerError(f"the answer exceeds the limit of {MESSAGE_MAX} bytes")
    return text


def output_of(kind: JobKind, model: str, outcome: Outcome) -> bytes:
    """Return the output of a job as JavaScript serializes it.

    Raises PeerError if it is too large or nested too deeply, or if the answer of a
    task is not JSON.
    """
    if kind is JobKind.TASK:
        try:
            return canonical(well_formed(outcome.text))
        except NotJson as error:
            raise PeerError("the answer of the task is not JSON") from error
    output: dict[str, JSON] = {"text": outcome.text, "model": model}
    if outcome.choices:
        output["choices"] = [
            {"message": choice.fields, "finish_reason": choice.finish_reason}
            for choice in outcome.choices
        ]
    return stringify(output)


def error_output(error: str) -> bytes:
    """Return the output that original workers send for a failed job."""
    return stringify({"error": error})


def completion_extension(
    lease: LeaseNumber, finish_reason: str, outcome: Outcome
) -> CompletionExtension:
    """Return the extension field of an answer, for Shoal's coordinators."""
    usage = outcome.usage
    tokens = None
    if usage is not None:
        tokens = TokenCounts(*astuple(usage))
    logprobs = [choice.logprobs for choice in outcome.choices]
    answer_logprobs = logprobs if any(each is not None for each in logprobs) else []
    return CompletionExtension(
        lease, well_formed(finish_reason)[:64], tokens, answer_logprobs
    )


# Private parts, in the order in which they are called.

_endings = msgspec.json.Decoder(CompletionExtension)
_text_outputs = msgspec.json.Decoder(_TextOutput)


def _extension(message: JobComplete) -> CompletionExtension:
    if isinstance(message.shoal, UnsetType):
        return CompletionExtension()
    raw = bytes(message.shoal)
    try:
        if has_more_values(raw.decode(), LOGPROBS_MAX):
            raise PeerError(f"job_complete: shoal: more than {LOGPROBS_MAX} values")
        ending = _endings.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError(f"job_complete: shoal: {error}") from error
    if raw.count(b"[") + raw.count(b"{") > NESTING_MAX and is_too_deep(ending.logprobs):
        raise PeerError("job_complete: shoal: nested too deeply")
    return ending


def _mismatch(message: JobComplete, output: bytes) -> str:
    """Return a warning if ``output_hash`` is wrong, else "".

    The answer is valid all the same: only the signed hash counts.
    """
    if isinstance(message.output_hash, UnsetType):
        return ""
    digest = hash_of(output)
    expected = (f'"{digest}"'.encode(), f'"{digest.removeprefix(HASH)}"'.encode())
    if bytes(message.output_hash) in expected:
        return ""
    return f"job_complete: output_hash: expected {digest}"


def _text_output(output: bytes) -> _TextOutput:
    try:
        return _text_outputs.decode(output)
    except msgspec.ValidationError:
        return _TextOutput()  # not an object
    except msgspec.DecodeError:  # lone surrogate
        value = parse(output)
        fields = value if isinstance(value, dict) else {}
        return _TextOutput(
            fields.get("text"), fields.get("error"), fields.get("choices")
        )


def _pieces(
    fields: _TextOutput, ending: CompletionExtension | None, job: AssignedJob
) -> tuple[AnswerPiece, ...] | None:
    """Return the pieces of an output that the client lacks; None without a text.

    Without an ``ending`` (the extension field) only the text counts.
    """
    if not isinstance(fields.text, str):
        return None
    text, continues = well_formed(fields.text), job.continues
    if not text.startswith(continues):
        raise PeerError("job_complete: output.text: it begins otherwise than the job")
    if ending is None or fields.choices is None:
        return (text[len(continues) :],) if len(text) > len(continues) else ()
    try:
        found = msgspec.convert(with_lone_surrogates_replaced(fields.choices), _Choices)
    except msgspec.ValidationError as error:
        raise PeerError(f"job_complete: output.choices: {error}") from error
    choices = []
    for each, logprobs in zip_longest(found, ending.logprobs[: len(found)]):
        if (fault := describe_invalid_fields(each.message)) is not None:
            raise PeerError(f"job_complete: output.choices: {fault}")
        message = each.message
        for name, begun in (("content", continues), (THOUGHTS, job.thoughts)):
            if begun and isinstance(whole := message.get(name), str):
                message = {**message, name: whole.removeprefix(begun)}
        choices.append(Choice(message, each.finish_reason, logprobs))
    return tuple(disassemble(Outcome("", choices=tuple(choices))))
