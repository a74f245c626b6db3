"""The messages between a front and the hub, in the codec of Shoal's own wire."""

from collections.abc import Mapping
from typing import Any, TypeAlias, get_args

import msgspec

from shoal.domain import errors
from shoal.domain.credentials import Scope
from shoal.domain.errors import JobError, ShoalError
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.job import Job, Priority
from shoal.domain.outcome import AnswerPiece, Outcome
from shoal.gateway.metrics.requests import CountedRequests
from shoal.protocols.shoal.codec import MessageDecoder

VERSION = 3


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

    The hub's has its ``epoch``, the names of the models of its pool, and the secret
    from which the tickets of text routes are made.  The front's has the first bytes of
    the names of its routes, empty if it serves none, and the ``address`` of its node;
    empty: there is one.
    """

    version: int
    release: str
    epoch: int = 0
    models: tuple[str, ...] = ()
    text_name: bytes = b""
    address: str = ""
    text_secret: bytes = b""


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


class Settled(msgspec.Struct, frozen=True):
    """Answers ``Settle``: what the client has of an answer."""

    stream: int
    pieces: tuple[AnswerPiece, ...]


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


class Leased(msgspec.Struct, frozen=True):
    """A worker has the job of a stream, and writes after ``size`` characters.

    ``route`` names the way along which pieces may come past the hub; empty: there is
    none.  ``resumes``: it is the same answer, of which the client may have more.
    """

    stream: int
    worker_id: WorkerId | None
    lease: LeaseNumber
    size: int
    resumes: bool = False
    route: bytes = b""


class Accepted(msgspec.Struct, frozen=True):
    """A job is accepted; ``headers`` are of the response.

    With an idempotency key, it may be an earlier one.  ``leased``: at once.
    """

    stream: int
    job_id: JobId
    headers: Mapping[str, str] = {}
    leased: Leased | None = None


class Pieces(msgspec.Struct, frozen=True):
    """Pieces of a stream, of which ``at`` characters came before."""

    stream: int
    at: int
    pieces: tuple[AnswerPiece, ...]


class Settle(msgspec.Struct, frozen=True):
    """Asks what the client of a stream has, whose worker is lost."""

    stream: int


class Requeued(msgspec.Struct, frozen=True):
    """The job of a stream waits for another worker."""

    stream: int


class Ended(msgspec.Struct, frozen=True):
    """A stream has ended, after the commit that says so.

    ``refused``: its job was not accepted.  ``size`` is that of the whole answer.
    """

    stream: int
    outcome: Outcome | None = None
    failure: Failure | None = None
    refused: bool = False
    worker_id: WorkerId | None = None
    lease: LeaseNumber = LeaseNumber(0)
    size: int = 0


class Waits(msgspec.Struct, frozen=True):
    """Answers ``WaitQuery``; empty: it is not queued."""

    number: int
    what: str = ""


class Models(msgspec.Struct, frozen=True):
    """The models of all workers have changed."""

    models: tuple[str, ...]


FrontFrame: TypeAlias = (
    LinkOpening
    | KeyQuery
    | Submit
    | Leave
    | Cancel
    | Settled
    | WaitQuery
    | CountedRequests
)
HubFrame: TypeAlias = (
    LinkOpening
    | KeyFound
    | KeysChanged
    | Accepted
    | Leased
    | Pieces
    | Settle
    | Requeued
    | Ended
    | Waits
    | Models
)

OF_FRONTS = MessageDecoder(frozenset(get_args(FrontFrame)))
OF_HUBS = MessageDecoder(frozenset(get_args(HubFrame)))
