"""Admits workers by join token, and disconnects those whose token is revoked."""

import asyncio
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from shoal.coordinator.auth_throttle import AuthThrottle, CredentialKind
from shoal.coordinator.credential_cache import CredentialCache
from shoal.domain.credentials import (
    JoinToken,
    bound_worker,
    may_offer,
    with_fingerprint,
    without_fingerprint,
    without_key,
)
from shoal.domain.errors import NotAdmitted, TooManyFailures
from shoal.protocols.seam import admission
from shoal.protocols.seam.session import CloseCode
from shoal.store.port import KeyStore
from shoal.transports.clock import Clock

REVOKED = "the join token was revoked"
WORKERS_MAX = 10_000  # workers that are bound to one token
# Shown where any token is accepted, but one has to name the certificate.
ANY_TOKEN = "any"


class RevocableConnection(Protocol):
    """A worker's connection, closed when the worker's join token is revoked."""

    async def close(self, code: int, text: str) -> None:
        """Close it.  Safe to call twice."""


async def load_join_tokens(store: KeyStore) -> CredentialCache[JoinToken]:
    """Load the join tokens in the store.  Raises StoreError."""
    return CredentialCache("join token", await store.tokens.all(), store.tokens)


@dataclass(slots=True, eq=False)
class WorkerAdmission:
    """Decides which workers may join, and disconnects those whose token is revoked.

    ``urls`` returns the coordinator's current URLs, the best one first; that one and
    ``fingerprint`` (of the TLS key, if there is one) are part of invitations.
    ``addresses`` returns the URLs of all coordinators of the pool, for workers that
    lose this one; none, if it is the only one.
    ``join_token`` is the coordinator's own token; empty: none required.  If the
    coordinator ``prints_limited_tokens``, invitations have one of those instead, and
    ``last_printed`` is the newest.  ``ports`` has the ports beside HTTP, by wire and by
    ``tcp`` or ``tls``; ``loopback_only`` says that only this machine can reach them.
    The coordinator sets ``urls``, ``addresses`` and ``ports`` when its ports are open.
    Failures are counted with those of other kinds of secrets.
    """

    tokens: CredentialCache[JoinToken]
    _store: KeyStore
    _clock: Clock
    _failures: AuthThrottle = field(default_factory=AuthThrottle)
    urls: Callable[[], Sequence[str]] = lambda: ("",)
    addresses: Callable[[], Sequence[str]] = tuple
    join_token: str = ""
    prints_limited_tokens: bool = False
    last_printed: str = ""
    fingerprint: bytes | None = None
    ports: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    loopback_only: bool = False
    # By the id of the token.
    _links: dict[str, set[RevocableConnection]] = field(default_factory=dict)

    def policy_for(self, wire: str, *tokens: str) -> admission.AdmissionCheck:
        """Return the admission check of one wire.

        It admits workers that present one of ``tokens`` (any worker, if all of them are
        empty) or a valid join token.
        """
        accepted = [token for token in tokens if token]

        def admit(applicant: admission.JoinRequest) -> admission.AdmissionGrant:
            if not accepted:
                return admission.AdmissionGrant()
            for token in accepted:
                if admission.proves_token(applicant.token, token):
                    self._check(CredentialKind.JOIN_TOKEN, applicant.address, token)
                    return admission.AdmissionGrant()
            worker = f"{wire}:{applicant.name}"
            if (found := self._meant(applicant.token)) is None:
                found = self._admitted_before(worker, applicant)
            if found is not None:
                return self._admit(found, worker, applicant)
            if applicant.token:  # an absent token is not a guess
                # No delay besides: each attempt already takes a connection.
                self._failures.record_failure(
                    CredentialKind.JOIN_TOKEN, applicant.address, self._clock.now()
                )
            raise NotAdmitted(admission.WRONG_TOKEN)

        def admit_bare(applicant: admission.JoinRequest) -> admission.AdmissionGrant:
            if isinstance(applicant.token, str):
                bare, _ = without_fingerprint(applicant.token)
                applicant = replace(applicant, token=bare)
            return admit(applicant)

        return admit_bare

    def check(self, address: str) -> None:
        """Raise TooManyFailures if the address is blocked."""
        for kind in (CredentialKind.JOIN_TOKEN, CredentialKind.PASSCODE):
            self._check(kind, address)

    def check_passcode(self, address: str) -> None:
        """Raise TooManyFailures if the address may not present a passcode."""
        # Only its hash is known here, so it may be a guessable one.
        self._check(CredentialKind.PASSCODE, address, "")

    def failed(self, address: str) -> None:
        """Record a wrong credential that is not a token."""
        with suppress(TooManyFailures):
            self._failures.record_failure(
                CredentialKind.PASSCODE, address, self._clock.now()
            )

    async def record_use(self, admitted: admission.AdmissionGrant) -> None:
        """Store the use of a limited token, before the worker joins.

        Raises StoreError.
        """
        token = self.tokens.by_id(admitted.token_id)
        if token is not None and token.is_limited and admitted.worker:
            await self._store.bind_worker(token.id, admitted.worker)

    @contextmanager
    def track(
        self, admitted: admission.AdmissionGrant, link: RevocableConnection
    ) -> Iterator[None]:
        """Track a worker's connection for the length of the block.

        Raises NotAdmitted if its token was revoked meanwhile.
        """
        if not admitted.token_id:
            yield
            return
        token = self.tokens.by_id(admitted.token_id)
        if token is None or token.revoked_at is not None:
            raise NotAdmitted(REVOKED)
        links = self._links.setdefault(token.id, set())
        links.add(link)
        try:
            yield
        finally:
            links.discard(link)
            if not links:
                self._links.pop(token.id, None)

    def count_connected(self, token: JoinToken) -> int:
        """Return how many connected workers joined by a token."""
        return len(self._links.get(token.id, ()))

    async def revoke(self, token: JoinToken) -> JoinToken:
        """Revoke a token, disconnect its workers, and return the revoked token.

        Raises StoreError; until the next start, the token is revoked even then.
        """
        try:
            return await self.tokens.revoke(token, self._clock.wall())
        finally:
            links = self._links.pop(token.id, set())
            closing = [
                link.close(CloseCode.POLICY_VIOLATION, REVOKED) for link in links
            ]
            # Even if the client that revokes it disconnects meanwhile.
            await asyncio.shield(asyncio.gather(*closing))

    def invitation(self, token: str, name: str = "") -> str:
        """Return the command that joins by a token, as a worker of that name."""
        url, shown = self.urls()[0], self.shown_token(token)
        option = f" --token {shlex.quote(shown)}" if shown else ""
        return f"shoal join {url}{option}" + (f" --name {name}" if name else "")

    def shown_token(self, token: str) -> str:
        """Return what workers give for a token, with the fingerprint, if any."""
        shown = token or (ANY_TOKEN if self.fingerprint else "")
        return self.with_fingerprint(shown) if shown else ""

    def with_fingerprint(self, secret: str) -> str:
        """Return a token or API key with the fingerprint of the coordinator, if any."""
        return with_fingerprint(secret, self.fingerprint)

    def _check(
        self, kind: CredentialKind, address: str, secret: str | None = None
    ) -> None:
        self._failures.check(kind, address, self._clock.now(), secret)

    def _meant(self, presented: str | admission.TokenProof) -> JoinToken | None:
        """Return the join token that was presented, or whose possession was proved."""
        if isinstance(presented, str):
            return self.tokens.by_secret(presented)
        # Each token is tried: two HMACs, in the same time for any.
        return next(
            (each for each in self.tokens if presented.matches(each.digest)), None
        )

    def _admitted_before(
        self, worker: str, applicant: admission.JoinRequest
    ) -> JoinToken | None:
        """Return the token that a worker without one has joined with, by its key."""
        if applicant.token or not applicant.key:
            return None
        bound = bound_worker(worker, applicant.key)
        return next((each for each in self.tokens if bound in each.workers), None)

    def _admit(
        self, token: JoinToken, worker: str, applicant: admission.JoinRequest
    ) -> admission.AdmissionGrant:
        if token.revoked_at is not None:
            raise NotAdmitted("The token was revoked")
        if not may_offer(token.models, applicant.models):
            raise NotAdmitted("The token is not for this model")
        if not token.is_limited:
            return admission.AdmissionGrant(token.id, worker, token.models)
        bound = bound_worker(worker, applicant.key)
        # By its name as well: the token is a proof, too, and the key may be a new one.
        # A token may have thousands of workers: few names begin as this one.
        if bound in token.workers or any(
            each.startswith(worker) and without_key(each) == worker
            for each in token.workers
        ):
            return admission.AdmissionGrant(
                token.id, bound if bound in token.workers else "", token.models
            )
        if token.expires_at is not None and self._clock.wall() >= token.expires_at:
            raise NotAdmitted("The token has expired")
        if len(token.workers) >= (token.uses_max or WORKERS_MAX):
            raise NotAdmitted("The token has been used by other workers")
        # At once: another worker may present it before this use is stored.
        self.tokens.update(replace(token, workers=token.workers | {bound}))
        return admission.AdmissionGrant(token.id, bound, token.models)
