"""Files for offline verification: their one encoding, and the steps of verifying them.

A file is canonical JSON, so that each value has exactly one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, TypeVar

import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.ledger.canonical import encode

T = TypeVar("T")

FILE_MAX = 64 * 2**20  # bytes; an output may have 10 MB, a request 16, twice escaped


class VerificationStep(Enum):
    """A step of a verification; the value is the statement that it verifies."""

    FORM = "the file is complete and canonical"
    KEY = "the file is from the coordinator of the given key"
    SIGNATURE = "the coordinator signed the receipt"
    RECEIPT = "the receipt has all its fields"
    CHECKPOINT = "the coordinator signed the checkpoint"
    LOGGED = "the receipt is in the log of that checkpoint"
    OUTPUT = "the output matches the receipt"
    REQUEST = "the request matches the receipt"
    WORKER = "the worker's receipt has the verdict that the coordinator states"
    EARLIER = "the coordinator signed the earlier checkpoint"
    LATER = "the coordinator signed the later checkpoint"
    GROWN = "the later log extends the earlier one"


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step; ``problem`` is None if it succeeded."""

    step: VerificationStep
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None


StepCheck: TypeAlias = Callable[[T, bytes], str | None]
"""Returns the problem, if any, of a file's value and the coordinator's public key.

What it raises as InvalidRequest is a problem as well.
"""

Steps: TypeAlias = Iterable[tuple[VerificationStep, StepCheck[T]]]


def encode_file(value: Any) -> bytes:
    """Encode a dataclass in canonical JSON, bytes in base64, with a final newline.

    Raises ValueError as ``encode`` does.
    """
    return encode(msgspec.to_builtins(value)) + b"\n"


def decode_file(data: bytes, type: type[T]) -> T:
    """Decode the output of ``encode_file``.

    Raises InvalidRequest for anything that ``encode_file`` would not have written.
    """
    if len(data) > FILE_MAX:
        raise InvalidRequest(f"the file has {len(data)} bytes; the limit is {FILE_MAX}")
    try:
        value = msgspec.json.decode(data, type=type)
        if encode_file(value) != data:
            raise ValueError("it is not canonical")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the file cannot be read: {error}") from error
    return value


def verify_file(
    data: bytes, type: type[T], steps_of: Callable[[T], Steps[T]], public_key: bytes
) -> list[StepResult]:
    """Run the steps of a file until one fails: later results would be meaningless.

    Returns the results in order; a failed step is the last.
    """
    try:
        value = decode_file(data, type)
    except InvalidRequest as error:
        return [StepResult(VerificationStep.FORM, str(error))]
    results = [StepResult(VerificationStep.FORM)]
    for step, problem_of in steps_of(value):
        try:
            problem = problem_of(value, public_key)
        except InvalidRequest as error:
            problem = str(error)
        results.append(StepResult(step, problem))
        if not results[-1].ok:
            break
    return results
