"""Buffers for large messages, reused once nothing refers to them any more.

The system clears memory that it gives out, page by page as it is filled: that takes as
long as reading into it.
"""

import ctypes
import mmap
import sys
from weakref import finalize

MAPPED_MIN = 2 << 20  # bytes from which on memory is had of the system
KEPT_MAX = 64 << 20  # bytes that stay with us while nobody uses them


class BufferPool:
    """Places for bodies; one loop takes them, and any thread may be the last to look.

    ``kept_max`` is how many bytes are kept for the next.
    """

    def __init__(self, kept_max: int = KEPT_MAX) -> None:
        self._kept_max = kept_max
        self._kept: list[mmap.mmap] = []

    def allocate(self, size: int) -> memoryview:
        """Return memory of so many bytes, whatever is in it.

        It takes up no more than is filled, and what was filled before.
        """
        if size < MAPPED_MIN:
            return memoryview(bytearray(size))
        place = self._kept_for(size) or _map(_rounded(size))
        # Each view of the memory holds this array: it is gone when they all are.
        held = (ctypes.c_ubyte * len(place)).from_buffer(place)
        finalize(held, self._back, place).atexit = False
        return memoryview(held).cast("B")[:size]

    def _kept_for(self, size: int) -> mmap.mmap | None:
        """Take out a place that is large enough, if one is kept."""
        kept = self._kept
        for index, place in enumerate(kept):
            if len(place) >= size:
                return kept.pop(index)
        return None

    def _back(self, place: mmap.mmap) -> None:
        """Keep a place; if that would be too many, keep no other.

        Nothing is taken out here: this may come in between anywhere.
        """
        if sum(map(len, self._kept)) + len(place) <= self._kept_max:
            self._kept.append(place)
        elif len(place) <= self._kept_max:
            self._kept = [place]


def _rounded(size: int) -> int:
    """Return the power of two from there on: then few sizes do for all."""
    return 1 << (size - 1).bit_length()


def _map(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    # Not shared with anybody, or Linux would give it out in small pages alone.
    place = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        place.madvise(mmap.MADV_HUGEPAGE)  # filling it takes half the time
    return place
