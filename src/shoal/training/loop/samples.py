"""Which samples each rank takes in a step: the next of an order, divided by speed.

The order is that of the whole group: shuffled by a seed, each sample once an epoch.
Each step has the next samples of the order, whichever ranks take part and whatever
their shares; only a step that counted moves on.  Shares are computed from what all
ranks know, so that all get the same.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from shoal.domain.errors import InvalidRequest

Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class SampleOrder:
    """The order of ``length`` samples, taken in batches of at most ``batch``.

    The last batch of an epoch has what is left.  Samples are reshuffled each epoch, by
    numbers that are the same on all systems and in all versions of NumPy.
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


MEASURED_MAX = 200  # steps whose speeds count: the last ones
PAYS = 0.9  # the time of a step with other shares, relative to that with these
ADAPT_STEPS = 100  # steps of a long epoch after which shares are adapted too


@dataclass(frozen=True, slots=True)
class RankMeasurement:
    """What one rank did in one step.

    ``seconds`` are those of its own work, without waiting for others.  ``lent`` is the
    part of its speed that the machine lends, from 0 to 1, by its heat and its owner.
    """

    samples: int
    seconds: float
    lent: float


def divide(total: int, speeds: Sequence[float]) -> list[int]:
    """Return how many of ``total`` samples each rank takes, in proportion to its speed.

    The counts add up to ``total``, and each is within one of the exact proportion:
    the largest remainders are rounded up (Hamilton's method), of equal ones those of
    the lower ranks.  If all speeds are 0, the counts are equal.
    """
    whole = sum(speeds)
    shares = (
        [each / whole for each in speeds] if whole else [1 / len(speeds)] * len(speeds)
    )
    exact = [total * share for share in shares]
    counts = [int(each) for each in exact]
    by_remainder = sorted(
        range(len(exact)), key=lambda rank: (counts[rank] - exact[rank], rank)
    )
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return counts


class Shares:
    """The shares of the ranks of a group; the same on all of them.

    They begin equal, and change only in ``adapt`` and ``regroup``, so that a step that
    is repeated has the same samples.  ``members`` are the ranks by names that they keep
    when others are lost.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self._members = list(members)
        # By rank, in samples a second as measured; 1.0 for all: nothing is known.
        self.speeds = [1.0] * len(members)
        self._forget()

    def of(self, total: int) -> list[int]:
        """Return how many of the samples of a step each rank takes."""
        return divide(total, self.speeds)

    def record(self, measured: Sequence[RankMeasurement]) -> None:
        """Record a step that counted, as all ranks know it."""
        self._steps += 1
        for rank, each in enumerate(measured):
            self._lent[rank] = each.lent
            if each.samples and each.seconds > 0:
                self._rates[rank].append(each.samples / each.seconds)

    @property
    def due(self) -> bool:
        """Whether enough steps were recorded since shares were adapted."""
        return self._steps >= ADAPT_STEPS

    def adapt(self, batch: int) -> bool:
        """Set the shares of batches by the speeds since the last time, if it pays.

        That is, if a step then takes a tenth less; so machines that are about equal
        keep equal shares.  A rank without a measurement counts as the median one.  A
        machine that lends a part of its speed has that part of the share.

        Returns whether they changed.
        """
        medians = [statistics.median(each) if each else 0.0 for each in self._rates]
        known = [each for each in medians if each]
        if not known:
            return False
        usual = statistics.median(known)
        speeds = [
            (median or usual) * lent
            for median, lent in zip(medians, self._lent, strict=True)
        ]
        self._steps = 0
        for each in self._rates:
            while len(each) > 1:  # a rank without a share keeps its last speed
                each.popleft()
        before = _seconds(divide(batch, self.speeds), speeds)
        after = _seconds(divide(batch, speeds), speeds)
        if after >= PAYS * before:
            return False
        self.speeds = speeds
        return True

    def regroup(self, members: Sequence[int]) -> None:
        """Keep the speeds of those that are still there; new ones get the median."""
        if [*members] == self._members:
            return
        speeds = dict(zip(self._members, self.speeds, strict=True))
        usual = statistics.median(self.speeds)
        self._members = list(members)
        self.speeds = [speeds.get(each, usual) for each in members]
        self._forget()

    def state(self) -> dict[str, Any]:
        """Return the shares, for checkpoints and for new ranks."""
        return {"members": self._members, "speeds": [*self.speeds]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the shares of a state; measurements restart."""
        self._members = list(state["members"])
        self.speeds = list(state["speeds"])
        self._forget()

    def _forget(self) -> None:
        size = len(self._members)
        self._rates: list[deque[float]] = [
            deque(maxlen=MEASURED_MAX) for _ in range(size)
        ]
        self._lent = [1.0] * size
        self._steps = 0


def _seconds(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """Return how long the slowest rank takes."""
    return max(
        (count / speed if speed else math.inf)
        for count, speed in zip(counts, speeds, strict=True)
        if count
    )


def check_sizes(samples: int, batch: int, ranks: int) -> None:
    """Raise InvalidRequest if a data set or a batch is too small, with the numbers."""
    if batch < 1 or samples < 1:
        raise InvalidRequest(
            f"a data set of {samples} samples and batches of {batch}: expected at "
            "least one of each"
        )
    if samples < ranks:
        raise InvalidRequest(
            f"the data set has {samples} samples, and there are {ranks} ranks: use at "
            f"most {samples} ranks, or more samples"
        )
    if batch < ranks:
        raise InvalidRequest(
            f"a batch has {batch} samples, and there are {ranks} ranks: use batches of "
            f"at least {ranks}, or fewer ranks"
        )
    if batch > samples:
        raise InvalidRequest(
            f"a batch has {batch} samples, and the data set {samples}: use batches of "
            f"at most {samples}"
        )
