"""The plan of a run, its model, data and settings, and its reports after a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Dataset(Protocol):
    """A map-style data set, as ``torch.utils.data`` has them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How a run is carried out; see ``train``."""

    batch: int
    epochs: int = 1
    steps: int | None = None
    micro_batch: int | None = None
    equal_shares: bool = False
    clip: float | None = None
    checkpoint_every: int = 100
    compare_every: int = 100
    seed: int = 0


class TrainingResult(NamedTuple):
    """How a run ended; ``loss`` is that of its last step, NaN if there was none."""

    step: int
    epoch: int
    loss: float
    skipped: int


class Trained(NamedTuple):
    """What is trained, and saved."""

    model: Any
    optimizer: Any
    scheduler: Any = None

    def state(self) -> dict[str, Any]:
        """Return the state, without copies."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Set a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])


class Samples(NamedTuple):
    """Where samples come from, and what is computed of them."""

    dataset: Dataset
    collate: Callable[[list[Any]], Any]
    loss: Callable[[Any, Any], Tensor]


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
