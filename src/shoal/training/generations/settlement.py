"""What a new generation does first, so that no rank misses a result, without I/O."""

from typing import NamedTuple

from shoal.domain.errors import Unavailable
from shoal.training.generations.messages import Formation


class RankMissing(Unavailable):
    """The operation needs a rank that is lost."""


class Settlement(NamedTuple):
    """Whether this rank misses a result, and the rank that sends it to all, if any."""

    misses: bool = False
    root: int | None = None


def settle(
    formation: Formation, mine: int, *, shared: bool, arrived: bool
) -> Settlement:
    """Return what follows from the operations that ranks have completed.

    ``mine`` is the last one of this rank.  ``shared`` says whether the newest one gives
    all ranks the same: this rank has completed it, or it is under way here.
    ``arrived``: it is under way, and has its result; all others have theirs too, as
    one of them has passed the barrier.

    Raises RankMissing if no rank that is left has the result.
    """
    newest = formation.newest
    operations = [each.operation for each in formation.ranks]
    if formation.admitted or min(operations) == newest:
        return Settlement()
    misses = mine < newest
    if shared:
        if newest not in operations:
            raise RankMissing(f"the ranks with the result of operation {newest} left")
        return Settlement(misses, operations.index(newest))
    if misses and not arrived:
        raise RankMissing(f"nothing of operation {newest} has arrived here")
    return Settlement(misses)
