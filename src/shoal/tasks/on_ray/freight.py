"""Large arguments on their way into Ray's object store, each of them once."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

import numpy as np
import ray

from shoal.tasks import orders
from shoal.tasks.limits import BLOBS_MAX

After: TypeAlias = Callable[["Future[Any]"], None]


class Tell(Protocol):
    def __call__(self, slot: int, code: int, *about: Any) -> None: ...


class Freight:
    """What has been put there; the one that was used least lately goes.

    Args:
        desk: where the calls wait that lack something.
        tell: tells the worker something about a slot.
        when_done: calls something with a future when that is done, in our thread.
    """

    def __init__(
        self,
        desk: Any,
        tell: Tell,
        when_done: Callable[["Future[Any]", After], None],
    ) -> None:
        self._desk = desk
        self._tell = tell
        self._when_done = when_done
        self._lacking: dict[int, bytes] = {}  # what slots wait for
        self._there: dict[bytes, tuple[Any, int]] = {}  # the latest used is last
        self._size = 0
        self._putting = ThreadPoolExecutor(1)

    def look_for(self, slot: int, digest: bytes) -> None:
        """Let a slot's call have something, or ask the worker for it."""
        if digest in self._there:
            self._give(digest)
        else:
            self._lacking[slot] = digest
            self._tell(slot, orders.LACKS, digest)

    def take(self, slot: int, path: str, why: str) -> None:
        """Take the file with what a slot lacks, or learn why there is none."""
        digest = self._lacking.pop(slot, None)
        if digest is None:
            return  # its call was stopped
        if digest in self._there:
            self._give(digest)
        elif not path:
            self._desk.give.remote(digest, ([], why))
        else:
            putting = self._putting.submit(_put, path)
            self._when_done(putting, lambda done: self._was_put(digest, done))

    def forget(self, slot: int) -> None:
        """Learn that a slot's call has been stopped."""
        self._lacking.pop(slot, None)

    def _was_put(self, digest: bytes, done: "Future[Any]") -> None:
        if (error := done.exception()) is not None:
            why = f"a large argument cannot be kept in the Ray cluster: {error}"
            self._desk.give.remote(digest, ([], why))
            return
        if digest not in self._there:
            self._there[digest] = done.result()
            self._size += done.result()[1]
        self._give(digest)
        while self._size > BLOBS_MAX and len(self._there) > 1:
            _, size = self._there.pop(next(iter(self._there)))
            self._size -= size

    def _give(self, digest: bytes) -> None:
        found = self._there[digest] = self._there.pop(digest)
        self._desk.give.remote(digest, ([found[0]], ""))


def _put(path: str) -> tuple[Any, int]:
    """Return a reference to what is in a file, and its size.

    Arrays are what all processes of a node are given without a copy.
    """
    data = np.fromfile(path, np.uint8)
    return ray.put(data), data.size
