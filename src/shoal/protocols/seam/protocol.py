"""What a wire declares: its configuration, its endpoints and how it is dialled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from shoal.domain.work import JobKind
from shoal.protocols.seam.context import Dialer, ProtocolContext, WorkerProfile
from shoal.protocols.seam.endpoints import (
    BulkRoute,
    Listener,
    MembershipProber,
    OutgoingConnection,
    ServiceBrowser,
    WebSocketRoute,
)
from shoal.protocols.seam.ranks import ArrayWire, SegmentWire
from shoal.protocols.seam.relay import RelayRoute

C = TypeVar("C")


Endpoint: TypeAlias = (
    WebSocketRoute
    | BulkRoute
    | RelayRoute
    | Listener
    | OutgoingConnection
    | ServiceBrowser
    | MembershipProber
)
"""A way to connect to peers; each runner handles one endpoint kind."""


@dataclass(frozen=True, slots=True)
class CoordinatorProbe:
    """An HTTP request that recognises other implementations' coordinators.

    ``path`` is relative to the coordinator's URL, and ``is_theirs`` returns whether the
    JSON response is from such a coordinator.
    """

    path: str
    is_theirs: Callable[[object], bool]


@dataclass(frozen=True, slots=True)
class Pairing:
    """How a worker is paired with a user, by a code of that user.

    ``claim`` takes the code and a public key, and returns the body to post to ``path``,
    relative to the coordinator's URL.  ``user`` reads the paired user from the
    response; raises NotAdmitted with the reason.
    """

    path: str
    claim: Callable[[str, bytes], Mapping[str, object]]
    user: Callable[[object], str]


@dataclass(frozen=True, slots=True)
class FleetAccess(Generic[C]):
    """How machines join a fleet of a wire: by its token and its name.

    ``invite`` encodes both in a URL, for other machines to scan, and ``read`` decodes
    it; ``check`` validates a token.  All raise ConfigError for invalid input.  Other
    programs of the wire read the token from ``file``, relative to the user's home
    folder, or from the environment variable ``variable``.  ``within`` adds a fleet's
    name to a peer's URL; None: by its URL, the peer is in another fleet, or in one
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
    """The default port of a fleet's nodes."""


def _no_peers(config: object, tls: bool, anyone: bool) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class WireProtocol(Generic[C]):
    """A worker protocol, with a configuration of its own type.

    ``config`` is a frozen dataclass whose fields become the section, the flags and the
    variables of that name; each field's metadata has its ``help``.  Only the wire reads
    the fields; the functions below give others access to a configuration.
    """

    name: str
    config: type[C]
    endpoints: Callable[[C, ProtocolContext], Sequence[Endpoint]]
    """Takes the configuration and the context."""
    token: Callable[[C], str]
    """The wire's own token, which admits workers beside the join token; empty: none."""
    schemes: frozenset[str]
    """The URL schemes that select this wire if none is named."""
    dial: Callable[[str, WorkerProfile], Dialer]
    """Takes the coordinator's URL; raises ConfigError if it is invalid."""
    kinds: frozenset[JobKind]
    """The kinds of jobs that the wire supports."""
    peers: str = ""
    """The programs that speak the wire, as the heading of its settings names them."""
    models_max: int | None = None
    """Maximum models per worker; None: unlimited, with one connection per model."""
    has_keys: bool = False
    """Whether workers are identified by keys."""
    coordinator_probe: CoordinatorProbe | None = None
    """Recognises coordinators that speak only this wire; Shoal's speak all wires."""
    pairing: Pairing | None = None
    joint: bool = False
    """Whether a worker has one connection for all models: ``WorkerProfile.offers``."""
    preferred: bool = False
    """Whether workers join Shoal's coordinators by this wire by default."""
    service: str = ""
    """The service type that announces its coordinators; empty: none."""
    address: Callable[[str, Mapping[str, int]], str] | None = None
    """The address of this wire at a Shoal coordinator, if the wire has its own ports.

    Takes the host, and the ports by label; returns the URL to dial, or "" if the port
    is not among them.
    """
    peering: Callable[[str, WorkerProfile], OutgoingConnection] | None = None
    """How to dial a peer as a client only, if peers share models.

    Takes its address, such as ``tcp://HOST:PORT``; raises ConfigError if it is invalid.
    """
    fleets: FleetAccess[C] | None = None
    ranks: Callable[[], SegmentWire] | None = None
    """Returns the messages between the ranks of a training run, for one rank."""
    mixed_ranks: Callable[[], ArrayWire] | None = None
    """The same for ranks of which some are other programs."""
    worker_endpoints: Callable[[C, ProtocolContext], Sequence[Endpoint]] | None = None
    """The endpoints of a worker that coordinators dial; None: workers only dial.

    Takes the configuration and the context, whose ``admission`` admits coordinators.
    """
    encrypts: bool = False
    """Whether Shoal's workers can encrypt their connections: ``encrypted_stream``."""
    plain_peers: Callable[[C, bool, bool], str] = _no_peers
    """The peers whose connections are not encrypted, for operators; empty: none.

    Takes the configuration, whether the HTTP port has TLS, and whether peers without a
    credential of this protocol may be admitted.
    """
    anonymous_http: Callable[[C], bool] | None = None
    """Whether this wire's own HTTP API accepts clients without an API key.

    None: the wire has no such API, or it always requires a key.
    """


AnyWireProtocol: TypeAlias = WireProtocol[Any]
"""A worker protocol, as the rest of the program sees it.

Its functions take only a configuration of the type in its ``config``.
"""
