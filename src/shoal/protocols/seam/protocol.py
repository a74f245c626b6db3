"""What a wire declares: its configuration, its endpoints and how it is dialled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from shoal.domain.job_kinds import INFERENCE_KINDS
from shoal.domain.work import JobKind
from shoal.protocols.seam.context import Dialer, ProtocolContext, WorkerProfile
from shoal.protocols.seam.endpoints import (
    Listener,
    MembershipProber,
    OutgoingConnection,
    ServiceBrowser,
    WebSocketRoute,
)
from shoal.protocols.seam.relay import RelayRoute

C = TypeVar("C")


Endpoint: TypeAlias = (
    WebSocketRoute
    | RelayRoute
    | Listener
    | OutgoingConnection
    | ServiceBrowser
    | MembershipProber
)
"""A way to come to peers; whoever runs one kind leaves the others to others."""


@dataclass(frozen=True, slots=True)
class CoordinatorProbe:
    """What coordinators of a wire that are not ours answer over HTTP.

    ``path`` is asked for below the coordinator's URL, and ``is_theirs`` says whether
    the JSON that comes is theirs.
    """

    path: str
    is_theirs: Callable[[object], bool]


@dataclass(frozen=True, slots=True)
class Pairing:
    """How a worker becomes one that a user trusts, by a code that the user was given.

    What ``claim`` makes of a code and a public key is posted to ``path`` below the
    coordinator's URL.  ``user`` reads from the answer whom the worker is paired with;
    it raises NotAdmitted, saying why not.
    """

    path: str
    claim: Callable[[str, bytes], Mapping[str, object]]
    user: Callable[[object], str]


@dataclass(frozen=True, slots=True)
class FleetAccess(Generic[C]):
    """How machines are let into a fleet of a wire: by its token, and its name.

    ``invite`` makes a URL of both, for other machines to scan, and ``read`` reads it;
    ``check`` looks at a token.  All raise ConfigError for what is no good.  Other
    programs of the wire keep the token in ``file``, below the user's home folder, or
    are given it by ``variable``, of the environment.  ``within`` puts a fleet's name
    into a peer's URL; None: the URL says that the peer is of another fleet, or of one
    without a token.
    """

    invite: Callable[[str, str], str]
    read: Callable[[str], tuple[str, str]]
    check: Callable[[str], object]
    file: str
    variable: str
    within: Callable[[str, str], str | None]
    credentials: Callable[[C], tuple[str, str]]
    """The token and the name of a fleet in the wire's configuration; empty: none."""
    with_credentials: Callable[[C, str, str], C]
    """Returns a configuration with this token and this name."""
    is_open: Callable[[C], bool]
    """Whether a configuration is for a fleet without a token."""
    port: int = 0
    """At which nodes of a fleet are usually found."""


@dataclass(frozen=True, slots=True)
class WireProtocol(Generic[C]):
    """A worker protocol, with a configuration of its own type.

    ``config`` is a frozen dataclass whose fields become the section, the flags and the
    variables of that name; each field's metadata holds its ``help``.  Nobody else reads
    them: what others must know of a configuration is a function here that takes it.
    """

    name: str
    config: type[C]
    endpoints: Callable[[C, ProtocolContext], Sequence[Endpoint]]
    """Takes the configuration, and what is around."""
    token: Callable[[C], str]
    """What workers present as their token; empty: the coordinator's join token."""
    schemes: frozenset[str]
    """The URL schemes for which this wire is taken when none is named."""
    dial: Callable[[str, WorkerProfile], Dialer]
    """Takes the coordinator's URL; raises ConfigError if it is no good."""
    kinds: frozenset[JobKind] = INFERENCE_KINDS | {JobKind.TASK}
    """The kinds of jobs that it can carry."""
    models_max: int | None = None
    """How many models one worker can offer; None: any, with a connection each."""
    signs: bool = False
    """Whether a worker is known by a key, and signs what it did."""
    face: CoordinatorProbe | None = None
    """Tells coordinators that speak this wire alone from ours, which speak them all."""
    pairing: Pairing | None = None
    joint: bool = False
    """Whether a worker has one connection for all its models: ``Member.offers``."""
    preferred: bool = False
    """Whether our own coordinators are joined by it, if nothing else is said."""
    service: str = ""
    """The kind of service that its coordinators are announced as, where they are."""
    address: Callable[[str, Mapping[str, int]], str] | None = None
    """Where one of our coordinators has this wire, if it has ports of its own.

    Takes its host, and its ports by their labels; returns the URL to dial, and "" if
    the port is not among them.
    """
    peering: Callable[[str, WorkerProfile], OutgoingConnection] | None = None
    """How to call on a peer, to ask and not to serve, where peers share models.

    Takes its address, such as ``tcp://HOST:PORT``; raises ConfigError if it is no good.
    """
    fleets: FleetAccess[C] | None = None
    anonymous_http: Callable[[C], bool] | None = None
    """Whether clients of this wire's own HTTP API need no API key there.

    None: it has no such API, or always asks for a key.
    """


AnyWireProtocol: TypeAlias = WireProtocol[Any]
"""A worker protocol, as the rest of the program sees it.

Its functions take the configuration that its ``config`` makes, and no other.
"""
