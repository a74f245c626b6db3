"""Error feedback: adds what compression left out of an array to the next one.

So nothing is lost in the long run, and training with few numbers converges.  (Stich,
Cordonnier and Jaggi, "Sparsified SGD with memory", 2018.)  The owner of a chunk does
the same with the rounding of the sum.  (Tang and others, "DoubleSqueeze", 2019.)
"""

from typing import Literal, TypeAlias

import numpy as np

from shoal.domain.errors import InvalidRequest
from shoal.training.collectives import Array
from shoal.training.compression.codings import CODINGS, CodingName

FeedbackCompression: TypeAlias = CodingName | Literal["topk", "auto"]

TOP_RATIO = 0.01


class ErrorFeedback:
    """The compression of one array, step by step; each rank has its own.

    ``"topk"`` sends ``ratio`` of the numbers, those of the largest magnitude; the
    others round all numbers.  It is passed as ``compression`` to ``all_reduce``, for
    float32 sums and means.
    """

    def __init__(
        self, compression: FeedbackCompression = "topk", ratio: float = TOP_RATIO
    ) -> None:
        names = (*CODINGS, "topk", "auto")
        if compression not in names:
            raise InvalidRequest(f"{compression!r}: expected one of {', '.join(names)}")
        if not 0 < ratio <= 1:
            raise InvalidRequest(
                f"{ratio:g} of the numbers: expected more than 0, and 1 at most"
            )
        self.compression = compression
        self.ratio = ratio
        self.residual: Array | None = None
        """What has been left out so far; the caller may save and restore it."""
        self._left_out: Array | None = None
        self._weight = 1

    @property
    def may_delay(self) -> bool:
        """Whether most numbers may wait for later steps, instead of being rounded."""
        return self.compression in ("topk", "auto")

    def correct(self, array: Array, weight: int) -> Array:
        """Return an array with the residual added, flat, to be sent instead of it.

        ``weight`` is what a result has to be multiplied by to be a sum.  If the
        operation fails, the residual remains; see ``commit``.

        Raises InvalidRequest if the size is not that of the last step.
        """
        corrected = array.reshape(-1).copy()
        if self.residual is not None:
            if self.residual.size != corrected.size:
                raise InvalidRequest(
                    f"an array of {corrected.size} numbers, expected "
                    f"{self.residual.size}, those of the last step"
                )
            corrected += self.residual
        self._left_out = np.zeros_like(corrected)
        self._weight = weight
        return corrected

    def commit(self) -> None:
        """Keep what the latest operation left out: all ranks have its result."""
        self.residual = self._left_out

    def on_sent(self, part: slice, numbers: memoryview, decoded: memoryview) -> None:
        self._add(part, numbers, decoded, 1)

    def on_result(self, part: slice, numbers: memoryview, decoded: memoryview) -> None:
        self._add(part, numbers, decoded, self._weight)

    def _add(
        self, part: slice, numbers: memoryview, decoded: memoryview, weight: int
    ) -> None:
        assert self._left_out is not None
        before, after = (np.frombuffer(each, np.float32) for each in (numbers, decoded))
        # All ranks see a result that is not finite, and drop the step; a residual that
        # is not would remain.
        with np.errstate(over="ignore", invalid="ignore"):
            lost = (before - after) * np.float32(weight)
        lost[~np.isfinite(lost)] = 0
        self._left_out[part.start // 4 : part.stop // 4] += lost
