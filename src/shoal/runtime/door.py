"""Who may join as a worker, and who has come by which join token."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Protocol

from shoal.domain.credentials import (
    JoinToken,
    may_offer,
    with_fingerprint,
    without_fingerprint,
)
from shoal.domain.errors import NotAdmitted, TooManyFailures
from shoal.protocols.session import (
    WRONG_TOKEN,
    Admission,
    Applicant,
    Pass,
    Proof,
    has_token,
    hint_of,
)
from shoal.runtime.book import Book
from shoal.runtime.clock import Clock
from shoal.runtime.failures import Failures
from shoal.store.port import KeyStore

POLICY = 1008  # WebSocket close code (RFC 6455, section 7.4.1)
REVOKED = "the join token was revoked"
ANY = "any"  # what is shown where any token will do, and one has to name a certificate


class Entered(Protocol):
    """What can be shut behind a worker whose token was revoked: its connection."""

    async def close(self, code: int, text: str) -> None:
        """End it.  Safe to call twice."""
        ...


async def token_book(store: KeyStore) -> Book[JoinToken]:
    """Open the book of the join tokens that are stored.  Raises StoreError."""
    kept = await store.tokens()
    return Book("join token", kept, store.add_token, store.revoke_token)


class Door:
    """Decides on workers as they knock, and turns out those whose token is revoked.

    ``url`` and ``fingerprint`` (of the certificate, if there is one) are what
    invitations tell, and ``direct`` has the ports beside HTTP, by wire and by ``tcp``
    or ``tls``; ``only_here`` says that they are for this machine alone.  Whoever opens
    the ports sets them.
    """

    def __init__(self, book: Book[JoinToken], store: KeyStore, clock: Clock) -> None:
        self.book = book
        self.url = ""
        self.fingerprint: bytes | None = None
        self.direct: Mapping[str, Mapping[str, int]] = {}
        self.only_here = False
        self._store = store
        self._clock = clock
        self._failures = Failures()
        self._links: dict[str, set[Entered]] = {}  # by the id of the token

    def admission(self, wire: str, token: str) -> Admission:
        """Return who decides on the workers of one wire.

        ``token`` lets in everybody who presents it, and if it is empty everybody; join
        tokens let in others.
        """

        def admit(applicant: Applicant) -> Pass:
            if has_token(applicant.token, token):
                return Pass()
            if (found := self._meant(applicant.token)) is not None:
                return self._admit(found, f"{wire}:{applicant.name}", applicant)
            if applicant.token:  # who presents nothing guesses nothing
                # The answer is not kept back as well, for each attempt already takes a
                # connection of its own.
                self._failures.failed(applicant.address, self._clock.now())
            raise NotAdmitted(WRONG_TOKEN)

        def admit_bare(applicant: Applicant) -> Pass:
            if isinstance(applicant.token, str):
                bare, _ = without_fingerprint(applicant.token)
                applicant = replace(applicant, token=bare)
            return admit(applicant)

        return admit_bare

    def check(self, address: str) -> None:
        """Raise TooManyFailures if the address may not knock now."""
        self._failures.check(address, self._clock.now())

    def failed(self, address: str) -> None:
        """Note that something wrong was presented that is no token."""
        with suppress(TooManyFailures):
            self._failures.failed(address, self._clock.now())

    async def record(self, admitted: Pass) -> None:
        """Store the use of a token that has only so many; only then it may be used.

        Raises StoreError.
        """
        token = self.book.by_id(admitted.token_id)
        if token is not None and token.uses_max is not None:
            await self._store.bind(token.id, admitted.worker)

    @contextmanager
    def entered(self, admitted: Pass, link: Entered) -> Iterator[None]:
        """Note that a worker is there for the length of the block.

        Raises NotAdmitted if its token was revoked meanwhile.
        """
        if not admitted.token_id:
            yield
            return
        token = self.book.by_id(admitted.token_id)
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

    def present(self, token: JoinToken) -> int:
        """Return how many workers are there that have joined by a token."""
        return len(self._links.get(token.id, ()))

    async def revoke(self, token: JoinToken) -> JoinToken:
        """End a token, and hang up on those that joined by it; return it as it is now.

        Raises StoreError, but then too nobody joins by it until the next start.
        """
        try:
            return await self.book.revoke(token, self._clock.wall())
        finally:
            links = self._links.pop(token.id, set())
            closing = [link.close(POLICY, REVOKED) for link in links]
            # Also if whoever asked for it leaves meanwhile.
            await asyncio.shield(asyncio.gather(*closing))

    def invitation(self, token: str, name: str = "") -> str:
        """Return the command that joins by a token, as a worker of that name."""
        shown = token or (ANY if self.fingerprint else "")
        told = f" --token {self.shown(shown)}" if shown else ""
        return f"shoal join {self.url}{told}" + (f" --name {name}" if name else "")

    def shown(self, token: str) -> str:
        """Return a token with the certificate that it is for."""
        return with_fingerprint(token, self.fingerprint)

    def _meant(self, presented: str | Proof) -> JoinToken | None:
        """Return the join token that was presented, or proved to be there."""
        if isinstance(presented, str):
            return self.book.of(presented)
        for each in self.book:
            if hint_of(each.digest) == presented.hint:
                return each if presented.made_with(each.digest) else None
        return None

    def _admit(self, token: JoinToken, worker: str, applicant: Applicant) -> Pass:
        if token.revoked_at is not None:
            raise NotAdmitted("The token was revoked")
        if not may_offer(token, applicant.models):
            raise NotAdmitted("The token is not for this model")
        if worker in token.workers:
            return Pass(token.id, worker)
        if token.expires_at is not None and self._clock.wall() >= token.expires_at:
            raise NotAdmitted("The token has expired")
        if token.uses_max is not None:
            if len(token.workers) >= token.uses_max:
                raise NotAdmitted("The token has been used by other workers")
            # At once, for another may knock before this is stored.
            self.book.update(replace(token, workers=token.workers | {worker}))
        return Pass(token.id, worker)
