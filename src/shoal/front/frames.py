"""The messages between a front and the hub, in the codec of Shoal's own wire."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from shoal.domain import errors
from shoal.domain.credentials import Scope
from shoal.domain.errors import JobError, ShoalError
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, Priority
from shoal.domain.outcome import AnswerPiece, Outcome
from shoal.gateway.metrics.requests import AnsweredRequest
from shoal.protocols.shoal.codec import MessageDecoder

VERSION = 1


class Failure(msgspec.Struct, frozen=True):
    """An error of ``shoal.domain.errors``: its class, its text and its attributes."""

    kind: str
    text: str
    fields: Mapping[str, Any] = {}

    @classmethod
    def of(cls, error: ShoalError) -> "Failure":
        known = (each.__name__ for each in type(error).__mro__)
        kind = next(name for name in known if hasattr(errors, name))
        return cls(kind, str(error), vars(error))

    def error(self) -> ShoalError:
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, ShoalError)):
            return JobError(self.text)  # of a newer release
        error = kind.__new__(kind, self.text)
        vars(error).update(self.fields)
        return error


# Of both.


class LinkOpening(msgspec.Struct, frozen=True):
    """The first frame of each end: what it speaks, and its release.

    The hub's has its ``epoch``, and the names of the models of its pool.
    """

    version: int
    release: str
    epoch: int = 0
    models: tuple[str, ...] = ()


# Of a front.


class KeyQuery(msgspec.Struct, frozen=True):
    """Asks for the key with a SHA-256, which a client at an address has sent.

    ``guessable`` says whether it is a secret that a person chose.
    """

    number: int
    digest: bytes
    address: str
    guessable: bool


class Submit(msgspec.Struct, frozen=True):
    """Runs a job, whose answer is the stream ``stream`` of this link.

    ``digest`` is that of its key; empty: the owner's name says which it is.  ``again``:
    it was submitted to an earlier hub, and the client has ``seen`` these pieces.
    """

    stream: int
    digest: bytes
    job: Job
    again: bool = False
    seen: tuple[AnswerPiece, ...] = ()


class Leave(msgspec.Struct, frozen=True):
    """The client of a stream reads no more."""

    stream: int


class Cancel(msgspec.Struct, frozen=True):
    """Cancels a job."""

    job_id: JobId
    reason: str


class WaitQuery(msgspec.Struct, frozen=True):
    """Asks what a queued job waits for."""

    number: int
    job_id: JobId


# Of the hub.


class KeyFound(msgspec.Struct, frozen=True):
    """Answers ``KeyQuery``; without a ``name``, the hub itself has to refuse it.

    It is valid until ``expires_at``, unless ``KeysChanged`` comes.
    """

    number: int
    name: str = ""
    scope: Scope = Scope.USE
    priority_max: Priority = Priority.HIGH
    expires_at: float | None = None
    hosted_after: float | None = None


class KeysChanged(msgspec.Struct, frozen=True):
    """Says that no answer to an earlier ``KeyQuery`` holds any more."""

    since: float = 0.0


class Accepted(msgspec.Struct, frozen=True):
    """A job is accepted; ``headers`` are of the response.

    With an idempotency key, it may be an earlier one.
    """

    stream: int
    job_id: JobId
    headers: Mapping[str, str] = {}


class Pieces(msgspec.Struct, frozen=True):
    """What the worker of a stream wrote since the last frame."""

    stream: int
    pieces: tuple[AnswerPiece, ...]
    worker_id: WorkerId | None
    lease: LeaseNumber


class Requeued(msgspec.Struct, frozen=True):
    """The job of a stream waits for another worker."""

    stream: int


class Ended(msgspec.Struct, frozen=True):
    """A stream has ended, after the commit that says so.

    ``refused``: its job was not accepted.
    """

    stream: int
    outcome: Outcome | None = None
    failure: Failure | None = None
    refused: bool = False
    worker_id: WorkerId | None = None
    lease: LeaseNumber = LeaseNumber(0)


class Waits(msgspec.Struct, frozen=True):
    """Answers ``WaitQuery``; empty: it is not queued."""

    number: int
    what: str = ""


class Models(msgspec.Struct, frozen=True):
    """The models of all workers have changed."""

    models: tuple[str, ...]


FrontFrame: TypeAlias = (
    LinkOpening | KeyQuery | Submit | Leave | Cancel | WaitQuery | AnsweredRequest
)
HubFrame: TypeAlias = (
    LinkOpening
    | KeyFound
    | KeysChanged
    | Accepted
    | Pieces
    | Requeued
    | Ended
    | Waits
    | Models
)

_FROM_FRONTS: frozenset[type] = frozenset(
    {LinkOpening, KeyQuery, Submit, Leave, Cancel, WaitQuery, AnsweredRequest}
)
_FROM_HUBS: frozenset[type] = frozenset(
    {
        LinkOpening,
        KeyFound,
        KeysChanged,
        Accepted,
        Pieces,
        Requeued,
        Ended,
        Waits,
        Models,
    }
)
OF_FRONTS = MessageDecoder(_FROM_FRONTS)
OF_HUBS = MessageDecoder(_FROM_HUBS)
