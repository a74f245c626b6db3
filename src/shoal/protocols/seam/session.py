"""The seam between worker protocols and the rest of the program.

A session is one connection to one peer, as a state machine: bytes and messages go in,
bytes and messages come out, and it never performs I/O, reads a clock or logs.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar, runtime_checkable

from shoal.domain.credentials import digest_of
from shoal.domain.errors import NotAdmitted, PeerError, Unsupported
from shoal.domain.vocabulary import Command, Event
from shoal.domain.work import Call, CallStream, JsonWork, Work
from shoal.domain.worker import (
    UNKNOWN_HARDWARE,
    DeviceKind,
    Hardware,
    Offer,
    ServedModel,
)

if TYPE_CHECKING:
    from shoal.protocols.seam.peer_addresses import PeerAddress

In = TypeVar("In", covariant=True)
Out = TypeVar("Out", contravariant=True)

Data: TypeAlias = bytes | str  # a WebSocket text message is a str

Batch: TypeAlias = list[Data] | tuple[Data, ...]
"""What one read brought: messages, or pieces of a byte stream.

No Sequence, which a single text would be as well.
"""


@dataclass(slots=True)
class Send:
    """Write this to the peer.

    Not frozen, for there is one for each message.
    """

    data: Data


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection once what was sent before is written; send nothing after.

    ``code`` and ``text`` are what a WebSocket peer reads; ``reason`` is for us.
    """

    reason: str
    code: int = 1000
    text: str = ""


CLOSE_MOVED = 3999  # close code of our own: a worker's way goes on elsewhere, at once


@dataclass(frozen=True, slots=True)
class Notice:
    """Something odd that a person may want to read in the log; nothing else happens."""

    text: str


@dataclass(frozen=True, slots=True)
class Bulk:
    """Write these one after the other: a message that is large, on a byte stream.

    What is sent after it may go out before it, but between its parts only where one is
    empty.  An iterator makes the parts as they are written; then ``size`` says how many
    bytes they are together.  It may yield empty ones before the first, between steps
    of what takes long, such as a checksum.
    """

    parts: tuple[bytes | memoryview, ...] | Iterator[bytes | memoryview]
    size: int | None = None


Output: TypeAlias = Send | Bulk | Close | Notice

PROTOCOL_ERROR = 1002  # WebSocket close code (RFC 6455, section 7.4.1)


def protocol_error(error: PeerError) -> Close:
    """Return how to end a connection whose peer broke the protocol."""
    return Close(f"protocol error: {error}", PROTOCOL_ERROR, str(error))


def without_calls(work: Work) -> JsonWork:
    """Return work as it is, for a wire that calls no functions.

    Raises Unsupported if it is a call of one.
    """
    if isinstance(work, Call | CallStream):
        raise Unsupported("this wire calls no functions")
    return work


class Session(Protocol[In, Out]):
    """Speaks one protocol in one role.

    ``Session[Event, Command]`` is the coordinator's end, ``Session[Command, Event]``
    the worker's: what one end issues, the other receives, and ``Welcome`` besides.
    """

    accepts: frozenset[type]
    """The messages this wire can express; ``issue`` is given no other."""

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due, on the clock passed as ``now``."""
        ...

    def receive(self, batch: Batch, now: float) -> Sequence[In | Output]:
        """Take what arrived together; return what it meant and what to answer.

        If the peer breaks the protocol, a Close with the reason comes after what
        it had said before; with nothing before it, PeerError may be raised.
        """
        ...

    def send(self, message: Out, now: float) -> Sequence[Output]:
        """Encode one message for the peer.

        Raises Unsupported if it is not among ``accepts``.
        """
        ...

    def tick(self, now: float) -> Sequence[In | Output]:
        """Act on time passing.

        Called once when the connection is open, and then at or after ``deadline``.
        """
        ...


@runtime_checkable
class HandlesConnectionLoss(Protocol):
    """A session that has to know that its peer has hung up, and may still answer."""

    def connection_lost(self, now: float) -> Sequence[Output]:
        """Take note that nothing more will come; the last call, unless it closed.

        It is also told of a connection that broke, of a peer that stopped reading, and
        of bytes that its link refused: that a connection ends because of the peer.
        """
        ...


@dataclass(frozen=True, slots=True)
class Admitted:
    """A worker was let in; wires with one connection for all models say so."""


CoordinatorEnd: TypeAlias = Session[Event, Command]
WorkerEnd: TypeAlias = Session[Command | Admitted, Event]


@dataclass(frozen=True, slots=True)
class UpgradeRequest:
    """How a connection introduced itself.  Header names are lower case."""

    path: str
    query: str = ""  # as sent, without the question mark
    headers: Mapping[str, str] = field(default_factory=dict)
    address: str = ""  # where it comes from, as the network has it


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


class Identity(Protocol):
    """The key pair that a machine is known by, on wires that know machines by keys.

    ``public_key`` is Ed25519's, ``exchange_key`` X25519's; both have 32 bytes.
    """

    public_key: bytes
    exchange_key: bytes

    def sign(self, message: bytes) -> bytes:
        """Return the signature, of 64 bytes."""
        ...

    def exchange(self, public_key: bytes) -> bytes:
        """Return what is shared with the owner of an X25519 key: 32 bytes, unhashed.

        Raises ValueError for a key that shares the same with everybody.
        """
        ...


@dataclass(frozen=True, slots=True)
class AcceptedConnection:
    """A session for a new connection, and the headers of the answer that opens it.

    A use of a join token that ``admitted`` stands for is to be stored before that.
    """

    session: CoordinatorEnd
    headers: Mapping[str, str] = field(default_factory=dict)
    grant: AdmissionGrant = AdmissionGrant()


@dataclass(frozen=True, slots=True)
class WebSocketRoute:
    """A claim on WebSocket connections.  Of several claims the lowest ``rank`` wins."""

    rank: int
    claims: Callable[[UpgradeRequest], bool]
    accept: Callable[[UpgradeRequest, float], AcceptedConnection]
    """Takes the hello and the time; raises Refused with the wire's close code."""
    message_max: int  # bytes


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


