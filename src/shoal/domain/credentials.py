"""API keys, their sessions in browsers, and join tokens; their limits and usage.

Only digests are stored.  Keys are long and random, so a plain SHA-256 is enough: a slow
hash protects only guessable secrets.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from shoal.domain.errors import Forbidden
from shoal.domain.job import Priority
from shoal.domain.job_kinds import NUMBER_KINDS
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.work import JobKind, Work, texts_read

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", re.ASCII)
"""The names of keys and tokens, which appear in logs, tables and commands."""

BYTES_PER_TOKEN = 4  # approximate
REPORTED_TOKENS_MAX = 1 << 32  # reported tokens of one job above this are capped

FINGERPRINT_MARK = ".sha256-"
_FINGERPRINT = re.compile(r"(.*)\.sha256-([A-Za-z0-9_-]{43})", re.ASCII | re.DOTALL)


class Scope(Enum):
    """The permissions of a key."""

    READ = "read"  # read models, workers and one's own jobs
    USE = "use"  # submit jobs
    MONITOR = "monitor"  # read what belongs to all keys
    ADMIN = "admin"  # create and revoke keys, and read and cancel all jobs

    __hash__ = object.__hash__  # members are singletons, hashed very often

    def covers(self, needed: "Scope") -> bool:
        """Return whether this scope includes ``needed``."""
        return needed in _INCLUDED[self]


_INCLUDED = {
    Scope.READ: frozenset({Scope.READ}),
    Scope.USE: frozenset({Scope.READ, Scope.USE}),
    Scope.MONITOR: frozenset({Scope.READ, Scope.MONITOR}),
    Scope.ADMIN: frozenset(Scope),
}


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of a key; None: unlimited.

    Tokens are prompt and completion tokens together.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    budget: int | None = None  # tokens in all

    @property
    def needs_stored_usage(self) -> bool:
        """Whether a limit depends on usage recorded in the store."""
        return self.tokens_per_day is not None or self.budget is not None


UNLIMITED = Quota()


@dataclass(frozen=True, slots=True)
class Key:
    """An API key.  Times are Unix seconds; ``start`` are its first characters.

    ``priority_max`` is the highest priority of its jobs.  ``hosted_after`` is how many
    seconds its jobs wait for a machine of the pool, until a hosted provider may do
    them; None: none may.
    """

    id: str
    name: str
    digest: bytes
    start: str
    scope: Scope
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    quota: Quota = UNLIMITED
    priority_max: Priority = Priority.HIGH
    hosted_after: float | None = None


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A token that admits workers.  Times are Unix seconds.

    ``models`` are shell patterns; empty: any model.  ``workers`` are those that joined
    with it, as ``bound_worker`` writes them, recorded only if it ``is_limited``; they
    may rejoin after it has expired.
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

    @property
    def is_limited(self) -> bool:
        """Whether its lifetime or its number of workers is limited."""
        return self.uses_max is not None or self.expires_at is not None


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """A signed-in browser, which may do what a key may.

    ``digest`` is that of its cookie's value, ``key_digest`` that of the key.  The
    session ends at a Unix time, or before that with its key.
    """

    digest: bytes
    key_digest: bytes
    expires_at: float


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """The usage of the keys of one name: in total, and today in UTC."""

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
    """Return the SHA-256 of a key, token or cookie, 32 bytes."""
    # Bytes of a header that are not UTF-8 arrive as surrogates.
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


CALL_PREFIX = "sk-shoal-call-"


def lease_grant(secret: bytes, job_id: str, lease: int) -> str:
    """Return what the credentials of a lease's calls are derived from."""
    named = f"{CALL_PREFIX}{job_id}.{lease}"
    return f"{named}.{_mac(secret, named)}"


def call_credential(grant: str, number: int) -> str:
    """Return the credential of a call; 0 is the number of a job that is one call."""
    named, _, key = grant.rpartition(".")
    named = f"{named}.{number}"
    return f"{named}.{_mac(key.encode(), named)}"


def read_call_credential(secret: bytes, credential: str) -> tuple[str, int, int] | None:
    """Return the job, lease and call of a credential; None: it is a wrong one."""
    found = _CALL_CREDENTIAL.fullmatch(credential)
    if found is None:
        return None
    job_id, lease, number = found[1], int(found[2]), int(found[3])
    right = call_credential(lease_grant(secret, job_id, lease), number)
    matches = hmac.compare_digest(right, credential)
    return (job_id, lease, number) if matches else None


