"""How the layers of a model are split over machines, where it fits on none.

One machine *runs* the model: it has the file, reads prompts, and holds what follows the
last layer, whose result is large (a number for each token of the vocabulary).  Its own
layers are the first ones, or the last, as its engine has it.  The others *lend* memory:
each holds a row of the others.  Each
token visits all of them in turn, so the time of a token is the sum of theirs, and of
the ways.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.domain.work import Shard
from shoal.domain.worker import LoadableModel
from shoal.pool.models.machine import GB, shown_size, some_of

KEPT_FREE = 0.1  # of a machine's memory: estimates are no more exact
ROUND_TRIP_MAX = 0.25  # seconds to a machine that may lend
BATCHES = (512, 64)  # tokens that are read at a time: more are quicker, and take more
UNKNOWN_BANDWIDTH = 20.0  # GB a second of a machine that does not state its own
TOKEN_SIZE = 15_000  # bytes to a shard and back for a token, about


@dataclass(frozen=True, slots=True)
class Holder:
    """A machine that may hold a part of a model.

    ``memory`` is what it may take there, in bytes.  ``bandwidth`` is that of its memory
    in GB of 10^9 bytes a second, 0: unknown, and ``round_trip`` the seconds from the
    machine that runs the model to it and back.  ``rate`` is how many bytes a second it
    takes from that, 0: unknown.  ``holds_last``: its layers are the last ones where it
    runs the model.
    """

    id: str
    name: str
    memory: int
    bandwidth: float = 0.0
    round_trip: float = 0.0
    rate: float = 0.0
    holds_last: bool = False

    @property
    def room(self) -> int:
        """The bytes that are used of its memory."""
        return int(self.memory * (1 - KEPT_FREE))

    @property
    def is_far(self) -> bool:
        """Whether the way to it takes too long for it to hold a part."""
        return self.round_trip > ROUND_TRIP_MAX

    def seconds(self, size: int) -> float:
        """Return how long it takes to read so many bytes for a token, with the way."""
        way = self.round_trip + (TOKEN_SIZE / self.rate if self.rate else 0.0)
        return size / GB / (self.bandwidth or UNKNOWN_BANDWIDTH) + way


@dataclass(frozen=True, slots=True)
class ModelSplit:
    """The parts of a model, those of lenders in the order of its layers.

    The runner's is last; it has the layers before these, or those after them.

    ``batch`` is how many tokens of a prompt are read at a time, and ``seconds`` how
    long a token of an answer takes, roughly.  ``load_seconds`` is how long the runner
    sends layers, at most; None: not all rates are known.
    """

    shards: tuple[Shard, ...]
    batch: int
    seconds: float
    load_seconds: float | None = None


def split_model(
    model: LoadableModel,
    context: int,
    slots: int,
    runner: Holder,
    lenders: Sequence[Holder],
) -> ModelSplit | str:
    """Return how a model is split over the fewest machines that hold it, or why not.

    ``context`` is in tokens for each of the ``slots``.  The ``runner`` has the file.
    The model has ``layers``.  The same arguments give the same split.
    """
    if model.layers is None:
        return (
            f"{model.name} cannot be split: its file does not say where its layers are"
        )
    parts = [_PartSizes(model, context, slots, batch) for batch in BATCHES]
    tried = (each.split(runner, lenders) for each in parts)
    found = [each for each in tried if each is not None]
    if not found:
        return parts[-1].shortage(runner, lenders)
    return min(found, key=lambda each: (len(each.shards), -each.batch))


class _PartSizes:
    """The bytes of a model's parts, with the memory of its contexts."""

    def __init__(
        self, model: LoadableModel, context: int, slots: int, batch: int
    ) -> None:
        layers = model.layers
        assert layers is not None, "models without are not split"
        cache = -(-model.cache * context * max(1, slots) // len(layers.sizes))
        self.batch = batch
        self.weights = layers.sizes
        self.sizes = [size + cache for size in layers.sizes]
        self.besides = layers.states * batch  # of each machine
        self.ends = layers.last + self.besides + layers.scores * batch  # of the runner

    def split(self, runner: Holder, lenders: Sequence[Holder]) -> ModelSplit | None:
        """Return the split of the fewest machines with this runner; None: none holds.

        With one machine it is no split, so there is at least one lender.
        """
        if runner.room < self.ends:
            return None
        others = [each for each in _by_room(runner, lenders) if not each.is_far]
        room = runner.room - self.ends
        for count, lender in enumerate(others, 1):
            room += max(0, lender.room - self.besides)
            if room < sum(self.sizes):
                continue
            if (split := self._fill(runner, others[:count])) is not None:
                return split
        return None

    def _fill(self, runner: Holder, lenders: Sequence[Holder]) -> ModelSplit | None:
        """Give each machine as many layers as it holds, the runner before the others.

        The quickest come first, and what is left is the slowest's.  Where the runner
        holds the last layers, all are given from the last to the first.
        """
        sizes = self.sizes[::-1] if runner.holds_last else self.sizes
        quickest = sorted(lenders, key=lambda each: (each.seconds(int(GB)), each.id))
        next_, last = 0, len(self.sizes)
        shards: list[Shard] = []
        seconds, load = 0.0, 0.0
        for place, besides in (
            (runner, self.ends),
            *((each, self.besides) for each in quickest),
        ):
            taken, begin = besides, next_
            while next_ < last and taken + sizes[next_] <= place.room:
                taken += sizes[next_]
                next_ += 1
            if next_ > begin or place is runner:
                first = last - next_ if runner.holds_last else begin
                count = next_ - begin
                shards.append(Shard(place.id, count, taken, first=first))
                seconds += place.seconds(taken)
                if place is not runner:
                    sent = sum(self.weights[first : first + count])
                    load += sent / place.rate if place.rate else math.inf
        if next_ < last or len(shards) < 2:
            return None
        own, *lent = shards
        if runner.holds_last:
            lent.reverse()
        known = None if load == math.inf else load
        return ModelSplit((*lent, own), self.batch, seconds, known)

    def shortage(self, runner: Holder, lenders: Sequence[Holder]) -> str:
        """Say what is missing."""
        has = f"{runner.name} has {shown_size(runner.room)}"
        if runner.room < self.ends:
            need = shown_size(self.ends)
            return f"needs {need} on the machine that runs it, and {has}"
        need = shown_size(sum(self.sizes) + self.ends)
        known = _by_room(runner, lenders)
        far = [
            f"{each.name} is {each.round_trip:.1f} s away"
            for each in known
            if each.is_far
        ]
        others = [each for each in known if not each.is_far]
        if not others:
            return f"needs {need}: {has}, {some_of(far) or 'none lends'}"
        shown = some_of([f"{each.name} {shown_size(each.room)}" for each in others])
        lent = shown_size(sum(each.room for each in others))
        text = f"needs {need}: {has}, those that lend have {lent} ({shown})"
        return f"{text}, {some_of(far)}" if far else text


def _by_room(runner: Holder, lenders: Sequence[Holder]) -> list[Holder]:
    """Return the machines but the runner, in an order that is always the same."""
    others = (each for each in lenders if each.id != runner.id)
    return sorted(others, key=lambda each: (-each.room, each.round_trip, each.id))
