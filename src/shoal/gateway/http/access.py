"""Authorizes requests, by API key or by the session of a browser."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import msgspec
from aiohttp import web
from multidict import CIMultiDictProxy

from shoal.coordinator.answer_reader import AnswerCursor
from shoal.coordinator.auth_throttle import AuthThrottle, CredentialKind
from shoal.coordinator.call_grants import LeasedCall
from shoal.coordinator.credential_cache import CredentialCache
from shoal.coordinator.hub import Hub
from shoal.coordinator.spot_checks import CHECK_OWNER
from shoal.domain import errors
from shoal.domain.credentials import (
    CALL_PREFIX,
    BrowserSession,
    Key,
    Scope,
    permitted_priority,
    without_fingerprint,
)
from shoal.domain.ids import JobId
from shoal.domain.job import Job, Priority
from shoal.gateway.http import authentication
from shoal.gateway.http.browser_sessions import BrowserSessions
from shoal.gateway.http.job_quotas import JobQuotas, Pay
from shoal.gateway.http.list_limits import ListLimits
from shoal.gateway.http.request_record import record_of
from shoal.gateway.job_service import JobService, LocalJobs
from shoal.store.port import KeyStore
from shoal.transports import http_server
from shoal.transports.clock import Clock

FIRST_KEY = "default"
SUBMITTED_MAX = 1 << 14  # jobs that a running call may read and cancel: the newest

A_GUESS = "1"  # a secret that a person chose

LOOPBACK_KEY = Key("", "loopback", b"", "", Scope.USE, 0.0)
"""The key of requests without one from this machine, where those are allowed."""

ANONYMOUS_KEY = Key("", "open", b"", "", Scope.USE, 0.0, priority_max=Priority.NORMAL)
"""The key of requests without one, where a protocol's API is open.

Clients without a key do not overtake those with one.
"""

KEYLESS = {each.name: each for each in (LOOPBACK_KEY, ANONYMOUS_KEY)}
"""The keys of requests without one, by their names."""

RESERVED_NAMES = (FIRST_KEY, LOOPBACK_KEY.name, ANONYMOUS_KEY.name, CHECK_OWNER)
"""Names of keys that are not in the key cache."""


async def key_cache(store: KeyStore) -> CredentialCache[Key]:
    """Load the stored keys into a cache.  Raises StoreError."""
    return CredentialCache("key", await store.keys.all(), store.keys, RESERVED_NAMES)


class ApiCaller(msgspec.Struct, frozen=True):
    """The sender of a request; ``headers`` are added to the response.

    ``session`` is that of its browser, if that is what authorized it; ``call`` is the
    running call, if that did, and ``submitted`` the jobs that the call has submitted,
    the newest last.
    """

    key: Key
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    session: BrowserSession | None = None
    call: LeasedCall | None = None
    submitted: dict[JobId, None] = msgspec.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The owner of its jobs."""
        return self.key.name

    @property
    def is_keyless(self) -> bool:
        """Whether it has no key: then its name is that of all who have none."""
        return self.key in (LOOPBACK_KEY, ANONYMOUS_KEY)

    def has_scope(self, scope: Scope) -> bool:
        """Say whether its key covers a scope."""
        return self.key.scope.covers(scope)

    def owns(self, owner: str, job_id: JobId) -> bool:
        """Say whether a job is its own; a running call has those that it submitted."""
        mine = self.call is None or job_id in self.submitted
        return owner == self.name and mine

    def on_submitted(self, job_id: JobId) -> None:
        """Remember a job that a running call submits."""
        if self.call is not None:
            self.submitted[job_id] = None
            if len(self.submitted) > SUBMITTED_MAX:
                del self.submitted[next(iter(self.submitted))]

    def permitted_priority(self, wanted: Priority | None) -> Priority:
        """Return the priority of a job, see ``permitted_priority``.

        Calls of a task are of a high priority as far as its owner may give one.
        """
        highest = self.key.priority_max
        if self.call is not None and wanted is not None:
            wanted = min(wanted, highest, key=lambda each: each.value)
        return permitted_priority(self.key, wanted)


