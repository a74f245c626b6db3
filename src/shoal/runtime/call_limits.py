"""How long a call of a function may wait and run."""

from functools import lru_cache

from shoal.domain.work import Limits

QUEUE = 3600.0  # seconds that a call waits for a worker, unless its caller says else
TOTAL = 86_400.0  # seconds from when it was accepted, with all tries and waits
GRACE = 30.0  # seconds over its timeout, after which its worker is not waited for


@lru_cache(256)
def call_limits(timeout: float | None = None, queue: float = QUEUE) -> Limits:
    """Return the limits of a call; both are in seconds.

    A function says nothing until it returns, so silence means nothing; unless there is
    a timeout, for then a worker that does not keep it is broken.
    """
    patience = TOTAL if timeout is None else min(timeout + GRACE, TOTAL)
    return Limits(min(queue, TOTAL), patience, patience, TOTAL)
