"""Lets callers in, for what their keys allow, and as much as they allow."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiohttp import web

from shoal.domain.credentials import Key, Scope, day_of, tokens_to_read, usage_of
from shoal.domain.errors import (
    Cancelled,
    Forbidden,
    KeyExpired,
    KeyRevoked,
    Unauthorized,
)
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.outcome import Outcome, Piece, Usage
from shoal.domain.work import Call, Embedding, Job, Lane, Task, Work
from shoal.gateway.allowance import Allowance, Allowances, Taken
from shoal.gateway.auth import REVOKED, Keyring
from shoal.gateway.detached import Detached
from shoal.gateway.loopback import is_local
from shoal.runtime.book import Book
from shoal.runtime.clock import Clock
from shoal.runtime.failures import Failures
from shoal.runtime.hub import Hub
from shoal.runtime.reading import Reader
from shoal.runtime.spot_checks import CHECKER
from shoal.store.port import KeyStore

ANSWER_GUESS = 256  # tokens, where the request names no limit

FIRST_KEY = "default"

LOOPBACK = Key("", "loopback", b"", "", Scope.USE, 0.0)
"""Who asks from this machine without a key, where that is allowed."""

OPEN = Key("", "open", b"", "", Scope.USE, 0.0)
"""Who asks for jobs without a key, where that is allowed to everybody."""

RESERVED = (FIRST_KEY, LOOPBACK.name, OPEN.name, CHECKER)
"""Names of keys that are in no book."""


async def key_book(store: KeyStore) -> Book[Key]:
    """Open the book of the keys that are stored.  Raises StoreError."""
    kept = await store.keys()
    return Book("key", kept, store.add_key, store.revoke_key, RESERVED)


Pay: TypeAlias = Callable[[Job], Awaitable[Job]]
"""Has a job paid for, and returns it with what the payment is known by."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request; ``headers`` are for its answer, and filled in later."""

    key: Key
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the jobs it asks for belong to."""
        return self.key.name

    def may(self, scope: Scope) -> bool:
        """Say whether its key is good for that."""
        return self.key.scope.covers(scope)


CALLER = web.RequestKey("caller", Caller)


class Access:
    """Every request's way in: first ``admit``, and ``answering`` to have a job done."""

    def __init__(
        self,
        hub: Hub,
        clock: Clock,
        keyring: Keyring,
        store: KeyStore,
        *,
        open_loopback: bool = False,
    ) -> None:
        self.keyring = keyring
        self._hub = hub
        self._clock = clock
        self._store = store
        self._open_loopback = open_loopback
        self._failures = Failures()
        self._allowances = Allowances()
        self._detached = Detached(clock.now)
        hub.watch(self._detached.saw)

    async def admit(
        self,
        request: web.Request,
        needed: Scope,
        *,
        exact: bool = False,
        stranger: Key | None = None,
    ) -> Caller:
        """Return who sends a request, if they may do what it is for.

        ``stranger`` is who it is that shows no key at all, if such may come in.

        Raises Unauthorized (for ``exact``, see ``Keyring.identify``), Forbidden, or
        TooManyFailures.
        """
        caller = Caller(await self._key(request, stranger, exact=exact))
        request[CALLER] = caller
        if not caller.may(needed):
            raise Forbidden(
                f"the API key {caller.name} has the scope {caller.key.scope.value}; "
                f"this takes one with the scope {needed.value}"
            )
        return caller

    @asynccontextmanager
    async def answering(
        self, job: Job, caller: Caller, pay: Pay | None = None
    ) -> AsyncIterator[Reader]:
        """Have ``job`` done for the length of the block, see ``Hub.answering``.

        ``pay`` is asked last before it is handed over.

        Raises RateLimited, DaySpent, BudgetSpent or InvalidRequest if the caller's key
        does not allow it, and KeyRevoked if it was revoked meanwhile.
        """
        self.check(caller)
        allowance = self._allowances.of(caller.key, self._clock.now())
        taken = None
        if allowance is not None:
            taken = await self._take(allowance, job.work, caller)
        used: int | None = 0  # until the job is accepted
        try:
            if pay is not None:
                job = await pay(job)
            async with self._hub.answering(job) as answer:
                self._check(caller.key, answer.job_id)
                reader = _Guarded(answer, self.keyring, caller.key)
                used = None
                try:
                    yield reader
                finally:
                    if reader.ended is not None:
                        used = _sum(usage_of(job.work, reader.ended))
        finally:
            if allowance is not None and taken is not None:
                if used is None and reader.job_id in self._hub.pool.jobs:
                    self._detached.hold(reader.job_id, job.work, allowance, taken)
                else:
                    allowance.leave(taken, used, self._clock.now())

    def count_call(self, caller: Caller) -> None:
        """Count a call of a function as a request; it takes no tokens.

        Raises KeyRevoked or RateLimited.
        """
        self.check(caller)
        now = self._clock.now()
        allowance = self._allowances.of(caller.key, now)
        if allowance is not None:
            allowance.leave(allowance.enter(0, now), 0, now)

    def check(self, caller: Caller) -> None:
        """Raise KeyRevoked if a caller that was let in is not welcome any more."""
        self.keyring.check(caller.key)

    async def revoke(self, key: Key) -> Key:
        """End a key and all that is done under it; return it as it is now.

        Raises StoreError, but then too nothing is done under it until the next start.
        """
        try:
            return await self.keyring.book.revoke(key, self._clock.wall())
        finally:
            self._allowances.forget(key)
            if key.revoked_at is None:  # else the name is another key's by now
                self._hub.withdraw_of(key.name, REVOKED)

    def forget_ended(self, before: float) -> None:
        """Forget the keys that were revoked or had expired before that Unix time."""
        book = self.keyring.book
        book.forget_ended(before)
        self._allowances.keep(key.id for key in book)

    def check_address(self, request: web.Request) -> None:
        """Raise TooManyFailures if nothing from there is to be looked at now."""
        self._failures.check(request.remote or "", self._clock.now())

    async def note_failure(self, request: web.Request) -> None:
        """Note that a request guessed a secret wrongly; wait if others did before.

        Raises TooManyFailures if there were too many.
        """
        slowness = self._failures.failed(request.remote or "", self._clock.now())
        await asyncio.sleep(slowness)

    async def _key(
        self, request: web.Request, stranger: Key | None, *, exact: bool
    ) -> Key:
        authorization = request.headers.get("Authorization")
        address = request.remote or ""
        if (
            self._open_loopback
            and authorization is None
            and is_local(address, request.headers)
        ):
            return LOOPBACK
        if stranger is not None and authorization is None:
            return stranger
        self.check_address(request)
        try:
            return self.keyring.identify(authorization, self._clock.wall(), exact=exact)
        except (KeyExpired, KeyRevoked):
            raise  # nobody guesses such a key
        except Unauthorized:
            if authorization:
                await self.note_failure(request)
            raise

    async def _take(self, allowance: Allowance, work: Work, caller: Caller) -> Taken:
        """Take what a job may need, if there is as much; note what is left then."""
        try:
            taken = allowance.enter(_tokens_of(work), self._clock.now())
        finally:
            caller.headers.update(allowance.headers(self._clock.now()))
        if not caller.key.quota.stored:
            return taken
        at = self._clock.wall()
        try:
            stored = await self._store.used(caller.name, day_of(at))
            allowance.check_budget(taken, stored, at)
        except BaseException:
            allowance.leave(taken, 0, self._clock.now())
            raise
        return taken

    def _check(self, key: Key, job_id: JobId) -> None:
        """End a job whose key was revoked while it was on its way into the pool."""
        try:
            self.keyring.check(key)
        except KeyRevoked:
            self._hub.withdraw(job_id, REVOKED)
            raise


