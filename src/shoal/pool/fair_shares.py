"""The order of owners by their fair shares, which change as jobs begin and end."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import TypeAlias

import msgspec
from msgspec import field

from shoal.pool.open_job import OpenJob

Rank: TypeAlias = tuple[int, int, str]
"""An owner's place in the order: its running jobs, its turn among equals, its name."""


CHANGES_MAX = 1024  # changes of shares that are remembered


class FairShares(msgspec.Struct):
    """How many jobs each owner has running, and the latest changes of that.

    An owner may wait in a thousand lanes: each follows the changes when it is read.
    """

    running: dict[str, int] = field(default_factory=dict)
    changes: int = 0  # in all
    _latest: deque[str] = field(default_factory=lambda: deque(maxlen=CHANGES_MAX))
    """The owners of the latest changes."""

    def add(self, owner: str, jobs: int) -> None:
        """Count jobs of an owner that began, or ended if negative."""
        now = self.running.get(owner, 0) + jobs
        if now:
            self.running[owner] = now
        else:
            del self.running[owner]
        self.changes += 1
        self._latest.append(owner)

    def changed_since(self, changes: int) -> Iterable[str] | None:
        """Return the owners of the changes since there were ``changes``.

        None if they are too many to be remembered.
        """
        missed = self.changes - changes
        if missed > len(self._latest):
            return None
        return islice(reversed(self._latest), missed)


place_of: Callable[[OpenJob], tuple[int, int]] = attrgetter("round", "number")
"""The place of a waiting job among those of its owner and priority."""


class Lane(msgspec.Struct, eq=False):
    """Jobs of one priority that need the same of a worker.

    The owners are in a sorted list: to move one of 10,000 takes 14 comparisons, and a
    copy of 80 KB at most.
    """

    shares: FairShares
    jobs: dict[str, list[OpenJob]] = field(default_factory=dict)
    """By owner, in the order of ``place_of``."""

    _order: list[Rank] = field(default_factory=list)
    _ranks: dict[str, Rank] = field(default_factory=dict)
    """The entry of each owner in ``_order``."""

    _followed: int = 0  # the changes of shares that the order has followed

    def add(self, job: OpenJob, turn: int) -> None:
        """Add a job of an owner, whose turn is ``turn`` if it has no other here."""
        owner = job.job.owner
        jobs = self.jobs.get(owner)
        if jobs is None:
            jobs = self.jobs[owner] = []
            self._put_in(owner, turn)
        insort(jobs, job, key=place_of)

    def remove(self, job: OpenJob) -> None:
        """Remove a job."""
        owner = job.job.owner
        jobs = self.jobs[owner]
        del jobs[bisect_left(jobs, place_of(job), key=place_of)]
        if not jobs:
            del self.jobs[owner]
            self._take_out(owner)

    def set_turn(self, owner: str, turn: int) -> None:
        """Change the turn of an owner."""
        self._take_out(owner)
        self._put_in(owner, turn)

    def ranks(self) -> Iterator[Rank]:
        """Yield the owners' ranks in order."""
        self._follow()
        return iter(self._order)

    def ranks_of(self, owners: Iterable[str]) -> list[Rank]:
        """Return the ranks of some owners in order, of those that have jobs here."""
        self._follow()
        return sorted(self._ranks[each] for each in owners if each in self._ranks)

    def _follow(self) -> None:
        """Move the owners whose shares have changed since the order was read."""
        shares = self.shares
        if self._followed == shares.changes:
            return
        changed = None
        if shares.changes - self._followed < len(self._ranks):
            changed = shares.changed_since(self._followed)
        for owner in list(self._ranks) if changed is None else changed:
            rank = self._ranks.get(owner)
            if rank is not None and rank[0] != shares.running.get(owner, 0):
                self.set_turn(owner, rank[1])
        self._followed = shares.changes

    def _put_in(self, owner: str, turn: int) -> None:
        rank = self.shares.running.get(owner, 0), turn, owner
        self._ranks[owner] = rank
        insort(self._order, rank)

    def _take_out(self, owner: str) -> None:
        rank = self._ranks.pop(owner)
        del self._order[bisect_left(self._order, rank)]


class OwnerCounts(msgspec.Struct):
    """How many owners have at least 1, 2, 3 … jobs, with their sums.

    Source: Fenwick, "A New Data Structure for Cumulative Frequency Tables", 1994.
    """

    _tree: list[int] = field(default_factory=lambda: [0, 0])
    """At ``i``, the sum of the ``i & -i`` counts up to ``i``; its length less one is a
    power of two."""

    def add(self, jobs: int, owners: int) -> None:
        """Count ``owners`` more that have at least ``jobs`` jobs."""
        tree = self._tree
        while jobs >= len(tree):
            size = len(tree) - 1
            tree += [0] * size
            tree[-1] = tree[size]
        while jobs < len(tree):
            tree[jobs] += owners
            jobs += jobs & -jobs

    def jobs_up_to(self, most: int) -> int:
        """Return the number of jobs, with at most ``most`` of each owner."""
        at, jobs = min(most, len(self._tree) - 1), 0
        while at:
            jobs += self._tree[at]
            at -= at & -at
        return jobs
