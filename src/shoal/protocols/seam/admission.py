"""What a worker presents to join, and what decides whether it may."""

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shoal.domain.credentials import digest_of
from shoal.domain.errors import NotAdmitted


@dataclass(frozen=True, slots=True)
class TokenProof:
    """What shows that a peer has a token, without the token itself.

    ``hint`` is the beginning of ``hint_of`` the token, and ``made_with`` says whether
    it was made with the token of this SHA-256 digest.
    """

    hint: bytes
    matches: Callable[[bytes], bool]


TOKEN_HINT_SIZE = 8  # bytes


def token_hint(digest: bytes) -> bytes:
    """Return what tells which token is meant, of its digest, and nothing more."""
    return hashlib.sha256(b"shoal token hint v1\n" + digest).digest()[:TOKEN_HINT_SIZE]


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A worker that wants to join: what it presents, and what it would bring."""

    token: str | TokenProof
    name: str
    models: frozenset[str]
    address: str = ""


@dataclass(frozen=True, slots=True)
class AdmissionGrant:
    """Leave to join, by the join token of this id; empty: by none of them.

    ``worker`` is who is bound to a token that only so many may use.
    """

    token_id: str = ""
    worker: str = ""


NO_JOIN_TOKEN = AdmissionGrant()

AdmissionCheck: TypeAlias = Callable[[JoinRequest], AdmissionGrant]
"""Decides whether a worker may join; raises NotAdmitted, saying why not."""


WRONG_TOKEN = "Invalid token"


def require_token(token: str) -> AdmissionCheck:
    """Let in whoever presents ``token``; if that is empty, everybody."""

    def admit(applicant: JoinRequest) -> AdmissionGrant:
        if proves_token(applicant.token, token):
            return AdmissionGrant()
        raise NotAdmitted(WRONG_TOKEN)

    return admit


def token_matches(presented: str, token: str) -> bool:
    """Say whether what was presented will do; if ``token`` is empty, anything does."""
    given, wanted = (each.encode(errors="replace") for each in (presented, token))
    return not token or hmac.compare_digest(given, wanted)


def proves_token(presented: str | TokenProof, token: str) -> bool:
    """Say whether what was presented, or what was proved to be there, will do."""
    if isinstance(presented, TokenProof):
        return not token or presented.matches(digest_of(token))
    return token_matches(presented, token)


class Throttle(Protocol):
    """Counts the wrong secrets that come from an address."""

    def check(self, address: str) -> None:
        """Raise Unavailable if there were too many for another to be looked at now."""
        ...

    def failed(self, address: str) -> None:
        """Count one."""
        ...


class NoThrottle:
    """Lets everybody guess."""

    def check(self, address: str) -> None:
        pass

    def failed(self, address: str) -> None:
        pass
