"""Jobs by idempotency key: a repeated request gets the same answer."""

from collections.abc import Mapping

from shoal.coordinator.answer import Answer
from shoal.domain.errors import KeyReused
from shoal.domain.ids import JobId
from shoal.domain.work import Job, Policy, Privacy
from shoal.store.port import Store


class IdempotencyIndex:
    """The jobs that stand under an owner's idempotency key.

    Those that are open are known here, those that have ended to the store.
    """

    def __init__(self, store: Store, answers: Mapping[JobId, Answer]) -> None:
        self._store = store
        self._answers = answers
        self._open: dict[tuple[str, str], Job] = {}  # by owner and key
        self._names: dict[JobId, tuple[str, str]] = {}  # the same, by job

    async def find_answer(self, job: Job) -> Answer | None:
        """Return the answer to the job that stands under the same key, if there is one.

        Whoever is told that there is none, and adds ``job`` without waiting for
        anything in between, is the only one to do so.

        Raises KeyReused if that job asks for something else, StoreError.
        """
        if not job.idempotency_key:
            return None
        return self._same(job) or await self._stored(job) or self._same(job)

    def add(self, job: Job) -> None:
        """Note that a job is open."""
        if job.idempotency_key:
            name = (job.owner, job.idempotency_key)
            self._open[name] = job
            self._names[job.id] = name

    def check_unused(self, job: Job) -> None:
        """Raise KeyReused if an open job stands under the same key."""
        if (job.owner, job.idempotency_key) in self._open:
            raise KeyReused("the idempotency key was said to be fresh, and is in use")

    def remove(self, job_id: JobId) -> None:
        """Note that a job has ended."""
        if (name := self._names.pop(job_id, None)) is not None:
            del self._open[name]

    def _same(self, job: Job) -> Answer | None:
        known = self._open.get((job.owner, job.idempotency_key))
        if known is None:
            return None
        _check_same(job, known)
        return self._answers[known.id]

    async def _stored(self, job: Job) -> Answer | None:
        """Return the answer to a job that was done.

        One that ended otherwise came to nothing, and may be asked for again.
        """
        stored = await self._store.by_idempotency_key(job.owner, job.idempotency_key)
        if stored is None or stored.outcome is None:
            return None
        _check_same(job, stored.job)
        return Answer.completed(stored.job.id, stored.outcome)


def _check_same(job: Job, known: Job) -> None:
    if job.work != known.work or _audience(job) != _audience(known):
        raise KeyReused(
            f"the Idempotency-Key {job.idempotency_key!r:.100} stands for another "
            "request: what is asked is not the same; send a new key with a new request "
            "(in Python: with_options(key=…))"
        )


def _audience(job: Job) -> tuple[str, Privacy, Policy]:
    return job.terms.user, job.terms.privacy, job.terms.policy