class _Guarded:
    """A reader that knows whose key its answer is for."""

    def __init__(self, reader: Reader, keyring: Keyring, key: Key) -> None:
        self.job_id = reader.job_id
        # Not wrapped, for it is the path of every token.
        self.read: Callable[[], Coroutine[Any, Any, list[Piece]]] = reader.read
        self.ended: Outcome | None = None
        self._reader = reader
        self._keyring = keyring
        self._key = key

    @property
    def worker_id(self) -> WorkerId | None:
        return self._reader.worker_id

    @property
    def attempts(self) -> int:
        return self._reader.attempts

    async def outcome(self) -> Outcome:
        try:
            self.ended = await self._reader.outcome()
        except Cancelled:
            self._keyring.check(self._key)  # which says it better
            raise
        return self.ended


def _tokens_of(work: Work) -> int:
    """Return about how many tokens a job will take."""
    if isinstance(work, Embedding):
        return tokens_to_read(work)
    if isinstance(work, Call | Lane):
        return 0
    if isinstance(work, Task):
        return tokens_to_read(work) + ANSWER_GUESS
    choices = work.options.get("n")
    answers = choices if isinstance(choices, int) and choices > 0 else 1
    return tokens_to_read(work) + answers * (work.max_tokens or ANSWER_GUESS)


def _sum(usage: Usage) -> int:
    return usage.prompt_tokens + usage.completion_tokens
