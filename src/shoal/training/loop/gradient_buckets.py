"""Gradients in buckets, which are added over the ranks while backward still runs.

A bucket is sent once all its gradients, and all buckets before it, are there; so all
ranks send the same buckets in the same order.  The sums go to memory of their own: the
rank's own gradients survive a step that does not count.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from shoal.domain.errors import InvalidRequest
from shoal.training.compression import error_feedback
from shoal.training.group_values import Collectives

BUCKET_SIZE = 25 << 20  # bytes, as PyTorch's


class GradientBuckets:
    """The gradients of some parameters, added over the ranks of a group.

    In each step call ``begin``, then ``backward`` of some losses, the last one after
    ``expect_last``, then ``finish``.  Gradients are added as float32, or float64 for
    parameters of that dtype, whatever dtype the parameters have.

    ``compression`` sends float32 gradients in fewer bytes, with error feedback: what it
    leaves out of a bucket is added to the next step's.

    Hooks are on the parameters until ``close``.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        group: Collectives,
        compression: error_feedback.FeedbackCompression | None = None,
    ) -> None:
        self._group = group
        self._compression = compression
        trained = [each for each in parameters if each.requires_grad]
        if not trained:
            raise InvalidRequest("the model has no parameters to train")
        self._buckets = _divided(trained)
        self._of = {id(each): bucket for bucket in self._buckets for each in bucket.all}
        self._hooks = [
            each.register_post_accumulate_grad_hook(self._on_gradient)
            for each in trained
        ]
        self.forget_left_out()
        self._sends = False  # gradients that arrive are the last ones of this step
        self._next = 0  # the bucket that is sent next
        self._adding: list[Future[Any]] = []
        self._thread = ThreadPoolExecutor(1, "gradients")

    @property
    def size(self) -> int:
        """The bytes that are added in each step."""
        return sum(bucket.sums.nbytes for bucket in self._buckets)

    def begin(self) -> None:
        """Begin a step with gradients of 0."""
        self._sends = False
        self._next = 0
        for bucket in self._buckets:
            bucket.begin()

    def expect_last(self) -> None:
        """The next ``backward`` is the last one of this step."""
        self._sends = True

    def finish(self) -> None:
        """Wait until all gradients are added; those that are missing count as 0.

        Raises what the group's collectives raise.
        """
        self._sends = True
        while self._next < len(self._buckets):
            self._send(self._buckets[self._next])
        adding, self._adding = self._adding, []
        wait(adding)
        for each in adding:
            each.result()

    def are_finite(self) -> bool:
        """Return whether all sums are finite: the same on all ranks."""
        return all(bool(bucket.sums.isfinite().all()) for bucket in self._buckets)

    def set_means(self, weight: float) -> None:
        """Divide the sums by a weight, and make them the parameters' gradients."""
        for bucket in self._buckets:
            bucket.sums /= weight
            bucket.set_gradients()

    def forget_left_out(self) -> None:
        """Drop what compression has left out: that of steps that do not count."""
        for bucket in self._buckets:
            if self._compression is not None and bucket.own.dtype == torch.float32:
                bucket.feedback = error_feedback.ErrorFeedback(self._compression)

    def close(self) -> None:
        """Remove the hooks, and end the thread."""
        for hook in self._hooks:
            hook.remove()
        self._thread.shutdown()

    def _on_gradient(self, parameter: Tensor) -> None:
        bucket = self._of[id(parameter)]
        bucket.collect(parameter)
        if not self._sends:
            return
        bucket.missing -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send(self._buckets[self._next])

    def _send(self, bucket: "_Bucket") -> None:
        self._next += 1
        self._adding.append(self._thread.submit(self._add, bucket))

    def _add(self, bucket: "_Bucket") -> None:
        self._group.all_reduce(
            bucket.own.numpy(), "sum", bucket.sums.numpy(), compression=bucket.feedback
        )


class _Bucket:
    """Some parameters, and their gradients in a row: this rank's own, and the sums."""

    def __init__(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.all = parameters
        length = sum(each.numel() for each in parameters)
        self.own = torch.zeros(length, dtype=dtype)
        self.sums = torch.zeros(length, dtype=dtype)
        self.missing = len(parameters)
        self.feedback: error_feedback.ErrorFeedback | None = None
        self._at: dict[int, slice] = {}
        begin = 0
        for each in parameters:
            self._at[id(each)] = slice(begin, begin + each.numel())
            begin += each.numel()

    def begin(self) -> None:
        self.missing = len(self.all)
        self.own.zero_()
        for each in self.all:
            # Where backward can add to the row itself, nothing is copied.
            each.grad = self._view(each, self.own) if self._fits(each) else None

    def collect(self, parameter: Tensor) -> None:
        """Take a gradient over, unless backward has written it here."""
        gradient: Any = parameter.grad
        own = self.own[self._at[id(parameter)]]
        if gradient.data_ptr() != own.data_ptr():
            own += gradient.detach().reshape(-1).to(own)
            parameter.grad = None

    def set_gradients(self) -> None:
        for each in self.all:
            mean = self._view(each, self.sums)
            each.grad = mean if self._fits(each) else mean.to(each)

    def _fits(self, parameter: Tensor) -> bool:
        return bool(
            parameter.dtype == self.own.dtype and parameter.device.type == "cpu"
        )

    def _view(self, parameter: Tensor, row: Tensor) -> Tensor:
        return row[self._at[id(parameter)]].view(parameter.shape)


def _divided(parameters: Sequence[Tensor]) -> list[_Bucket]:
    """Divide parameters into buckets, the last parameters first.

    Backward computes their gradients first, about.
    """
    buckets: list[_Bucket] = []
    some: list[Tensor] = []
    size = 0
    for each in reversed(parameters):
        dtype = _sum_dtype(each)
        added = each.numel() * dtype.itemsize
        if some and (dtype != _sum_dtype(some[0]) or size + added > BUCKET_SIZE):
            buckets.append(_Bucket(some, _sum_dtype(some[0])))
            some, size = [], 0
        some.append(each)
        size += added
    buckets.append(_Bucket(some, _sum_dtype(some[0])))
    return buckets


def _sum_dtype(parameter: Tensor) -> torch.dtype:
    if not parameter.dtype.is_floating_point:
        raise InvalidRequest(f"parameters of {parameter.dtype} cannot be trained here")
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
