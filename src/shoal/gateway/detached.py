"""What jobs that nobody waits for hold of their keys' allowances, until they end."""

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.domain.credentials import usage_of
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
)
from shoal.domain.ids import JobId
from shoal.domain.work import Work
from shoal.gateway.allowance import Allowance, Taken


@dataclass(frozen=True, slots=True)
class _Held:
    work: Work
    allowance: Allowance
    taken: Taken


@dataclass(slots=True)
class Detached:
    """As many as there are open jobs: else a budget would hold for nobody who leaves.

    ``now`` is the clock that allowances go by.
    """

    now: Callable[[], float]
    _held: dict[JobId, list[_Held]] = field(default_factory=dict)

    def hold(
        self, job_id: JobId, work: Work, allowance: Allowance, taken: Taken
    ) -> None:
        """Keep what was taken for a job until it ends."""
        self._held.setdefault(job_id, []).append(_Held(work, allowance, taken))

    def saw(self, fact: Fact) -> None:
        """Let go of what a job held that has ended."""
        match fact:
            case JobCompleted(job_id, _, outcome):
                for held in self._held.pop(job_id, ()):
                    usage = usage_of(held.work, outcome)
                    used = usage.prompt_tokens + usage.completion_tokens
                    held.allowance.leave(held.taken, used, self.now())
            case JobFailed(job_id) | JobCancelled(job_id) | JobExpired(job_id):
                for held in self._held.pop(job_id, ()):
                    held.allowance.leave(held.taken, None, self.now())
            case _:
                pass  # no end of a job
