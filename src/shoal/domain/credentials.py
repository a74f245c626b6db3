"""What clients and workers are let in by: API keys, join tokens, and their limits.

Only digests are kept.  Keys are made at random and long, so that a plain SHA-256 is
enough: there is nothing to guess that a slow hash would protect.
"""

import base64
import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from shoal.domain.outcome import Outcome, Usage
from shoal.domain.work import Embedding, JobKind, Work

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", re.ASCII)
"""What a key or a token may be called: it stands in logs, tables and commands."""

BYTES_PER_TOKEN = 4  # to a token, about
REPORTED_TOKENS_MAX = 1 << 32  # tokens of one job that a worker is believed

FINGERPRINT_MARK = ".sha256-"
_FINGERPRINT = re.compile(r"(.*)\.sha256-([A-Za-z0-9_-]{43})", re.ASCII | re.DOTALL)


class Scope(Enum):
    """What a key may be used for; each includes those before it."""

    READ = "read"  # see models, workers and one's own jobs
    USE = "use"  # have jobs done
    ADMIN = "admin"  # make and revoke keys, and see and cancel everybody's jobs

    def covers(self, needed: "Scope") -> bool:
        """Say whether this is enough where ``needed`` is asked for."""
        order = list(Scope)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True)
class Quota:
    """How much a key may use; None: as much as it likes.

    Tokens are those read and those written together.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    budget: int | None = None  # tokens in all

    @property
    def needs_stored_usage(self) -> bool:
        """Whether what the store has of earlier use counts."""
        return self.tokens_per_day is not None or self.budget is not None


UNLIMITED = Quota()


@dataclass(frozen=True, slots=True)
class Key:
    """An API key.  Times are Unix seconds; ``start`` is how it begins."""

    id: str
    name: str
    digest: bytes
    start: str
    scope: Scope
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    quota: Quota = UNLIMITED


@dataclass(frozen=True, slots=True)
class JoinToken:
    """What workers join by.  Times are Unix seconds.

    ``models`` are patterns as of a shell; empty: any model.  ``workers`` are those
    that joined by it, each with its wire, kept only if ``uses_max`` bounds them; they
    may come back after it has expired.
    """

    id: str
    name: str
    digest: bytes
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    uses_max: int | None = None
    models: tuple[str, ...] = ()
    workers: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """What was done for the keys of one name: in all, and of it today, in UTC."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens_today: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


DAY = 86_400  # seconds


def day_of(at: float) -> int:
    """Return the day of a time in Unix seconds."""
    return int(at // DAY)


def digest_of(secret: str) -> bytes:
    """Return the SHA-256 of a key or token, 32 bytes."""
    # Bytes of a header that are not UTF-8 arrive as surrogates.
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def was_unusable_before(credential: Key | JoinToken, at: float) -> bool:
    """Say whether a key or token was of no use to anybody before then."""
    revoked_at, expires_at = credential.revoked_at, credential.expires_at
    if isinstance(credential, JoinToken) and credential.uses_max is not None:
        expires_at = None  # those who have used it may come back
    return any(end is not None and end < at for end in (revoked_at, expires_at))


def may_offer(token: JoinToken, models: Collection[str]) -> bool:
    """Say whether a worker that joins by ``token`` may have these models."""
    return not token.models or all(
        any(fnmatchcase(model, pattern) for pattern in token.models) for model in models
    )


def estimated_tokens(text: str) -> int:
    """Return about how many tokens a text is, where nobody has counted.

    Four bytes to a token is what models for English come to; other scripts take more
    bytes for a character, and more tokens too.
    """
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def tokens_to_read(work: Work) -> int:
    """Return about how many tokens a model has to read for ``work``."""
    texts = work.inputs if isinstance(work, Embedding) else (work.text,)
    return sum(map(estimated_tokens, texts))


def partial_usage(work: Work, written: int) -> Usage | None:
    """Return about what a job has used that was given up, if it had begun at all.

    ``written`` is how many characters of the answer there were.
    """
    return (
        Usage(tokens_to_read(work), -(-written // BYTES_PER_TOKEN)) if written else None
    )


def reported_usage(outcome: Outcome) -> Usage | None:
    """Return what the worker says that a job has used, if it says so.

    Workers may say anything, and a sum has to stay one.
    """
    if (counted := outcome.usage) is None:
        return None
    return Usage(
        max(0, min(counted.prompt_tokens, REPORTED_TOKENS_MAX)),
        max(0, min(counted.completion_tokens, REPORTED_TOKENS_MAX)),
    )


def usage_of(work: Work, outcome: Outcome) -> Usage:
    """Return what a job has used: about, where nobody has counted."""
    if (counted := reported_usage(outcome)) is not None:
        return counted
    written = "".join(str(choice.fields) for choice in outcome.choices) or outcome.text
    vectors = work.kind is JobKind.EMBEDDING
    return Usage(tokens_to_read(work), 0 if vectors else estimated_tokens(written))


def with_fingerprint(token: str, fingerprint: bytes | None) -> str:
    """Return a join token that also names the coordinator's certificate.

    ``fingerprint`` is the SHA-256 of the certificate in DER form, if there is one.  Any
    worker may present the whole: the coordinator looks at what goes before.
    """
    if fingerprint is None:
        return token
    written = base64.urlsafe_b64encode(fingerprint).decode().rstrip("=")
    return f"{token}{FINGERPRINT_MARK}{written}"


def without_fingerprint(token: str) -> tuple[str, bytes | None]:
    """Split a join token from the fingerprint of the certificate, if it names one."""
    found = _FINGERPRINT.fullmatch(token)
    if found is None:
        return token, None
    return found[1], base64.urlsafe_b64decode(found[2] + "=")
