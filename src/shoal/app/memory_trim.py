"""Returns freed memory to the system, once a minute.

The allocator of Linux keeps what is freed below the last block in use, as after a flood
of requests, for as long as the process lives.
"""

import asyncio
import ctypes
from collections.abc import Callable

TRIM_EVERY = 60.0  # seconds


async def trim_memory_regularly() -> None:
    """Return freed memory once a minute, until cancelled.

    In a thread, because it takes some milliseconds for each 10 MB that it returns.
    """
    while True:
        await asyncio.sleep(TRIM_EVERY)
        await asyncio.to_thread(trim_memory)


def trim_memory() -> None:
    """Return freed memory, where the C library does not do so by itself."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def _find_malloc_trim() -> Callable[[int], int] | None:
    """Return the function of glibc; other libraries have none."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):  # Windows knows no such library
        return None
    return trim


_malloc_trim = _find_malloc_trim()
