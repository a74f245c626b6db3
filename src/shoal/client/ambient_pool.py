"""``shoal.current_pool``: the pool of a running task, for calls of its own."""

import threading
from typing import TYPE_CHECKING

from shoal.domain.errors import ConfigError
from shoal.tasks.slot_lending import runs_tasks

if TYPE_CHECKING:
    from shoal.client.pool import Pool

_lock = threading.Lock()
_pools: "list[Pool]" = []  # one at most


def current_pool() -> "Pool":
    """Return the pool of the worker that runs this task, to call other functions.

    While the task waits for its results, by ``result()``, ``map``, ``as_completed`` or
    ``shutdown``, the worker lends its slot to other calls.  All tasks of the process
    share the pool.  Its calls are in memory, have a high priority, and end with the
    process; ``with_options`` changes the first two.

    The pool is that of the environment variables of the worker, ``SHOAL_URL`` and
    ``SHOAL_API_KEY``, or that of the coordinator on the same machine: its calls are
    those of this key.

    Raises:
        RuntimeError: no task runs in this process.
        ConfigError: the worker has no API key.
    """
    if not runs_tasks():
        raise RuntimeError(
            "current_pool() is for tasks that a worker runs; elsewhere use shoal.Pool()"
        )
    # Modules of tasks import this function in each process, and few call it.
    from shoal.client.pool import Pool

    with _lock:
        if not _pools:
            try:
                pool = Pool(durable=False)
            except ConfigError as error:
                raise ConfigError(
                    f"the calls of a task need a key at its worker: start that with "
                    f"SHOAL_URL and SHOAL_API_KEY: {error}"
                ) from error
            _pools.append(pool.with_options(priority="high"))
        return _pools[0]
