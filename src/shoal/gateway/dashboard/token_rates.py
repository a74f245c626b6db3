"""Estimates how many tokens a second each worker writes.

The characters of open answers are sampled: nothing is counted while tokens pass.  A
token is taken for four characters, and the tokens that a worker reports at the end of
an answer correct the estimate for the rest of it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from shoal.coordinator.answer import Answer
from shoal.domain.facts import Fact, JobCompleted
from shoal.domain.ids import JobId, WorkerId
from shoal.pool.open_job import CHARACTERS_PER_TOKEN
from shoal.pool.worker import Worker


class TokenRates:
    """The tokens of each worker since the last sample.

    ``answers`` are those of all open jobs.
    """

    def __init__(self, answers: Mapping[JobId, Answer], now: float) -> None:
        self._answers = answers
        self._sampled_at = now
        # Characters at the last sample.  What open answers have by now took longer than
        # the time until the first sample.
        self._sizes = {job_id: answer.size for job_id, answer in answers.items()}
        self._tokens: dict[WorkerId, float] = defaultdict(float)  # since then
        self._completed = 0  # jobs since then

    def on_fact(self, fact: Fact) -> None:
        """Count what a job wrote between the last sample and its end."""
        if not isinstance(fact, JobCompleted):
            return
        self._completed += 1
        answer = self._answers.get(fact.job_id)
        if answer is None or answer.worker_id is None:
            return
        tokens = answer.size / CHARACTERS_PER_TOKEN
        if (usage := fact.outcome.usage) is not None:
            tokens = float(usage.completion_tokens)
        if answer.size:
            tokens *= _growth(self._sizes, answer) / answer.size
        self._tokens[answer.worker_id] += tokens

    def sample(
        self, workers: Iterable[Worker], now: float
    ) -> tuple[dict[WorkerId, float], float]:
        """Return the tokens a second of each worker that wrote, and the jobs a second.

        Both are of the time since the last sample.
        """
        seconds = now - self._sampled_at
        tokens, completed = self._tokens, self._completed
        sizes: dict[JobId, int] = {}
        answers, before = self._answers, self._sizes
        for worker in workers:
            for job_id in worker.leases:
                answer = answers.get(job_id)
                if answer is None or not answer.size or answer.worker_id != worker.id:
                    continue
                sizes[job_id] = answer.size
                if grown := _growth(before, answer):
                    tokens[worker.id] += grown / CHARACTERS_PER_TOKEN
        self._sampled_at = now
        self._sizes, self._tokens, self._completed = sizes, defaultdict(float), 0
        if seconds <= 0:
            return {}, 0.0
        return (
            {worker: round(count / seconds, 1) for worker, count in tokens.items()},
            round(completed / seconds, 1),
        )


def _growth(before: Mapping[JobId, int], answer: Answer) -> int:
    """Return the characters that an answer has grown by."""
    # A successor that starts over makes it shorter.
    return max(0, answer.size - before.get(answer.job_id, 0))