def _ignore(text: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class ProtocolContext:
    """What a protocol's endpoints have to know of the coordinator around them.

    ``start`` is in milliseconds since the epoch, and grows with every start.  ``draw``
    returns that many random bytes.  ``verifies`` says whether a signature (second) of a
    message (third) was made by the owner of a public key (first).  ``epoch`` is as in
    ``Member``, and ``name`` is what the machine is called.  ``guesses`` counts wrong
    secrets that are not presented to ``admission``, and ``token`` is what workers
    present where theirs has none.  ``warn`` tells people what they had better know, and
    ``contacts`` are peers that may speak any wire.
    """

    start: int
    admission: AdmissionCheck
    random_bytes: Callable[[int], bytes]
    identity: Identity
    verify: Callable[[bytes, bytes, bytes], bool]
    epoch: float = 0.0
    name: str = "shoal"
    hardware: Hardware = UNKNOWN_HARDWARE
    throttle: Throttle = NoThrottle()  # noqa: RUF009  # it has no state
    token: str = ""
    warn: Callable[[str], None] = _ignore
    peer_addresses: Sequence["PeerAddress"] = ()


def _no_randomness(size: int) -> bytes:
    raise AssertionError("a member that draws secrets was given no source of them")


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """How a worker presents itself to a coordinator, for one model.

    ``only_for`` names the keys that it works for; empty: all.  ``identity`` is there
    where the wire ``signs``.  ``epoch`` is the Unix time at which the clock passed as
    ``now`` was at 0.  ``offers`` is what it can run when it begins, where one
    connection stands for all models, and ``direct`` an address at which the coordinator
    says that it can be reached without HTTP (``tcp://HOST:PORT``).  ``draw`` returns
    that many random bytes, and ``passcode`` is the cluster's, where a wire has such.
    """

    name: str
    model: ServedModel
    slots: int
    token: str = ""
    only_for: frozenset[str] = frozenset()
    tasks: frozenset[str] = frozenset()  # names of tasks that it does as well
    device: DeviceKind = DeviceKind.DESKTOP
    identity: Identity | None = None
    epoch: float = 0.0  # seconds
    offers: tuple[Offer, ...] = ()
    direct_url: str = ""
    hardware: Hardware = UNKNOWN_HARDWARE
    random_bytes: Callable[[int], bytes] = _no_randomness
    passcode: str = ""


class Dialer(Protocol):
    """A worker's way into one coordinator, across all its connections to it.

    What a worker still runs when a connection breaks lives here, so that the next
    connection can go on with it.
    """

    url: str
    headers: Mapping[str, str]
    message_max: int  # bytes

    def start_session(self, headers: Mapping[str, str]) -> WorkerEnd:
        """Return the session for a new connection, given the headers of the answer."""
        ...

    def why_final(self, code: int, text: str) -> str | None:
        """Say why there is no point in dialling again after this close, or None."""
        ...
