"""In what order a run takes its samples: shuffled by a seed, each once an epoch.

The order is that of the whole group.  Whoever takes part in a step, and with whatever
share, the step has the next samples of the order; only a step that counted moves on.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from shoal.domain.errors import InvalidRequest

Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class SampleOrder:
    """The order of ``length`` samples, taken in batches of at most ``batch``.

    The last batch of an epoch has what is left.  Samples are shuffled anew each epoch,
    by numbers that are the same on all systems and in all versions of NumPy.
    """

    def __init__(self, length: int, batch: int, seed: int = 0) -> None:
        self._length = length
        self._batch = batch
        self._seed = seed
        self.epoch = 0
        self._taken = 0  # samples of this epoch

    @property
    def steps_of_epoch(self) -> int:
        """How many batches an epoch has."""
        return -(-self._length // self._batch)

    @property
    def next_size(self) -> int:
        """How many samples the next batch has."""
        return min(self._batch, self._length - self._taken)

    @property
    def at_beginning(self) -> bool:
        """Whether the next batch is the first one of an epoch."""
        return self._taken == 0

    def part(self, counts: Sequence[int], rank: int) -> list[int]:
        """Return a rank's samples of the next batch, divided into ``counts``."""
        assert sum(counts) == self.next_size
        begin = self._taken + sum(counts[:rank])
        order = _permutation(self._length, self._seed, self.epoch)
        return [int(each) for each in order[begin : begin + counts[rank]]]

    def advance(self) -> None:
        """Move on to the next batch: the step counted."""
        self._taken += self.next_size
        if self._taken == self._length:
            self.epoch += 1
            self._taken = 0

    def state(self) -> dict[str, int]:
        """Return where the order is, for checkpoints."""
        return {
            "length": self._length,
            "seed": self._seed,
            "epoch": self.epoch,
            "taken": self._taken,
        }

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue where a state is; the size of batches may be another.

        Raises InvalidRequest if it is of another data set.
        """
        if state["length"] != self._length:
            raise InvalidRequest(
                f"the checkpoint is of a data set of {state['length']} samples, and "
                f"this one has {self._length}: continue with the same, or in another "
                "folder"
            )
        self._seed = state["seed"]
        self.epoch = state["epoch"]
        self._taken = state["taken"]


@lru_cache(maxsize=2)
def _permutation(length: int, seed: int, epoch: int) -> Indices:
    # The newer Generator may shuffle differently in another version (NEP 19).
    source = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(source).permutation(length)
