"""Buffers for large messages, reused once nothing refers to them any more.

The system clears memory that it gives out, page by page as it is filled: that takes as
long as reading into it.
"""

import ctypes
import mmap
import sys
from weakref import finalize

MAPPED_MIN = 2 << 20  # bytes from which on memory is had of the system
KEPT_MAX = 64 << 20  # bytes of unused buffers that are kept


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
        """Return a kept buffer that is large enough, if there is one."""
        kept = self._kept
        for index, place in enumerate(kept):
            if len(place) >= size:
                return kept.pop(index)
        return None

    def _back(self, place: mmap.mmap) -> None:
        """Keep a buffer; if the limit is exceeded, keep only this one.

        It removes nothing from the list: a finalizer may run at any point.
        """
        if sum(map(len, self._kept)) + len(place) <= self._kept_max:
            self._kept.append(place)
        elif len(place) <= self._kept_max:
            self._kept = [place]


def _rounded(size: int) -> int:
    """Round up to a power of two, so that few sizes serve all messages."""
    return 1 << (size - 1).bit_length()


def _map(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    # Private: Linux backs shared mappings by small pages only.
    place = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        place.madvise(mmap.MADV_HUGEPAGE)  # filling it takes half the time
    return place
