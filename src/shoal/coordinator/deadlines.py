"""Timers that enforce jobs' time limits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.coordinator.answer import Answer
from shoal.domain.ids import JobId
from shoal.domain.job import TimeLimit
from shoal.pool.inputs import HubInput, LimitReached
from shoal.pool.react import next_limit
from shoal.pool.state import PoolState
from shoal.transports.clock import Clock, Timer


@dataclass(slots=True, eq=False)
class Deadlines:
    """A timer for each open job, set to the limit that it may reach next."""

    _pool: PoolState
    _answers: Mapping[JobId, Answer]
    _clock: Clock
    _post: Callable[[HubInput], None]
    # The due times, and the timers.
    _timers: dict[JobId, tuple[float, Timer]] = field(default_factory=dict)

    def check(self, job_id: JobId) -> None:
        """Check a job's limits now, and again when the next may be reached."""
        job = self._pool.jobs.get(job_id)
        if job is None:
            self.forget(job_id)
            return
        answer = self._answers[job_id]
        # While a new lease is being stored, the answer has the previous one.
        hedged = job.hedge and job.hedge.lease
        current = job.worker_id and answer.lease in (job.lease, hedged)
        last_output = answer.last_output if current else None
        due = next_limit(self._pool, job, self._clock.now(), last_output)
        if isinstance(due, TimeLimit):
            self.forget(job_id)
            self._post(LimitReached(job_id, due))
            return
        if (earlier := self._timers.get(job_id)) is not None:
            if earlier[0] <= due:
                return  # rescheduled when it fires: most jobs end before
            earlier[1].cancel()
        timer = self._clock.call_at(due, lambda: self._fire(job_id))
        self._timers[job_id] = (due, timer)

    def forget(self, job_id: JobId) -> None:
        """Cancel a job's timer."""
        if (timer := self._timers.pop(job_id, None)) is not None:
            timer[1].cancel()

    def _fire(self, job_id: JobId) -> None:
        del self._timers[job_id]
        self.check(job_id)

    def stop(self) -> None:
        """Cancel all timers."""
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
