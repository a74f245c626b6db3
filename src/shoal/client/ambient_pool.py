"""``shoal.current_pool``: the pool of a running task, for calls of its own."""

import threading
from typing import TYPE_CHECKING

from shoal.domain.errors import ConfigError
from shoal.tasks.running_call import call_access, runs_tasks

if TYPE_CHECKING:
    from shoal.client.pool import Pool

_lock = threading.Lock()
_pools: "dict[tuple[str, str] | None, Pool]" = {}  # one at most, by its access


def current_pool() -> "Pool":
    """Return the pool of the worker that runs this task, to call other functions.

    While the task waits for its results, by ``result()``, ``map``, ``as_completed`` or
    ``shutdown``, the worker lends its slot to other calls.  The pool's calls are those
    of the caller of this task, and end with it.  They are in memory and have a high
    priority, which ``with_options`` changes.

    Where the coordinator gives tasks no access, the pool is that of the environment
    variables of the worker, ``SHOAL_URL`` and ``SHOAL_API_KEY``, or that of the
    coordinator on the same machine.

    Raises:
        RuntimeError: no task runs in this process.
        ConfigError: the worker has no API key, and its coordinator gives no access.
    """
    if not runs_tasks():
        raise RuntimeError(
            "current_pool() is for tasks that a worker runs; elsewhere use shoal.Pool()"
        )
    # Modules of tasks import this function in each process, and few call it.
    from shoal.client.pool import Pool

    with _lock:
        access = call_access()
        if access not in _pools:
            try:
                pool = Pool(durable=False)
            except ConfigError as error:
                raise ConfigError(
                    "the coordinator of this worker gives its calls no access; start "
                    f"the worker with SHOAL_URL and SHOAL_API_KEY: {error}"
                ) from error
            while _pools:  # those of calls that have ended
                _pools.popitem()[1].shutdown(wait=False, cancel_futures=True)
            _pools[access] = pool.with_options(priority="high")
        return _pools[access]
