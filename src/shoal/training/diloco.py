"""DiLoCo's outer optimizer: ranks train alone for many steps, then take one together.

Each rank takes H steps with its own optimizer.  The mean of how far the ranks have
moved is then a gradient for one step of Nesterov's momentum, from the parameters with
which all began.  So the ranks exchange their parameters' size once in H steps.
(Douillard and others, "DiLoCo: distributed low-communication training of language
models", 2023.)
"""

import logging
from collections.abc import Mapping

import numpy as np

from shoal.domain.errors import InvalidRequest
from shoal.training.all_reduces import Compression, ReducingGroup
from shoal.training.collectives import Array
from shoal.training.compression.error_feedback import ErrorFeedback

log = logging.getLogger("shoal.training")

OUTER_RATE = 0.7  # the paper's, section 3
OUTER_MOMENTUM = 0.9


class OuterOptimizer:
    """The state that all ranks share, and the step that changes it.

    ``compression`` is that of the differences, any but top-k: with it, outer steps
    diverge.

    ``parameters`` and ``momentum`` are float32 vectors of shape (n,), ``steps`` counts
    the outer steps.  All have the same bits in all ranks; a rank that joins or restarts
    needs these three, and nothing else.
    """

    def __init__(
        self,
        parameters: Array,
        *,
        rate: float = OUTER_RATE,
        momentum: float = OUTER_MOMENTUM,
        compression: Compression | None = None,
    ) -> None:
        if isinstance(compression, ErrorFeedback) and compression.may_delay:
            raise InvalidRequest(
                "topk delays most differences, and outer steps amplify what is late: "
                "use int8"
            )
        self._rate = np.float32(rate)
        self._decay = np.float32(momentum)
        self._compression = compression
        self.parameters = np.array(parameters, np.float32).reshape(-1)
        self.momentum = np.zeros_like(self.parameters)
        self.steps = 0

    def step(self, group: ReducingGroup, difference: Array) -> bool:
        """Take an outer step; all ranks then begin again with ``parameters``.

        ``difference`` is this rank's parameters before its steps minus those after
        them, and keeps its numbers.  Returns False if the mean of all ranks is not
        finite: no rank has then changed anything.

        Raises GroupEnded, and InvalidRequest for another size; nothing is changed then,
        and the step may be taken again with another group.
        """
        own = np.ascontiguousarray(difference, np.float32).reshape(-1)
        if own.size != self.parameters.size:
            raise InvalidRequest(
                f"{own.size} differences, expected {self.parameters.size}"
            )
        mean = group.all_reduce(
            own, "mean", np.empty_like(own), compression=self._compression
        )
        if not np.isfinite(mean).all():
            log.warning("fact=OuterStepDropped step=%d reason=not-finite", self.steps)
            return False
        # The same operations on the same bits, one at a time: the same bits.
        momentum = self._decay * self.momentum + mean
        step = self._rate * (mean + self._decay * momentum)
        self.parameters, self.momentum = self.parameters - step, momentum
        self.steps += 1
        return True

    def share(self, group: ReducingGroup, root: int = 0) -> None:
        """Give the root's state to all ranks, which all call it.

        Raises GroupEnded; nothing is changed then.
        """
        sizes = np.array([self.parameters.size, -self.parameters.size])
        least, most = group.all_reduce(sizes, "min").tolist()
        if least != -most:
            raise InvalidRequest(
                f"ranks with {least} to {-most} parameters: the models differ"
            )
        steps = group.broadcast(np.array([self.steps]), root)
        parameters = group.broadcast(self.parameters.copy(), root)
        momentum = group.broadcast(self.momentum.copy(), root)
        self.parameters, self.momentum = parameters, momentum
        self.steps = int(steps[0])

    def state(self) -> dict[str, Array | int]:
        """Return the state, to be saved; the arrays are this object's own."""
        return {
            "parameters": self.parameters,
            "momentum": self.momentum,
            "steps": self.steps,
        }

    def restore(self, state: Mapping[str, Array | int]) -> None:
        """Go on from a saved state.  Raises InvalidRequest if its size is another."""
        parameters = np.array(state["parameters"], np.float32)
        momentum = np.array(state["momentum"], np.float32)
        if not parameters.shape == momentum.shape == self.parameters.shape:
            raise InvalidRequest(
                f"a state of {parameters.size} parameters, expected "
                f"{self.parameters.size}"
            )
        self.parameters, self.momentum = parameters, momentum
        self.steps = int(state["steps"])