class Access:
    """Authorizes requests, and runs their jobs within the quotas of their keys.

    ``jobs`` is how handlers reach jobs; ``submit`` checks the caller before.
    """

    def __init__(
        self,
        hub: Hub,
        clock: Clock,
        keyring: authentication.Keyring,
        store: KeyStore,
        sessions: BrowserSessions,
        *,
        open_loopback: bool = False,
        failures: AuthThrottle | None = None,
    ) -> None:
        """``failures`` is shared with those who check other kinds of secrets."""
        self.keyring = keyring
        self.sessions = sessions
        self._hub = hub
        self._clock = clock
        self._open_loopback = open_loopback
        self._failures = failures or AuthThrottle()
        self._quotas = JobQuotas(hub, clock, keyring, store)
        self.jobs: JobService = LocalJobs(hub, self._quotas)
        self._lists = ListLimits(clock)

    async def authorize(
        self,
        request: web.Request,
        needed: Scope,
        *,
        exact: bool = False,
        anonymous: Key | None = None,
        by_calls: bool = False,
    ) -> ApiCaller:
        """Return the caller of a request, if its key covers the ``needed`` scope.

        ``anonymous`` is the key of requests without one; None: they are rejected.
        ``by_calls``: the credential of a running call will do.

        Raises Unauthorized (for ``exact``, see ``Keyring.authenticate``), Forbidden, or
        TooManyFailures.
        """
        record = record_of(request)
        if (key := record.key) is None or exact or self._failures.has_any:
            caller = await self._authenticate(request, anonymous, exact=exact)
        else:
            self.keyring.ensure_active(key, self._clock.wall())
            caller = ApiCaller(key)
        record.caller = caller
        http_server.admit(request)
        if caller.call is not None and not by_calls:
            raise errors.Forbidden(
                "the credential of a running call can only submit jobs, and read and "
                "cancel those; use an API key"
            )
        if not caller.has_scope(needed):
            raise errors.Forbidden(
                f"the API key {caller.name} has the scope {caller.key.scope.value}; "
                f"this needs one with the scope {needed.value}"
            )
        return caller

    async def sign_in(
        self, request: web.Request, value: str, *, api_key: str = "", code: str = ""
    ) -> ApiCaller:
        """Begin the session of a browser, by a key or by the code of a one-time link.

        ``value`` is the new random value of its cookie.

        Raises Unauthorized, TooManyFailures; StoreError for a code.
        """
        if code:
            key = await self._redeem(request, code)
        else:
            key = await self._check_key(request, f"Bearer {api_key}")
        at = self._clock.wall()
        if (before := self._session_of(request)) is not None:
            await self.sessions.end(before)
        caller = ApiCaller(key, session=await self.sessions.begin(value, key, at))
        record_of(request).caller = caller
        http_server.admit(request)
        return caller

    async def sign_out(self, request: web.Request) -> None:
        """End the session of a browser, if it has one."""
        if (session := self._session_of(request)) is not None:
            await self.sessions.end(session)

    def caller_of(self, owner: str) -> ApiCaller:
        """Return the caller of jobs that run without a request of their owner.

        Raises Unauthorized if the owner has no valid key any more.
        """
        if owner == LOOPBACK_KEY.name and self._open_loopback:
            return ApiCaller(LOOPBACK_KEY)
        return ApiCaller(self.keyring.of_owner(owner, self._clock.wall()))

    def key_in(self, headers: CIMultiDictProxy[str]) -> Key | None:
        """Return the valid key that a request carries, if any.

        This authorizes nothing: it decides, as ``recognizes``, whose requests may have
        to wait.
        """
        try:
            authorization = authentication.authorization_in(headers)
            if authorization is None or CALL_PREFIX in authorization:
                return None
            return self.keyring.authenticate(authorization, self._clock.wall())
        except errors.Unauthorized:
            return None

    def recognizes(
        self, headers: CIMultiDictProxy[str], address: str, *, secure: bool
    ) -> bool:
        """Say whether a request has a valid key, or comes from here and needs none."""
        at = self._clock.wall()
        try:
            if authentication.carries_key(headers):
                authorization = authentication.authorization_in(headers)
                if (call := self._call_in(authorization)) is not None:
                    self._hub.grants.owner(call)
                else:
                    self.keyring.authenticate(authorization, at)
                return True
            if self._open_loopback and authentication.is_local(address, headers):
                return True
            session = self.sessions.find(headers, at, secure=secure)
            if session is None:
                return False
            self.keyring.by_digest(session.key_digest, at)
        except errors.Unauthorized:
            return False
        return True

    def key_of(self, digest: bytes, address: str, *, guessable: bool) -> Key:
        """Return the valid key whose secret a client at an address has sent.

        ``guessable``: a person chose the secret.  Nothing is counted as a guess: who
        presents a wrong one has to be refused by ``authorize``.

        Raises Unauthorized, TooManyFailures.
        """
        now, secret = self._clock.now(), A_GUESS if guessable else None
        self._failures.check(CredentialKind.API_KEY, address, now, secret)
        return self.keyring.by_digest(digest, self._clock.wall())

    def submit(
        self,
        job: Job,
        caller: ApiCaller,
        pay: Pay | None = None,
        *,
        early: bool = False,
    ) -> AbstractAsyncContextManager[AnswerCursor]:
        """Run ``job`` for the length of the block, see ``JobService.run``.

        Raises KeyRevoked, KeyExpired or SessionEnded at once.
        """
        self.ensure_active(caller)
        caller.on_submitted(job.id)
        return self.jobs.run(job, caller.key, caller.headers, pay, early=early)

    def count_call(self, caller: ApiCaller) -> None:
        """Count a function call as a request without tokens.

        Raises KeyRevoked, KeyExpired, SessionEnded or RateLimited.
        """
        self.ensure_active(caller)
        self._quotas.count_call(caller.key)

    @asynccontextmanager
    async def reading_list(self, caller: ApiCaller) -> AsyncIterator[None]:
        """Wait until the key may read a list, and read it within the block.

        Raises RateLimited, and as ``ensure_active`` if the key has ended meanwhile.
        """
        async with self._lists.reading(caller.name):
            self.ensure_active(caller)
            yield

    @asynccontextmanager
    async def list_turn(self, caller: ApiCaller) -> AsyncIterator[None]:
        """Wait until a caller who reads a list may read one more page of it.

        Raises as ``ensure_active`` if the key has ended meanwhile.
        """
        async with self._lists.turn(caller.name):
            self.ensure_active(caller)
            yield

    def ensure_active(self, caller: ApiCaller) -> None:
        """Raise KeyRevoked or KeyExpired if an authorized caller's key has ended since.

        Raises SessionEnded if its browser has been signed out, KeyExpired if its call
        has ended.
        """
        self.keyring.ensure_active(caller.key, self._clock.wall())
        if caller.call is not None:
            self._hub.grants.owner(caller.call)
        session = caller.session
        if session and not self.sessions.is_open(session, self._clock.wall()):
            raise _session_ended()

    async def revoke(self, key: Key) -> Key:
        """Revoke a key, cancel its jobs, sign its browsers out; return the revoked key.

        Raises StoreError; even then the key is refused until the next start.
        """
        try:
            return await self.keyring.cache.revoke(key, self._clock.wall())
        finally:
            self._quotas.forget(key)
            if key.revoked_at is None:  # else another key may have the name by now
                self._hub.cancel_all_of(key.name, authentication.REVOKED)
            await self.sessions.end_all_of(key)

    def forget_ended(self, before: float) -> None:
        """Forget keys that were revoked or expired ``before`` a Unix time."""
        book = self.keyring.cache
        book.drop_ended(before)
        self.sessions.drop_ended(self._clock.wall())
        self._quotas.retain(key.id for key in book)
        self._lists.retain({*(key.name for key in book), *RESERVED_NAMES})

    def check_code(self, request: web.Request, code: str, beginning: str) -> None:
        """Raise TooManyFailures if a pairing code may not be presented.

        ``beginning`` is the part of it that codes are looked up by.
        """
        now = self._clock.now()
        kind = CredentialKind.PAIRING_CODE
        self._failures.check(kind, request.remote or "", now, code)
        self._failures.check_code(beginning, now)

    async def record_wrong_code(self, request: web.Request, beginning: str) -> None:
        """Record a wrong pairing code; wait after several from one address.

        Raises TooManyFailures if there were too many.
        """
        self._failures.record_code_failure(beginning, self._clock.now())
        await self._record_failure(CredentialKind.PAIRING_CODE, request)

    async def _record_failure(self, kind: CredentialKind, request: web.Request) -> None:
        now = self._clock.now()
        delay = self._failures.record_failure(kind, request.remote or "", now)
        await asyncio.sleep(delay)

    async def _authenticate(
        self, request: web.Request, anonymous: Key | None, *, exact: bool
    ) -> ApiCaller:
        authorization = authentication.authorization_in(request.headers)
        if (call := self._call_in(authorization)) is not None:
            owner = self.caller_of(self._hub.grants.owner(call))
            key = replace(owner.key, scope=Scope.USE)
            submitted = self._hub.grants.submitted_by(call)
            return ApiCaller(key, call=call, submitted=submitted)
        if authorization is not None:
            return ApiCaller(await self._check_key(request, authorization, exact=exact))
        if (signed_in := self._signed_in(request)) is not None:
            return signed_in
        if self._open_loopback and authentication.is_local(
            request.remote or "", request.headers
        ):
            return ApiCaller(LOOPBACK_KEY)
        if anonymous is not None:
            return ApiCaller(anonymous)
        return ApiCaller(await self._check_key(request, None, exact=exact))

    def _call_in(self, authorization: str | None) -> LeasedCall | None:
        """Return the call whose credential a header carries, if it is right."""
        if authorization is None or CALL_PREFIX not in authorization:
            return None  # as most are, and each request passes here
        _, _, sent = authorization.partition(" ")
        return self._hub.grants.read(without_fingerprint(sent.strip())[0])

    def _signed_in(self, request: web.Request) -> ApiCaller | None:
        """Return the caller of a browser's session, if the request has one.

        Raises KeyExpired or KeyRevoked, which ended it, and Forbidden if the request
        may come from the page of another site.
        """
        if (session := self._session_of(request)) is None:
            return None
        self.sessions.check_page(request)
        key = self.keyring.by_digest(session.key_digest, self._clock.wall())
        return ApiCaller(key, session=session)

    def _session_of(self, request: web.Request) -> BrowserSession | None:
        at = self._clock.wall()
        return self.sessions.find(request.headers, at, secure=request.secure)

    async def _check_key(
        self, request: web.Request, authorization: str | None, *, exact: bool = False
    ) -> Key:
        """Return the key that is presented; count a wrong one as a guess.

        Raises Unauthorized, TooManyFailures.
        """
        kind, address = CredentialKind.API_KEY, request.remote or ""
        _, _, sent = (authorization or "").partition(" ")
        # Bare: a fingerprint would make a guess look like a random key.
        secret, _ = without_fingerprint(sent.strip())
        self._failures.check(kind, address, self._clock.now(), secret or None)
        try:
            return self.keyring.authenticate(
                authorization, self._clock.wall(), exact=exact
            )
        except (errors.KeyExpired, errors.KeyRevoked):
            raise  # not a guess: the key was valid once
        except errors.Unauthorized:
            if authorization:
                await self._record_failure(kind, request)
            raise

    async def _redeem(self, request: web.Request, code: str) -> Key:
        """Return the key of a one-time link's code; count a wrong one as a guess.

        Raises Unauthorized, TooManyFailures, StoreError.
        """
        kind, at = CredentialKind.SIGN_IN_CODE, self._clock.wall()
        self._failures.check(kind, request.remote or "", self._clock.now(), code)
        digest = await self.sessions.redeem(code, at)
        if digest is None:
            await self._record_failure(kind, request)
            raise errors.Unauthorized(
                "the link has been used, or has expired: `shoal dashboard` prints "
                "another one"
            )
        return self.keyring.by_digest(digest, at)


def _session_ended() -> errors.SessionEnded:
    return errors.SessionEnded("the browser was signed out: sign in again")
