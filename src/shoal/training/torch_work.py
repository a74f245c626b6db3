"""An operation that PyTorch waits for."""

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


class CallbackThreads:
    """Threads that complete futures, and so run the callbacks of scripts.

    A callback may wait for another operation's, as that of PowerSGD does, so there is
    always one thread more than callbacks that run.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._free = 0  # threads without anything to do, or to take from the queue

    def run(self, call: Callable[[], None]) -> None:
        """Call a function soon, whatever the others wait for."""
        with self._lock:
            if self._free:
                self._free -= 1
            else:
                thread = threading.Thread(target=self._run_all, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._queue.put(call)

    def close(self) -> None:
        """Wait for what runs; not from a callback."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run_all(self) -> None:
        while (call := self._queue.get()) is not None:
            call()
            with self._lock:
                self._free += 1


class WaitTimeout(TimeoutError, RuntimeError):
    """An operation is not complete within the time that a wait for it may take.

    The operation goes on.  Scripts expect a RuntimeError, as of PyTorch's groups.
    """


class CollectiveWork(dist.Work):  # type: ignore[misc]  # its types are not read
    """An operation of a group; its future has the tensors.

    ``expire`` ends the group, and so the operation, if it is awaited for longer than
    ``limit`` seconds; collectives have that limit by themselves.
    """

    def __init__(
        self,
        outputs: list[Tensor],
        callbacks: CallbackThreads,
        limit: float | None = None,
        expire: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._outputs = outputs
        self._callbacks = callbacks
        self._limit = limit
        self._expire = expire
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: Exception | None = None
        self._ended: Future[None] | None = None
        self._future: Future[list[Tensor]] | None = None
        self.source: int | None = None

    def finish(self, error: Exception | None) -> None:
        """End it, from any thread."""
        with self._lock:
            self._error = error
            self._done.set()
            ended = self._ended
        if ended is not None:
            self._callbacks.run(lambda: ended.set_result(None))

    def wait(self, timeout: timedelta | None = None) -> bool:
        # 0 means no limit in PyTorch.
        seconds = 0.0 if timeout is None else timeout.total_seconds()
        if seconds > 0 and not self._done.wait(seconds):
            raise WaitTimeout(f"the operation has not ended within {timeout}")
        if not self._done.wait(self._limit):
            self._expire()
            self._done.wait()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[list[Tensor]]:
        with self._lock:
            if self._future is None:
                ended: Future[None] = Future()
                # Only an error raised in ``then`` is one for PyTorch's C++ code, too;
                # it takes that of ``set_exception`` for the result.
                self._future = ended.then(self._result_or_error)
                if self._done.is_set():
                    ended.set_result(None)
                else:
                    self._ended = ended
                    self._start_limit()
            return self._future

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._outputs

    def source_rank(self) -> int | None:
        return self.source

    _source_rank = source_rank  # what ``torch.distributed.recv`` calls

    def _result_or_error(self, ended: "Future[None]") -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._outputs

    def _start_limit(self) -> None:
        """Limit a wait for the future, too."""
        if self._limit is not None:
            threading.Thread(target=self._end_late, daemon=True).start()

    def _end_late(self) -> None:
        if not self._done.wait(self._limit):
            self._expire()
