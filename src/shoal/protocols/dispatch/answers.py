"""Answers on the wire: the worker encodes them, the coordinator decodes them.

Source: the WebSocket protocol document, "job_complete", what original workers send, and
what clients of original coordinators read.
"""

from typing import Any

import msgspec
from msgspec import Raw, UnsetType
from msgspec.structs import replace

from shoal.domain.errors import PeerError
from shoal.domain.receipts import SignedReceipt
from shoal.domain.vocabulary import Completed, Failed, RunJob
from shoal.domain.work import JobKind
from shoal.protocols.dispatch import ecmascript_json
from shoal.protocols.dispatch.messages import MESSAGE_MAX, REASON_MAX, JobComplete
from shoal.protocols.dispatch.receipts import HASH, hash_of, read_bundled, sign
from shoal.protocols.seam.context import Identity

NO_TEXT = "the worker's answer has no text"


class _TextOutput(msgspec.Struct, frozen=True):
    """The human-readable part of an output."""

    text: Any = None
    error: Any = None


# For the coordinator.


def read_answer(
    job: RunJob, message: JobComplete, early: SignedReceipt | None
) -> tuple[Completed | Failed, str]:
    """Decode the result of a job; also return a warning about the message, or "".

    ``early`` is a receipt that arrived separately, before the answer.

    Raises PeerError if the output is missing or invalid.
    """
    if isinstance(message.output, UnsetType):
        raise PeerError("job_complete: output is missing")
    output = ecmascript_json.canonical(bytes(message.output))
    warning = _mismatch(message, output)
    receipt = read_bundled(message.receipt, message.receipt_signature) or early
    done = Completed(job.job_id, job.lease, receipt=receipt)
    written = output.decode()
    if job.work.kind is JobKind.TASK:
        return replace(done, rest=(written,)), warning
    fields = _text_output(output)
    if isinstance(fields.text, str):
        rest = (ecmascript_json.well_formed(fields.text),) if fields.text else ()
        return replace(done, rest=rest, output=written), warning
    if job.terms.form:  # its client accepts any output
        return replace(done, output=written), warning
    error = fields.error if isinstance(fields.error, str) else ""
    reason = ecmascript_json.well_formed(error[:REASON_MAX]) or NO_TEXT
    return Failed(job.job_id, job.lease, reason), warning


# For the worker.


def encode_answer(job_id: str, output: bytes, identity: Identity, at: float) -> str:
    """Encode an answer with its receipt.

    Args:
        output: JSON as JavaScript serializes it.
        at: seconds since the epoch.

    Raises PeerError if the message exceeds the coordinator's size limit.
    """
    digest = hash_of(output)
    receipt, signature = sign(job_id, identity.public_key, digest, at, identity.sign)
    message = {
        "type": "job_complete",
        "job_id": job_id,
        "output": Raw(output),
        "output_hash": digest,
        "receipt": Raw(receipt),
        "receipt_signature": signature,
    }
    text = ecmascript_json.to_json(message)
    if len(text) * 4 > MESSAGE_MAX and len(text.encode()) > MESSAGE_MAX:
        raise PeerError(f"the answer exceeds the limit of {MESSAGE_MAX} bytes")
    return text


def output_of(kind: JobKind, model: str, text: str) -> bytes:
    """Return the output of a job as JavaScript serializes it.

    Raises PeerError if it is too large or nested too deeply, or if the answer of a
    task is not JSON.
    """
    if kind is not JobKind.TASK:
        return ecmascript_json.stringify({"text": text, "model": model})
    try:
        return ecmascript_json.canonical(ecmascript_json.well_formed(text))
    except ecmascript_json.NotJson as error:
        raise PeerError("the answer of the task is not JSON") from error


def error_output(error: str) -> bytes:
    """Return the output that original workers send for a failed job."""
    return ecmascript_json.stringify({"error": error[:REASON_MAX]})


# Private parts, in the order in which they are called.

_text_outputs = msgspec.json.Decoder(_TextOutput)


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
        value = ecmascript_json.parse(output)
        fields = value if isinstance(value, dict) else {}
        return _TextOutput(fields.get("text"), fields.get("error"))