_CALL_CREDENTIAL = re.compile(
    rf"{CALL_PREFIX}([!-~]{{1,256}})\.([0-9]{{1,18}})\.(-?[0-9]{{1,20}})\.[0-9a-f]{{64}}",
    re.ASCII,
)


def _mac(key: bytes, text: str) -> str:
    return hmac.digest(key, text.encode(), "sha256").hex()


_BOUND_KEY = re.compile(r" key:[0-9a-f]{64}$")


def bound_worker(worker: str, key: str) -> str:
    """Return a worker, its wire and name, with the key that it has proved, if any."""
    return f"{worker} key:{key}" if key else worker


def without_key(bound: str) -> str:
    """Return the worker of a ``bound_worker``."""
    return _BOUND_KEY.sub("", bound)


def was_unusable_before(credential: Key | JoinToken, at: float) -> bool:
    """Return whether a key or token had expired or been revoked before a Unix time."""
    revoked_at, expires_at = credential.revoked_at, credential.expires_at
    if isinstance(credential, JoinToken) and credential.workers:
        expires_at = None  # they may rejoin
    return any(end is not None and end < at for end in (revoked_at, expires_at))


def permitted_priority(key: Key, wanted: Priority | None) -> Priority:
    """Return the priority of a job of a key; ``wanted`` is None if the job names none.

    Raises Forbidden for a higher priority than the key may give.
    """
    highest = key.priority_max
    if wanted is None:
        return highest if highest is Priority.LOW else Priority.NORMAL
    if wanted.value > highest.value:
        raise Forbidden(
            f"the API key {key.name} may give its jobs the priority "
            f"{highest.name.lower()} at most, not {wanted.name.lower()}"
        )
    return wanted


def may_offer(patterns: Sequence[str], models: Collection[str]) -> bool:
    """Return whether a worker may offer these models, by a token's ``models``."""
    return not patterns or all(
        any(fnmatchcase(model, pattern) for pattern in patterns) for model in models
    )


def estimated_tokens(text: str) -> int:
    """Estimate the number of tokens of a text.

    English has about four bytes to a token; other scripts take more bytes for a
    character, and more tokens too.
    """
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def tokens_to_read(work: Work) -> int:
    """Estimate the prompt tokens of ``work``."""
    return sum(map(estimated_tokens, texts_read(work)))


def partial_usage(read: int, written: int) -> Usage | None:
    """Estimate the usage of an unfinished job; None if it had no output.

    ``read`` is the tokens of its work (``tokens_to_read``), ``written`` the number of
    characters of its answer.
    """
    return Usage(read, -(-written // BYTES_PER_TOKEN)) if written else None


def reported_usage(outcome: Outcome) -> Usage | None:
    """Return the usage that the worker reported, if any, within bounds.

    The sums of many must not overflow.
    """
    counted = outcome.usage
    return None if counted is None else counted.bounded(REPORTED_TOKENS_MAX)


def usage_of(work: Work, outcome: Outcome) -> Usage:
    """Return the usage of a job, estimated if the worker reported none."""
    if outcome.usage is not None:
        return outcome.usage.bounded(REPORTED_TOKENS_MAX)
    return estimated_usage(tokens_to_read(work), work.kind, outcome)


def estimated_usage(read: int, kind: JobKind, outcome: Outcome) -> Usage:
    """Estimate the usage of a job from the tokens of its work and its outcome."""
    written = "".join(str(choice.fields) for choice in outcome.choices) or outcome.text
    return Usage(read, 0 if kind in NUMBER_KINDS else estimated_tokens(written))


def with_fingerprint(token: str, fingerprint: bytes | None) -> str:
    """Return a join token or API key that also names the coordinator's TLS key.

    ``fingerprint`` is the SHA-256 of that public key, if there is one.  Programs may
    present the whole: the coordinator ignores the fingerprint.
    """
    if fingerprint is None:
        return token
    written = base64.urlsafe_b64encode(fingerprint).decode().rstrip("=")
    return f"{token}{FINGERPRINT_MARK}{written}"


def without_fingerprint(token: str) -> tuple[str, bytes | None]:
    """Split a join token or API key from the fingerprint, if it names one."""
    found = _FINGERPRINT.fullmatch(token)
    if found is None:
        return token, None
    return found[1], base64.urlsafe_b64decode(found[2] + "=")
