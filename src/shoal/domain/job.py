"""A job: work with its time limits, priority and terms."""

import math
from collections.abc import Mapping
from enum import Enum

import msgspec
from msgspec import structs

from shoal.domain.errors import InvalidRequest
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.work import JobKind, Work


class Policy(Enum):
    """Which workers a job prefers, and what it costs."""

    FAST = "fast"
    CHEAP = "cheap"

    __hash__ = object.__hash__  # members are singletons, hashed very often


class Privacy(Enum):
    """Which workers may see the content of a job."""

    PUBLIC = "public"
    PRIVATE = "private"  # only workers that the user trusts and that proved their key

    __hash__ = object.__hash__  # members are singletons, hashed very often


PRIVACY_CLASSES: Mapping[str, Privacy] = {each.value: each for each in Privacy}
"""Privacy classes by their names in offers and options."""


class TimeLimit(Enum):
    """The time limits of a job, by what they bound."""

    QUEUE = "waiting in the queue"
    FIRST_OUTPUT = "waiting for the first output"
    SILENCE = "waiting for more output"
    TOTAL = "running in all"

    __hash__ = object.__hash__  # members are singletons, hashed very often


class TimeLimits(msgspec.Struct, frozen=True):
    """How long a job may wait and run, in seconds.

    ``without_worker`` is how long it waits while no worker can take it, busy or not.
    ``unattended`` is how long a job with an idempotency key goes on after its last
    client has left.
    """

    queue: float = 30.0
    first_output: float = 300.0
    silence: float = 120.0
    total: float = 3600.0
    without_worker: float = math.inf
    unattended: float = math.inf


class Priority(Enum):
    """The order of waiting jobs: a higher priority always goes first."""

    LOW = 0
    NORMAL = 1
    HIGH = 2

    __hash__ = object.__hash__  # members are singletons, hashed very often


PRIORITIES: Mapping[str, Priority] = {each.name.lower(): each for each in Priority}
"""Priorities by the names that clients give them."""


class Webhook(msgspec.Struct, frozen=True):
    """The URL notified when a job ends; ``secret`` signs the notification."""

    url: str
    secret: str


GANG_MAX = 256  # members of a gang: each is a job in the queue
GANG_SLOTS_MAX = 256  # slots of one member
GANG_ID_DIGITS = 32
HEXADECIMAL = frozenset("0123456789abcdef")


class Gang(msgspec.Struct, frozen=True):
    """A job's membership of a gang: jobs that are first leased together, or not at all.

    Each member runs on another machine, on ``slots`` slots of it; 0: on all slots.
    The gang ends when fewer than ``least`` of its ``size`` members can go on.  ``id``
    is the same for all members, and ``rank`` counts them from 0.

    Raises InvalidRequest.
    """

    id: str
    rank: int
    size: int
    least: int
    slots: int = 0

    def __post_init__(self) -> None:
        if len(self.id) != GANG_ID_DIGITS or not HEXADECIMAL.issuperset(self.id):
            expected = f"{GANG_ID_DIGITS} hexadecimal digits in lower case"
            raise InvalidRequest(f"gang: id: expected {expected}", "gang")
        for name, lowest, highest in (
            ("size", 1, GANG_MAX),
            ("rank", 0, self.size - 1),
            ("least", 1, self.size),
            ("slots", 0, GANG_SLOTS_MAX),
        ):
            value = getattr(self, name)
            if not lowest <= value <= highest:
                expected = f"expected {lowest} to {highest}, got {value}"
                raise InvalidRequest(f"gang: {name}: {expected}", "gang")


class JobTerms(msgspec.Struct, frozen=True):
    """The terms of a job: who pays, who may run it, and what is kept of it.

    ``user`` is the owner's sub-account.  A job that is not ``kept`` is lost at a
    restart, and has no receipt.  ``form`` is the JSON text of the work as its client
    sent it, for wires that carry work in that form.  ``api_fields`` is the JSON text of
    what an API has to return with the answer, and no worker needs.  ``trace`` is the
    ``traceparent`` of the request (``trace_context``); empty: it is not traced.
    ``left_out`` says what of the request the work does not have, and why.  ``end_user``
    is the client's name for its user: users of one key take turns.  ``whole`` is for
    answers that are not read as they come: streams for the same owner go first.
    ``alias`` is what the request called the model, if that is an alias.
    ``hosted_after`` is as in ``Key``, for jobs that a hosted provider may get.
    """

    policy: Policy = Policy.FAST
    privacy: Privacy = Privacy.PUBLIC
    user: str = ""
    price: int = 0  # micro-dollars
    payment_ref: str = ""  # identifies the payment in its own system
    form: str = ""
    webhook: Webhook | None = None
    avoid: frozenset[WorkerId] = frozenset()  # workers that must not get it
    detached: bool = False  # continues when no client waits for it
    near: bool = False  # only for workers of this pool: it came from another
    peer: str = ""  # that submitted it, and must not get it back; as in ``peer_of``
    kept: bool = True  # whether it is stored
    gang: Gang | None = None
    api_fields: str = ""
    trace: str = ""
    left_out: tuple[str, ...] = ()
    end_user: str = ""
    whole: bool = False
    waits: bool = False  # for a function that no worker has, or had a short while ago
    settled: bool = False  # whether we collected the payment that the reference names
    alias: str = ""
    hosted_after: float | None = None


DEFAULT_TERMS = JobTerms()
"""Default terms."""


class Job(msgspec.Struct, frozen=True):
    """Accepted work, with its limits and terms.

    ``session`` identifies jobs that share state a worker may have cached, such as a
    conversation.  ``idempotency_key`` is the owner's own name for the job: the job
    continues when the owner disconnects, and a repeated request attaches to it.
    """

    id: JobId
    work: Work
    limits: TimeLimits = TimeLimits()
    owner: str = ""  # the name of the API key
    priority: Priority = Priority.NORMAL
    session: str = ""
    idempotency_key: str = ""
    terms: JobTerms = DEFAULT_TERMS
    kind: JobKind = JobKind.CHAT  # of the work, whatever is given
    model: str = ""  # of the work, whatever is given

    def __post_init__(self) -> None:
        structs.force_setattr(self, "kind", self.work.kind)
        structs.force_setattr(self, "model", self.work.model)

    @property
    def unattended(self) -> float:
        """Seconds that it goes on when no client waits for it."""
        if self.terms.detached:
            return math.inf
        return self.limits.unattended if self.idempotency_key else 0.0
