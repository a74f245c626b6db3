"""A proof, as a file, that the log only grew between two checkpoints.

An auditor who keeps a checkpoint can later verify that no earlier entry changed.
"""

from dataclasses import dataclass
from typing import Literal

from shoal.ledger import checkpoint, merkle, verification


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
    return verification.encode_file(growth)


def read(data: bytes) -> ConsistencyProof:
    """Decode a proof without verifying it.

    Raises InvalidRequest for anything that ``write`` would not have written.
    """
    return verification.decode_file(data, ConsistencyProof)


def verify(data: bytes, public_key: bytes) -> list[verification.StepResult]:
    """Verify a proof's file with the coordinator's key, which is known from elsewhere.

    Returns the steps taken, in order; a failed step is the last.
    """
    return verification.verify_file(data, ConsistencyProof, _steps, public_key)


def _steps(growth: ConsistencyProof) -> verification.Steps[ConsistencyProof]:
    yield verification.VerificationStep.EARLIER, _earlier
    yield verification.VerificationStep.LATER, _later
    yield verification.VerificationStep.GROWN, _grown


def _earlier(growth: ConsistencyProof, public_key: bytes) -> str | None:
    checkpoint.verify(growth.first, public_key)
    return None


def _later(growth: ConsistencyProof, public_key: bytes) -> str | None:
    checkpoint.verify(growth.second, public_key)
    return None


def _grown(growth: ConsistencyProof, public_key: bytes) -> str | None:
    first = checkpoint.verify(growth.first, public_key)
    second = checkpoint.verify(growth.second, public_key)
    if merkle.verify_consistency(
        first.size, second.size, first.root, second.root, growth.path
    ):
        return None
    return (
        f"the proof does not show that the log of {second.size} receipts "
        f"extends the log of {first.size}"
    )
