"""What a worker presents to join, and the check of it."""

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shoal.domain.credentials import digest_of


@dataclass(frozen=True, slots=True)
class TokenProof:
    """Proof that a peer has a token, without the token itself.

    ``matches`` returns whether the proof was made with the token of this SHA-256
    digest.
    """

    matches: Callable[[bytes], bool]


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A worker that wants to join: its token, name, models and address.

    ``key`` is the public key that it has proved, in hexadecimal; empty: none.
    """

    token: str | TokenProof
    name: str
    models: frozenset[str]
    address: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class AdmissionGrant:
    """Permission to join by the join token of this id; empty: by no join token.

    ``worker`` is the worker to bind to a token with limited uses.  ``models`` are the
    patterns of those that it may offer; empty: any.
    """

    token_id: str = ""
    worker: str = ""
    models: tuple[str, ...] = ()


NO_JOIN_TOKEN = AdmissionGrant()

AdmissionCheck: TypeAlias = Callable[[JoinRequest], AdmissionGrant]
"""Decides whether a worker may join; raises NotAdmitted with the reason."""


WRONG_TOKEN = "Invalid token"


def token_matches(presented: str, token: str) -> bool:
    """Return whether a presented token is ``token``, or ``token`` is empty."""
    pair = [each.encode(errors="replace") for each in (presented, token)]
    return not token or hmac.compare_digest(*pair)


def proves_token(presented: str | TokenProof, token: str) -> bool:
    """Return whether a token or a proof matches ``token``, or ``token`` is empty."""
    if isinstance(presented, TokenProof):
        return not token or presented.matches(digest_of(token))
    return token_matches(presented, token)


class Throttle(Protocol):
    """Counts wrong secrets per address."""

    def check(self, address: str) -> None:
        """Raise Unavailable if the address had too many failures recently."""

    def check_passcode(self, address: str) -> None:
        """Raise Unavailable if the address may not present a passcode."""

    def failed(self, address: str) -> None:
        """Count a wrong secret."""


class NoThrottle:
    """Does not limit attempts."""

    def check(self, address: str) -> None:
        pass

    def check_passcode(self, address: str) -> None:
        pass

    def failed(self, address: str) -> None:
        pass
