"""The answers to all open jobs, from submission until the job ends."""

import asyncio
from collections.abc import Callable, KeysView, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol, TypeAlias

from msgspec.structs import asdict, replace

from shoal.coordinator.answer import Answer, JobListener
from shoal.coordinator.answer_reader import AnswerCursor
from shoal.coordinator.blob_transfer import BlobTransfer
from shoal.domain import errors
from shoal.domain.errors import KeyReused, ShoalError, StoreError
from shoal.domain.facts import JobCancelled, JobExpired, JobFailed, LoadState
from shoal.domain.ids import JobId
from shoal.domain.job import Job, TimeLimit
from shoal.domain.outcome import Fault
from shoal.domain.work import Chat, Inference
from shoal.pool.context_limits import text_max
from shoal.store.port import Store

FAULT_ERRORS: Mapping[Fault, type[errors.ShoalError]] = {
    Fault.WORKER: errors.JobError,
    Fault.ENGINE: errors.JobError,
    Fault.REQUEST: errors.InvalidRequest,
    Fault.CONTEXT: errors.ContextExceeded,
    Fault.SIZE: errors.TooLarge,
    Fault.VALUES: errors.Unprocessable,
}
LIMIT_ERRORS: Mapping[TimeLimit, type[errors.ShoalError]] = {
    TimeLimit.QUEUE: errors.NoWorker,
    TimeLimit.FIRST_OUTPUT: errors.NoFirstOutput,
    TimeLimit.SILENCE: errors.OutputStalled,
    TimeLimit.TOTAL: errors.TookTooLong,
}


OnAccepted: TypeAlias = Callable[[ShoalError | None], None]
"""Is called when a job is accepted, or with the error that it was refused with."""


class OpenAnswers(dict[JobId, Answer]):
    """Answers by job id.  Only the hub and its effects open and close them.

    An open job holds its idempotency key and the blobs that it refers to.  Until the
    store has accepted it, ``resolve`` is awaited by its clients.
    """

    def __init__(self, store: Store, blobs: BlobTransfer) -> None:
        super().__init__()
        self._store = store
        self._blobs = blobs
        self._jobs_by_key: dict[tuple[str, str], Job] = {}  # owner, idempotency key
        self._keys: dict[JobId, tuple[str, str]] = {}
        # Jobs that are not accepted yet, with their owners and what is called then.
        self._accepting: dict[JobId, tuple[str, list[OnAccepted]]] = {}

    @property
    def unaccepted(self) -> KeysView[JobId]:
        """The jobs that were submitted and are neither stored nor refused yet."""
        return self._accepting.keys()

    def unaccepted_of(self, owner: str) -> list[JobId]:
        """Return those of one owner."""
        return [job for job, (its, _) in self._accepting.items() if its == owner]

    def submit(self, job: Job, listener: JobListener | None = None) -> Answer:
        """Open the answer of a new job, which is not accepted yet."""
        self._accepting[job.id] = job.owner, []
        return self._open(job, listener)

    def restore(self, job: Job) -> None:
        """Open the answer of a job that was accepted before a restart."""
        self._open(job, None)

    def close(self, job_id: JobId) -> None:
        """Drop the answer of a job that has ended, or that was refused."""
        del self[job_id]
        if (key := self._keys.pop(job_id, None)) is not None:
            del self._jobs_by_key[key]
        self._blobs.unpin(job_id)

    # Idempotency.

    async def find(self, job: Job) -> Answer | None:
        """Return the answer to the job with the same idempotency key, if there is one.

        A caller that gets None and submits ``job`` without awaiting anything in
        between is the only one to do so.

        Raises KeyReused if that job requests something else, StoreError.
        """
        if not job.idempotency_key:
            return None
        return self._open_one(job) or await self._stored_one(job) or self._open_one(job)

    async def find_submitted(self, job: Job) -> Answer | None:
        """Return the answer to this very job, if it was submitted and accepted before.

        Raises the error of a job that ended without an outcome; StoreError.
        """
        if (answer := self.get(job.id)) is not None:
            return answer
        stored = await self._store.job(job.id)
        if stored is None:
            return None
        if stored.outcome is not None:
            return Answer.completed(job.id, stored.outcome)
        for each in await self._store.history_since(job.id, 0):
            if isinstance(each.fact, JobFailed | JobCancelled | JobExpired):
                raise error_of(each.fact)
        raise AssertionError(f"{job.id} is open, and has no answer")

    def check_unused(self, job: Job) -> None:
        """Raise KeyReused if an open job has the same idempotency key."""
        if (job.owner, job.idempotency_key) in self._jobs_by_key:
            raise KeyReused("the idempotency key was marked as fresh, but is in use")

    # Acceptance.

    async def wait_accepted(self, job_id: JobId) -> None:
        """Wait until a job is accepted; at once if it is already.

        Raises the error it was refused with.
        """
        if job_id in self._accepting:
            accepted = asyncio.get_running_loop().create_future()
            self.when_accepted(job_id, partial(_resolve, accepted))
            await accepted
        answer = self.get(job_id)
        if answer is not None and isinstance(answer.end, StoreError):
            raise answer.end  # refused after others of its batch were decided

    def when_accepted(self, job_id: JobId, call: OnAccepted) -> None:
        """Call ``call`` once a job is accepted or refused; at once if it was accepted.

        If it is refused, ``call`` gets the error.
        """
        if (accepting := self._accepting.get(job_id)) is None:
            call(None)
        else:
            accepting[1].append(call)

    def resolve(self, job_id: JobId, error: ShoalError | None = None) -> None:
        """Resolve a submission: accepted, or refused with ``error``.

        The first call counts: one that was refused stays so.
        """
        if job_id not in self._accepting:
            return
        _, calls = self._accepting.pop(job_id)
        for call in calls:
            call(error)
        if error is None and (listener := self[job_id].listener) is not None:
            listener.on_accepted(job_id)

    def _open(self, job: Job, listener: JobListener | None) -> Answer:
        answer = self[job.id] = Answer(job.id, listener, text_max(job.work))
        if job.idempotency_key:
            key = (job.owner, job.idempotency_key)
            self._jobs_by_key[key] = job
            self._keys[job.id] = key
        self._blobs.pin(job)
        return answer

    def _open_one(self, job: Job) -> Answer | None:
        known = self._jobs_by_key.get((job.owner, job.idempotency_key))
        if known is None:
            return None
        check_same_request(job, known)
        return self[known.id]

    async def _stored_one(self, job: Job) -> Answer | None:
        """Return the answer to a job that is done.

        A job that ended otherwise has no answer, and may be submitted again.
        """
        stored = await self._store.by_idempotency_key(job.owner, job.idempotency_key)
        if stored is None or stored.outcome is None:
            return None
        check_same_request(job, stored.job)
        return Answer.completed(stored.job.id, stored.outcome)


