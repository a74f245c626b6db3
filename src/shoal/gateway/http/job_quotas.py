"""Runs jobs within the quotas of their keys."""

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from functools import partial
from typing import TypeAlias

from shoal.coordinator.answer_reader import AnswerCursor
from shoal.coordinator.hub import Hub
from shoal.domain.credentials import Key, day_of, tokens_to_read, usage_of
from shoal.domain.errors import KeyRevoked, Unauthorized
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.outcome import AnswerPiece
from shoal.domain.work import (
    Call,
    CallStream,
    Chat,
    Completion,
    Embedding,
    ModelOrder,
    Rerank,
    Task,
    Transcription,
    Work,
)
from shoal.gateway.http import quotas
from shoal.gateway.http.authentication import REVOKED, Keyring
from shoal.store.port import KeyStore
from shoal.transports.clock import Clock, Timer

ANSWER_GUESS = 256  # tokens of an answer without a limit

Pay: TypeAlias = Callable[[Job], Awaitable[Job]]
"""Collects the payment for a job, and returns the job with its reference."""


class JobQuotas:
    """Reserves what jobs may use of their keys' quotas, until they end."""

    def __init__(
        self, hub: Hub, clock: Clock, keyring: Keyring, store: KeyStore
    ) -> None:
        self._hub = hub
        self._clock = clock
        self._keyring = keyring
        self._store = store
        self._limiters = quotas.KeyLimiters()
        self._detached_jobs = quotas.DetachedReservations(clock.now)
        hub.subscribe(self._detached_jobs.on_facts)
        for restored in hub.pool.jobs.values():
            self._reserve_again(restored.job)

    def run_job(
        self,
        job: Job,
        key: Key,
        headers: dict[str, str],
        pay: Pay | None = None,
        *,
        early: bool = False,
        seen: Sequence[AnswerPiece] | None = None,
    ) -> AbstractAsyncContextManager[AnswerCursor]:
        """Run ``job`` for the length of the block, see ``Hub.run_job``.

        The limits a minute are added to ``headers``.  ``pay`` is called just before the
        job is submitted.  A restored job that a client comes back to has its tokens
        reserved.

        Raises RateLimited, DaySpent, BudgetSpent or InvalidRequest if the job exceeds
        the key's quota, and KeyRevoked or KeyExpired if the key has ended meanwhile;
        StoreError.
        """
        limiter = self._limiters.of(key, self._clock.now())
        check = partial(self._check, key)
        run = partial(self._hub.run_job, early=early, check=check, seen=seen)
        if seen is not None and job.id in self._hub.pool.jobs:
            limiter = None
        if limiter is None and pay is None and key.expires_at is None:
            return run(job)  # as most do
        return self._run_limited(job, key, headers, pay, limiter, run)

    @asynccontextmanager
    async def _run_limited(
        self,
        job: Job,
        key: Key,
        headers: dict[str, str],
        pay: Pay | None,
        limiter: quotas.KeyLimiter | None,
        run: Callable[[Job], AbstractAsyncContextManager[AnswerCursor]],
    ) -> AsyncIterator[AnswerCursor]:
        reservation, attaches = None, False
        if limiter is not None:
            # A job to attach to has reserved its own tokens already.
            attaches = await self._hub.is_duplicate(job)
            tokens = 0 if attaches else _estimated_tokens(job.work)
            reservation = await self._reserve(limiter, tokens, key, headers)
        used: int | None = 0  # until the job is accepted
        try:
            if pay is not None:
                job = await pay(job)
            async with run(job) as reader:
                check = partial(self._check, key, reader.job_id)
                used = 0 if attaches else None
                try:
                    with self._until_expiry(key.expires_at, check):
                        yield reader
                finally:
                    if reader.answer.refused:
                        used = 0
                    elif limiter and reader.ended is not None and not attaches:
                        used = usage_of(job.work, reader.ended).tokens
        finally:
            if limiter is not None and reservation is not None:
                if used is None and reader.job_id in self._hub.pool.jobs:
                    self._detached_jobs.hold(
                        reader.job_id, job.work, limiter, reservation
                    )
                else:
                    limiter.settle(reservation, used, self._clock.now())

    def count_call(self, key: Key) -> None:
        """Count a function call as a request without tokens.  Raises RateLimited."""
        now = self._clock.now()
        limiter = self._limiters.of(key, now)
        if limiter is not None:
            limiter.settle(limiter.reserve(0, now), 0, now)

    def forget(self, key: Key) -> None:
        """Forget a key."""
        self._limiters.forget(key)

    def retain(self, ids: Iterable[str]) -> None:
        """Forget all keys but those with these ids."""
        self._limiters.retain(ids)

    def _reserve_again(self, job: Job) -> None:
        """Reserve the tokens of a job that was open before a restart, until it ends."""
        key = self._keyring.cache.by_name(job.owner)  # keys of the start have no limits
        limiter = key and self._limiters.of(key, self._clock.now())
        if limiter:
            reservation = limiter.restore(_estimated_tokens(job.work))
            self._detached_jobs.hold(job.id, job.work, limiter, reservation)

    async def _reserve(
        self, limiter: quotas.KeyLimiter, tokens: int, key: Key, headers: dict[str, str]
    ) -> quotas.Reservation:
        """Reserve the tokens that a job may use; add the limits to the headers."""
        try:
            reservation = limiter.reserve(tokens, self._clock.now())
        finally:
            headers.update(limiter.headers(self._clock.now()))
        if not (tokens and key.quota.needs_stored_usage):
            return reservation
        at = self._clock.wall()
        try:
            stored = await self._store.usage_of(key.name, day_of(at))
            limiter.check_budget(reservation, stored, at)
        except BaseException:
            limiter.settle(reservation, 0, self._clock.now())
            raise
        return reservation

    def _check(self, key: Key, job_id: JobId) -> None:
        """Cancel a job whose key has ended.  Raises KeyRevoked or KeyExpired."""
        try:
            self._keyring.ensure_active(key, self._clock.wall())
        except Unauthorized as error:
            reason = REVOKED if isinstance(error, KeyRevoked) else str(error)
            self._hub.cancel(job_id, reason)
            raise

    @contextmanager
    def _until_expiry(
        self, expires_at: float | None, check: Callable[[], None]
    ) -> Iterator[None]:
        """Check a job when its key expires, if that is within the block."""
        if expires_at is None:
            yield
            return
        timer: Timer | None = None

        def watch() -> None:
            nonlocal timer
            with suppress(Unauthorized):  # the reader of the job raises it
                check()
                # Again if the clock is set back meanwhile.
                seconds = expires_at - self._clock.wall()
                timer = self._clock.call_at(self._clock.now() + seconds, watch)

        watch()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


def _estimated_tokens(work: Work) -> int:
    """Return the estimated tokens of a job."""
    match work:
        case Chat() | Completion():
            choices = work.options.get("n")
            answers = choices if isinstance(choices, int) and choices > 0 else 1
            return tokens_to_read(work) + answers * (work.max_tokens or ANSWER_GUESS)
        case Embedding() | Rerank():
            return tokens_to_read(work)
        case Task() | Transcription():
            return tokens_to_read(work) + ANSWER_GUESS
        case Call() | CallStream() | ModelOrder():
            return 0
