"""Runs joblib's batches, and so scikit-learn's, on the workers of a pool.

A batch is sent as code, so workers need ``--trust-code``.  The client unpickles its
result or exception, so this backend also requires trust in the workers.
"""

import io
import pickle  # Trusted: users of this backend trust its workers.
import platform
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
from joblib import register_parallel_backend
from joblib.parallel import AutoBatchingMixin, ParallelBackendBase

from shoal.client.errors import CodeRefused, RemoteTraceback
from shoal.client.pool import Pool
from shoal.client.remote_exceptions import origin_note
from shoal.tasks.limits import BLOB_MIN
from shoal.tasks.values import Ref

NAME = "shoal"
CONCURRENT_MIN = 2  # with one job at a time joblib runs all of them in this process

NUMBERS = "biufc"  # NumPy dtype kinds whose large arrays are sent as blobs

Array: TypeAlias = np.ndarray[Any, Any]
Batch: TypeAlias = Callable[[], list[Any]]
Callback: TypeAlias = Callable[[Future[bytes]], object]


def register_joblib() -> None:
    """Register ``"shoal"`` as a backend of joblib.

        shoal.register_joblib()
        with joblib.parallel_config(backend="shoal", url=url, api_key=key):
            search.fit(X, y)

    Further arguments of ``parallel_config`` are those of ``shoal.Pool``, or ``pool``, a
    pool to use.  The workers need ``--trust-code`` and the same libraries.  The backend
    unpickles what they return, so that workers can run any code in this process.

    Without joblib (``pip install joblib``), ``shoal.register_joblib`` raises
    ImportError.
    """
    register_parallel_backend(NAME, PoolBackend)


def run_batch(pickled: bytes, *arrays: Array) -> bytes:
    """Run a batch on a worker; return its pickled result or exception.

    ``arrays`` are its large arrays.
    """
    batch = _Unpickler(io.BytesIO(pickled), arrays).load()
    try:
        return bytes(cloudpickle.dumps((batch(), None, "", "")))
    except Exception as error:
        try:
            failed = (None, error, traceback.format_exc(), platform.node())
            dumped = bytes(cloudpickle.dumps(failed))
            pickle.loads(dumped)  # its constructor may need other arguments
            return dumped
        except Exception:
            raise error from None  # it is sent as other exceptions are


# joblib has no type hints.
class PoolBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """A joblib backend that submits batches to a pool.

    Large arrays are sent once per call of ``joblib.Parallel``, so they must not change
    while it runs.

    Raises ConfigError as ``shoal.Pool`` does.
    """

    supports_retrieve_callback = True
    default_n_jobs = -1
    # Small batches cost more in transit than in computation.
    MIN_IDEAL_BATCH_DURATION = 0.2  # seconds
    MAX_IDEAL_BATCH_DURATION = 2.0

    def __init__(
        self,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        pool: Pool | None = None,
        **pool_options: Any,
    ) -> None:
        super().__init__(
            nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads
        )
        self._pool = Pool(**pool_options) if pool is None else pool
        self._open: set[Future[bytes]] = set()
        self._arrays = _Arrays(self._pool)
        # joblib's callbacks run here, so they do not block the pool's thread.
        self._callback_thread = ThreadPoolExecutor(1, "shoal-joblib")

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs == 1:
            return 1
        tasks = self._pool.tasks()
        if not tasks.code:
            raise CodeRefused(
                "no worker runs functions sent by clients, as joblib's are: start one "
                "with `shoal join --trust-code`"
            )
        if n_jobs is not None and n_jobs > 0:
            return n_jobs
        reserved = 0 if n_jobs is None else 1 + n_jobs
        return max(CONCURRENT_MIN, tasks.slots + reserved)

    def start_call(self) -> None:
        self._arrays = _Arrays(self._pool)

    def stop_call(self) -> None:
        self._arrays = _Arrays(self._pool)  # releases the arrays of the last call

    def submit(self, func: Batch, callback: Callback | None = None) -> Future[bytes]:
        pickled = io.BytesIO()
        pickler = _Pickler(pickled, self._arrays)
        pickler.dump(func)
        run: Callable[..., bytes] = run_batch
        future = self._pool.submit(run, pickled.getvalue(), *pickler.refs)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if callback is not None:
            future.add_done_callback(partial(self._queue_callback, callback))
        return future

    def _queue_callback(self, callback: Callback, future: Future[bytes]) -> None:
        self._callback_thread.submit(callback, future)

    def retrieve_result_callback(self, out: Future[bytes]) -> list[Any]:
        result, error, remote, machine = pickle.loads(out.result())
        if error is not None:
            error.add_note(origin_note(machine, getattr(out, "job_id", "")))
            raise error from RemoteTraceback(remote)
        returned: list[Any] = result
        return returned

    def abort_everything(self, ensure_ready: bool = True) -> None:
        for future in [*self._open]:
            future.cancel()


class _Arrays:
    """Large arrays that are sent by reference, each uploaded once.

    They are identified by ``id``, so they are kept alive here.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._refs: dict[int, tuple[Array, Ref]] = {}

    def ref(self, array: Array) -> Ref:
        if (entry := self._refs.get(id(array))) is None:
            entry = array, self._pool.put(np.asarray(array))
            self._refs[id(array)] = entry
        return entry[1]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no type hints
    """Pickles a batch; large arrays are replaced by their index in ``refs``."""

    def __init__(self, file: io.BytesIO, arrays: _Arrays) -> None:
        super().__init__(file)
        self._arrays = arrays
        self.refs: list[Ref] = []
        self._indices: dict[int, int] = {}  # of arrays: equal ones remain two

    def persistent_id(self, value: object) -> int | None:
        if type(value) not in (np.ndarray, np.memmap):
            return None
        assert isinstance(value, np.ndarray)
        if value.nbytes < BLOB_MIN or value.dtype.kind not in NUMBERS:
            return None
        if id(value) not in self._indices:
            self._indices[id(value)] = len(self.refs)
            self.refs.append(self._arrays.ref(value))
        return self._indices[id(value)]


class _Unpickler(pickle.Unpickler):
    """Unpickles the output of ``_Pickler``."""

    def __init__(self, file: io.BytesIO, arrays: Sequence[Array]) -> None:
        super().__init__(file)
        self._arrays = arrays

    def persistent_load(self, pid: int) -> Array:
        return self._arrays[pid]
