"""The steps of a verification, in order, each with its failure, if any."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, TypeVar

T = TypeVar("T")


class VerificationStep(Enum):
    """A step of a verification; the value is what holds if it succeeds."""

    FORM = "the file is whole and in its one form"
    KEY = "it is about the coordinator whose key was given"
    SIGNATURE = "the coordinator signed the receipt"
    RECEIPT = "the receipt says all that a receipt says"
    CHECKPOINT = "the coordinator signed the checkpoint"
    LOGGED = "the receipt is in the log of that checkpoint"
    OUTPUT = "the output is the one that the receipt names"
    WORKER = "the worker's own receipt is as the coordinator says"
    EARLIER = "the coordinator signed the earlier checkpoint"
    LATER = "the coordinator signed the later checkpoint"
    GROWN = "the later log begins with all of the earlier one"


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that was taken; ``problem`` is None if it succeeded."""

    step: VerificationStep
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None


StepCheck: TypeAlias = Callable[[T, bytes], str | None]
"""Arguments: the data to verify and the coordinator's public key."""


def run_steps(
    steps: Iterable[tuple[VerificationStep, StepCheck[T]]], what: T, public_key: bytes
) -> list[StepResult]:
    """Take steps until one fails: later results would be meaningless."""
    checks = [StepResult(VerificationStep.FORM)]
    for step, why_not in steps:
        checks.append(StepResult(step, why_not(what, public_key)))
        if not checks[-1].ok:
            break
    return checks