def _resolve(accepted: asyncio.Future[None], error: ShoalError | None) -> None:
    if accepted.done():
        return  # its caller has left
    if error is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(error)
        accepted.exception()  # retrieved: its caller may leave at this moment


def check_same_request(job: Job, known: Job) -> None:
    """Raise KeyReused if two jobs of one idempotency key request different things."""
    if (
        not _same_work(job, known)
        or not _same_payment(job, known)
        or _request_terms(job) != _request_terms(known)
    ):
        raise KeyReused(
            f"the Idempotency-Key {job.idempotency_key!r:.100} was used for a "
            "different request; send a new key with a new request (in Python: "
            "with_options(key=…))"
        )


def _same_work(job: Job, known: Job) -> bool:
    """Compare without what depends on the workers, which come and go.

    That is the tools of which either was relieved, and the model that an alias got.
    """
    one, other = job.work, known.work
    if (alias := job.terms.alias) and alias == known.terms.alias:
        assert isinstance(other, Inference), "an alias stands for models"
        other = replace(other, model=one.model)
    left_out = job.terms.left_out or known.terms.left_out
    if left_out and isinstance(one, Chat) and isinstance(other, Chat):
        return one.without_tools() == other.without_tools()
    return one == other


def _same_payment(job: Job, known: Job) -> bool:
    """Compare the references that clients gave: one that we settled has another."""
    one, other = job.terms, known.terms
    return one.settled or other.settled or one.payment_ref == other.payment_ref


def _request_terms(job: Job) -> tuple[object, ...]:
    terms = job.terms
    # Of what an API returns with the answer, it matters whether it was stored: an
    # answer that says so must be found again.  The rest, such as the time, may differ.
    stored = bool(terms.api_fields)
    return terms.user, terms.privacy, terms.policy, terms.webhook, stored


class CarriedJobs(Protocol):
    """Open jobs that the pool does not know, because call streams carry them.

    The port to components that run jobs for the hub; see ``shoal.calls.durable``.
    """

    def has(self, job_id: JobId) -> bool:
        """Return whether a job is open."""

    def cancel(self, job_id: JobId, reason: str) -> bool:
        """Cancel a job; return whether it was open."""

    def cancel_all_of(self, owner: str, reason: str) -> int:
        """Cancel all open jobs of an owner; return their number."""

    def observe(self, job_id: JobId) -> AbstractContextManager[AnswerCursor | None]:
        """Read a job's answer; None if the job is not open."""

    async def stored(self) -> None:
        """Wait until all that has happened so far is in the store.

        Raises StoreError.
        """


class NoCarriedJobs:
    """There are none."""

    def has(self, job_id: JobId) -> bool:
        return False

    def cancel(self, job_id: JobId, reason: str) -> bool:
        return False

    def cancel_all_of(self, owner: str, reason: str) -> int:
        return 0

    def observe(self, job_id: JobId) -> AbstractContextManager[AnswerCursor | None]:
        return nullcontext(None)

    async def stored(self) -> None:
        pass


def error_of(fact: JobFailed | JobCancelled | JobExpired) -> errors.ShoalError:
    """Return the error that clients of the job get."""
    match fact:
        case JobFailed(error=error, lost=True):
            return errors.WorkerLost(error)
        case JobFailed(error=error, fault=Fault.WORKER, exception=exception):
            return errors.JobError(error, exception)
        case JobFailed(error=error, fault=fault):
            return FAULT_ERRORS[fault](error)
        case JobCancelled(reason=reason):
            return errors.Cancelled(reason)
        case JobExpired(error=error, retry_after=seconds, loading=LoadState() as load):
            return errors.ModelLoading(error, seconds, asdict(load))
        case JobExpired(error=error, retry_after=seconds) if seconds:
            return errors.NoWorker(error, seconds)
        case JobExpired(limit=limit, error=error):
            return LIMIT_ERRORS[limit](error)
