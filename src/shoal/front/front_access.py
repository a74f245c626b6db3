"""Authorizes requests at a front: those with a key that the hub knows.

All others are answered where the hub is: wrong keys, which it counts as guesses,
browsers that are signed in, and running calls.
"""

from contextlib import AbstractAsyncContextManager

from aiohttp import web
from multidict import CIMultiDictProxy

from shoal.coordinator.answer_reader import AnswerCursor
from shoal.domain.credentials import CALL_PREFIX, Key, Scope, digest_of
from shoal.domain.errors import Unauthorized
from shoal.domain.job import Job
from shoal.domain.settings import is_guessable
from shoal.front.linked_jobs import LinkedJobs, OnlyAtHub
from shoal.gateway.http import authentication
from shoal.gateway.http.access import LOOPBACK_KEY, ApiCaller
from shoal.gateway.http.job_quotas import Pay
from shoal.gateway.http.request_record import record_of
from shoal.transports import http_server

COOKIE = "Cookie"


class FrontAccess:
    """What ``Access`` is to handlers that run jobs."""

    def __init__(self, jobs: LinkedJobs, *, open_loopback: bool) -> None:
        self.jobs = jobs
        self._open_loopback = open_loopback

    async def authorize(
        self,
        request: web.Request,
        needed: Scope,
        *,
        exact: bool = False,
        anonymous: Key | None = None,
        by_calls: bool = False,
    ) -> ApiCaller:
        """Return the caller of a request, see ``Access.authorize``.

        Raises OnlyAtHub.
        """
        key = await self.key_of(request, exact=exact) or anonymous
        if key is None or not key.scope.covers(needed):
            raise OnlyAtHub
        caller = ApiCaller(key)
        record_of(request).caller = caller
        http_server.admit(request)
        return caller

    async def key_of(self, request: web.Request, *, exact: bool = False) -> Key | None:
        """Return the key of a request, if it may be answered here with one.

        None: it has none, and nothing else either that stands for one.

        Raises OnlyAtHub.
        """
        headers, address = request.headers, request.remote or ""
        if authentication.carries_key(headers):
            secret = _secret_in(headers, exact=exact)
            if secret is None:
                raise OnlyAtHub
            guessable = is_guessable(secret)
            digest = digest_of(secret)
            key = await self.jobs.key(digest, address, guessable=guessable)
            if key is None:
                raise OnlyAtHub
            return key
        if COOKIE in headers:
            raise OnlyAtHub
        if self._open_loopback and authentication.is_local(address, headers):
            return LOOPBACK_KEY
        return None

    def key_in(self, headers: CIMultiDictProxy[str]) -> None:
        """Return no key: the hub decides from which addresses one is valid."""

    def recognizes(
        self, headers: CIMultiDictProxy[str], address: str, *, secure: bool
    ) -> bool:
        """Say whether a request has a key that was used from there before."""
        if authentication.carries_key(headers):
            secret = _secret_in(headers)
            return (
                secret is not None
                and self.jobs.known_key(digest_of(secret), address) is not None
            )
        return self._open_loopback and authentication.is_local(address, headers)

    def ensure_active(self, caller: ApiCaller) -> None:
        """Do nothing: the hub checks the key of each job that it accepts."""

    def submit(
        self,
        job: Job,
        caller: ApiCaller,
        pay: Pay | None = None,
        *,
        early: bool = False,
    ) -> AbstractAsyncContextManager[AnswerCursor]:
        """Run ``job`` for the length of the block, see ``JobService.run``.

        Raises OnlyAtHub for one that goes on without its client.
        """
        if job.terms.detached:
            raise OnlyAtHub
        return self.jobs.run(job, caller.key, caller.headers, pay, early=early)


def _secret_in(headers: CIMultiDictProxy[str], *, exact: bool = False) -> str | None:
    """Return the key in the headers of a request; None: no other credential either."""
    try:
        authorization = authentication.authorization_in(headers)
    except Unauthorized:
        return None
    if authorization is None or CALL_PREFIX in authorization:
        return None
    return authentication.secret_in(authorization, exact=exact)
