"""Prices of jobs, by kind and policy."""

from dataclasses import dataclass

from shoal.domain.job import Policy
from shoal.domain.job_kinds import FUNCTION_KINDS, TEXT_KINDS
from shoal.domain.money import Micros
from shoal.domain.work import JobKind

FREE = Micros(0)


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices of one job each, in micro-dollars; free without an operator's prices.

    The price of a task applies to all jobs except inference and function calls.
    """

    fast_inference: Micros = FREE
    fast_task: Micros = FREE
    cheap_inference: Micros = FREE
    cheap_task: Micros = FREE
    call: Micros = FREE

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
