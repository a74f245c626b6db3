"""An operation that PyTorch waits for."""

import threading
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


class CollectiveWork(dist.Work):  # type: ignore[misc]  # its types are not read
    """An operation of a group; its future has the tensors."""

    def __init__(self, outputs: list[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs
        self._ended: Future[None] = Future()
        # Only an error raised in ``then`` is one for PyTorch's C++ code, too; it takes
        # that of ``set_exception`` for the result.
        self._future: Future[list[Tensor]] = self._ended.then(self._result_or_error)
        self._done = threading.Event()
        self._error: Exception | None = None

    def finish(self, error: Exception | None) -> None:
        """End it, from the group's thread."""
        self._error = error
        self._done.set()
        self._ended.set_result(None)

    def _result_or_error(self, ended: "Future[None]") -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = 0.0 if timeout is None else timeout.total_seconds()
        if not self._done.wait(seconds or None):  # 0: PyTorch's word for no limit
            raise TimeoutError(f"the operation has not ended within {timeout}")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[list[Tensor]]:
        return self._future

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._outputs
