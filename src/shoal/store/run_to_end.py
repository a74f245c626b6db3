"""Work that goes on when a client leaves: a commit, and what has to follow it.

A handler is cancelled when its client disconnects.  A commit may succeed all the same,
and then what follows from it in memory or on the disk must not be left out.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end even if the caller is cancelled meanwhile."""
    # Not in a task group, which would cancel it; this waits for its end in any case.
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
