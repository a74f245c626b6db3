"""Prices of jobs, by kind and policy."""

from dataclasses import dataclass

from shoal.domain.job import Policy
from shoal.domain.job_kinds import FUNCTION_KINDS, TEXT_KINDS
from shoal.domain.money import Micros
from shoal.domain.work import JobKind

FAST_INFERENCE = Micros(10_000)
FAST_TASK = Micros(3_000)
CHEAP_INFERENCE = Micros(5_000)
CHEAP_TASK = Micros(1_000)
CALL = Micros(0)


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices of one job each, in micro-dollars.

    The price of a task applies to all jobs except inference and function calls.
    """

    fast_inference: Micros = FAST_INFERENCE
    fast_task: Micros = FAST_TASK
    cheap_inference: Micros = CHEAP_INFERENCE
    cheap_task: Micros = CHEAP_TASK
    call: Micros = CALL

    def price(self, policy: Policy, kind: JobKind) -> Micros:
        """Return the price of a job."""
        if kind in FUNCTION_KINDS:
            return self.call
        prices = {
            (Policy.FAST, True): self.fast_inference,
            (Policy.FAST, False): self.fast_task,
            (Policy.CHEAP, True): self.cheap_inference,
            (Policy.CHEAP, False): self.cheap_task,
        }
        return prices[policy, kind in TEXT_KINDS]
