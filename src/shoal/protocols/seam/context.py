"""What a wire's endpoints are given of the coordinator or the worker around them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.domain.worker import (
    UNKNOWN_HARDWARE,
    DeviceKind,
    Hardware,
    Offer,
    ServedModel,
)
from shoal.protocols.seam.admission import AdmissionCheck, NoThrottle, Throttle
from shoal.protocols.seam.peer_addresses import PeerAddress
from shoal.protocols.seam.session import WorkerEnd


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
    peer_addresses: Sequence[PeerAddress] = ()


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
