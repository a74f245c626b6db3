"""A communication hook of ``DistributedDataParallel``: gradients in fewer bytes.

It needs the backend shoal, and keeps the overlap of sending and backward.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from shoal.domain.errors import InvalidRequest
from shoal.training.compression.error_feedback import (
    TOP_RATIO,
    ErrorFeedback,
    FeedbackCompression,
)
from shoal.training.torch_process_group import ShoalProcessGroup


class CompressionState:
    """The compression of a model's gradients, and what it has left out of each bucket.

    PyTorch rebuilds the buckets after the first step; what the first one left out is
    then dropped.
    """

    def __init__(
        self,
        compression: FeedbackCompression = "auto",
        group: dist.ProcessGroup | None = None,
        ratio: float = TOP_RATIO,
    ) -> None:
        found = dist.group.WORLD if group is None else group
        if not isinstance(found, ShoalProcessGroup):
            raise InvalidRequest('compressed gradients need the backend "shoal"')
        self.group = found
        self._terms = (compression, ratio)
        ErrorFeedback(*self._terms)  # refuses other names at once
        self._of_buckets: dict[int, tuple[list[nn.Parameter], ErrorFeedback]] = {}

    def feedback(self, bucket: dist.GradBucket) -> ErrorFeedback:
        """Return what belongs to a bucket, as long as it has the same parameters."""
        index, parameters = bucket.index(), bucket.parameters()
        kept, feedback = self._of_buckets.get(index, ((), None))
        if feedback is None or [*map(id, kept)] != [*map(id, parameters)]:
            feedback = ErrorFeedback(*self._terms)
            self._of_buckets[index] = parameters, feedback
        return feedback


def compressed_mean_hook(
    state: CompressionState, bucket: dist.GradBucket
) -> Future[Tensor]:
    """Return the mean of a bucket's gradients over all ranks.

    Use it as ``model.register_comm_hook(CompressionState("int8"),
    compressed_mean_hook)``.  Gradients of other dtypes than float32 are not compressed.
    """
    gradients = bucket.buffer()
    if gradients.dtype == torch.float32:
        compression = state.feedback(bucket)
        numbers = gradients.numpy()
        work = state.group.reduce_arrays(numbers, "mean", numbers, compression)
    else:
        work = dist.all_reduce(
            gradients.div_(state.group.size()), group=state.group, async_op=True
        )

    def reduced(ended: Future[list[Tensor]]) -> Tensor:
        ended.value()  # raises the error of the operation
        return gradients

    return work.get_future().then(reduced)
