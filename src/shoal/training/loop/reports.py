"""What a run says of itself after each step."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """One step that counted, as all ranks know it.

    ``shares`` are samples, and ``speeds`` samples a second of a rank's own work, both
    by rank.  ``remarks`` are for people: lost ranks, failed checkpoints.
    """

    step: int
    epoch: int
    done: float  # the completed share of the run, from 0 to 1
    loss: float  # the mean of the step's samples
    samples: int
    seconds: float  # of the step, on this rank
    sync: float  # the share of them in which this rank waited for others
    sent: int  # bytes of gradients sent by this rank so far, before compression
    shares: Sequence[int]
    speeds: Sequence[float]
    generation: int
    skipped: int  # steps so far whose gradients were not finite
    remarks: Sequence[str] = ()

    @property
    def samples_per_second(self) -> float:
        """The speed of the whole group."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        """Return it as a line for people."""
        line = (
            f"step {self.step}: loss {self.loss:.4g}, "
            f"{self.samples_per_second:.3g} samples/s, {self.sync:.0%} in sync"
        )
        return "; ".join([line, *self.remarks])
