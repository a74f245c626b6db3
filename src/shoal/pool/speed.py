"""Moving averages of the speed of workers and the duration of jobs."""

from collections import Counter
from dataclasses import dataclass, field

from shoal.domain.outcome import Outcome
from shoal.domain.work import JobKind
from shoal.pool.open_job import CHARACTERS_PER_TOKEN, OpenJob
from shoal.pool.worker import Worker

NEWEST = 0.25  # the share that the newest measurement has in an average
TOKENS_MIN = 8  # shorter answers do not measure a worker's speed


@dataclass(slots=True)
class SpeedEstimates:
    """Estimates from completed jobs."""

    typical_pace: float | None = None  # tokens per second of one answer, of all workers
    job_seconds: dict[str, float] = field(default_factory=dict)
    """How long workers take for a job, by model."""

    jobs_done: Counter[str] = field(default_factory=Counter)
    """Jobs that these durations are of, by model."""

    def measure(
        self, job: OpenJob, worker: Worker, outcome: Outcome, now: float
    ) -> None:
        """Update the estimates by a job that ``worker`` completed.

        The whole duration counts, not only from the first piece: some workers send the
        answer in one piece at the end.
        """
        if job.kind is JobKind.CALL_STREAM or job.gang is not None:
            return  # their durations say nothing about those of other jobs
        model = job.model
        seconds = now - job.leased_at
        before = self.job_seconds.get(model)
        self.job_seconds[model] = _average(before, seconds)
        self.jobs_done[model] += 1
        if job.kind is JobKind.CALL:
            worker.record_call(seconds)
            return
        if outcome.usage is not None:
            tokens = outcome.usage.completion_tokens
        else:
            tokens = len(outcome.text) // CHARACTERS_PER_TOKEN
        if tokens < TOKENS_MIN or seconds <= 0:
            return
        worker.pace = _average(worker.pace, tokens / seconds)
        self.typical_pace = _average(self.typical_pace, tokens / seconds)

    def forget(self, model: str) -> None:
        """Drop the estimate of a model that no worker offers any more."""
        self.job_seconds.pop(model, None)
        self.jobs_done.pop(model, None)


def _average(before: float | None, value: float) -> float:
    return value if before is None else before + NEWEST * (value - before)
