"""A proof, as a file, that the log only grew between two checkpoints.

An auditor who keeps a checkpoint can later verify that no earlier entry changed.
"""

from dataclasses import dataclass
from typing import Literal

from shoal.domain.errors import InvalidRequest
from shoal.ledger import checkpoint, files, merkle
from shoal.ledger.checks import StepCheck, StepResult, VerificationStep, run_steps


@dataclass(frozen=True, slots=True)
class ConsistencyProof:
    """Two checkpoints and their proof; the fields of the file have these names."""

    first: str
    second: str
    path: tuple[bytes, ...]
    type: Literal["shoal/growth"] = "shoal/growth"
    version: Literal[1] = 1


def write(growth: ConsistencyProof) -> bytes:
    """Encode a proof as a file."""
    return files.write(growth)


def read(data: bytes) -> ConsistencyProof:
    """Decode a proof without verifying it.

    Raises InvalidRequest for anything that ``write`` would not have written.
    """
    return files.read(data, ConsistencyProof)


def verify(data: bytes, public_key: bytes) -> list[StepResult]:
    """Verify a proof's file with the coordinator's key, which is known from elsewhere.

    Returns the steps taken, in order; a failed step is the last.
    """
    try:
        growth = read(data)
    except InvalidRequest as error:
        return [StepResult(VerificationStep.FORM, str(error))]
    return run_steps(_STEPS, growth, public_key)


def _earlier(growth: ConsistencyProof, public_key: bytes) -> str | None:
    return _why_unsigned(growth.first, public_key)


def _later(growth: ConsistencyProof, public_key: bytes) -> str | None:
    return _why_unsigned(growth.second, public_key)


def _why_unsigned(note: str, public_key: bytes) -> str | None:
    try:
        checkpoint.verify(note, public_key)
    except InvalidRequest as error:
        return str(error)
    return None


def _grown(growth: ConsistencyProof, public_key: bytes) -> str | None:
    first = checkpoint.verify(growth.first, public_key)
    second = checkpoint.verify(growth.second, public_key)
    if merkle.verify_consistency(
        first.size, second.size, first.root, second.root, growth.path
    ):
        return None
    return (
        f"it does not show that the log of {second.size} receipts "
        f"begins with those {first.size}"
    )


_STEPS: tuple[tuple[VerificationStep, StepCheck[ConsistencyProof]], ...] = (
    (VerificationStep.EARLIER, _earlier),
    (VerificationStep.LATER, _later),
    (VerificationStep.GROWN, _grown),
)
