"""What a coordinator or a worker provides to a wire's endpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from shoal.domain import worker
from shoal.domain.job import Privacy
from shoal.domain.vocabulary import TextRoute, TextSent
from shoal.domain.work import JobKind
from shoal.protocols.seam.admission import AdmissionCheck, NoThrottle, Throttle
from shoal.protocols.seam.peer_addresses import PeerAddress
from shoal.protocols.seam.session import Session, WorkerEnd


class Identity(Protocol):
    """A machine's key pairs, on wires that identify machines by keys.

    ``public_key`` is an Ed25519 key, ``exchange_key`` an X25519 key, of 32 bytes each.
    """

    public_key: bytes
    exchange_key: bytes

    def sign(self, message: bytes) -> bytes:
        """Return the signature, 64 bytes."""

    def exchange(self, public_key: bytes) -> bytes:
        """Return the secret shared with the owner of an X25519 key, 32 bytes, unhashed.

        Raises ValueError for a key of low order, whose shared secret is public.
        """


def _ignore(text: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class ProtocolContext:
    """What a coordinator provides to a protocol's endpoints.

    ``random_bytes`` returns that many random bytes.  ``verify`` takes a public key, a
    signature and a message.  ``epoch`` is as in ``WorkerProfile``, and ``name`` is the
    name of the machine.  ``throttle`` counts wrong secrets that are not presented to
    ``admission``, and ``token`` is the token of workers on wires that configure none.
    ``registered_at`` is the Unix time at which the machine got its identity; None: now.
    ``warn`` logs a warning for the operator, and ``peer_addresses`` are peers that may
    speak any wire.  ``relay_open``: any node may use this coordinator's relay.
    ``plain``: Shoal's workers need not encrypt their connections.  ``addresses``
    returns the URLs of the pool's coordinators; none, if this is the only one.
    """

    admission: AdmissionCheck
    random_bytes: Callable[[int], bytes]
    identity: Identity
    verify: Callable[[bytes, bytes, bytes], bool]
    epoch: float = 0.0
    name: str = "shoal"
    hardware: worker.Hardware = worker.UNKNOWN_HARDWARE
    throttle: Throttle = NoThrottle()  # noqa: RUF009  # it has no state
    token: str = ""
    warn: Callable[[str], None] = _ignore
    peer_addresses: Sequence[PeerAddress] = ()
    registered_at: float | None = None
    relay_open: bool = False
    plain: bool = False
    addresses: Callable[[], Sequence[str]] = tuple


def _no_randomness(size: int) -> bytes:
    raise AssertionError("this worker profile has no source of random bytes")


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """How a worker presents itself to a coordinator, for one model.

    ``only_for`` names the keys that it works for; empty: all. ``privacy`` is the only
    privacy class of jobs that it accepts; None: any. ``price`` is as in ``Offer``.
    ``identity`` is set if the wire ``has_keys``. ``epoch`` is the Unix time at which
    the clock passed as ``now`` was at 0. ``offers`` lists what the worker can run at
    the start, if one connection carries all models. ``direct_url`` is an address
    without HTTP that the coordinator advertises (``tcp://HOST:PORT``).
    ``expected_models`` are names of models that it offers once they are loaded: the
    wire reports to the coordinator, so that it can refuse the worker before that.
    ``random_bytes`` returns that many random bytes, and ``passcode`` is the cluster's,
    on wires that have one. ``owner`` is the id of the user that the machine belongs to,
    on wires that report it, and ``registered_at`` and ``plain`` are as in
    ``ProtocolContext``. ``engine`` is as in ``Offer``. ``verify`` takes a public key, a
    signature and a message. ``coordinator_key`` is the key, in hexadecimal, of the
    coordinator that has admitted this worker before, without a token; empty: unknown.
    ``on_coordinator`` gets the key of a coordinator that has proved the token.
    ``addresses`` are further URLs of the coordinator's pool.
    """

    name: str
    model: worker.ServedModel
    slots: int
    token: str = ""
    only_for: frozenset[str] = frozenset()
    tasks: frozenset[str] = frozenset()  # names of tasks that it also runs
    device: worker.DeviceKind = worker.DeviceKind.DESKTOP
    identity: Identity | None = None
    epoch: float = 0.0  # seconds
    offers: tuple[worker.Offer, ...] = ()
    direct_url: str = ""
    hardware: worker.Hardware = worker.UNKNOWN_HARDWARE
    random_bytes: Callable[[int], bytes] = _no_randomness
    passcode: str = ""
    owner: str = ""
    registered_at: float | None = None
    privacy: Privacy | None = None
    plain: bool = False
    price: str = ""
    expected_models: tuple[str, ...] = ()
    engine: str = ""
    verify: Callable[[bytes, bytes, bytes], bool] | None = None
    coordinator_key: str = ""
    on_coordinator: Callable[[str], None] = _ignore
    addresses: tuple[str, ...] = ()
    wake: tuple[str, ...] = ()

    @property
    def first_offers(self) -> tuple[worker.Offer, ...]:
        """What it offers at first: its own model and tasks, if nothing else is named.

        Nothing, if its models are still to be loaded.
        """
        if self.offers or self.expected_models:
            return self.offers
        model = self.model
        kinds = model.kinds - {JobKind.TASK}
        offer = worker.Offer(
            kinds=kinds | {JobKind.TASK} if self.tasks else kinds,
            models=frozenset({model.name}),
            slots=self.slots,
            features=model.features,
            context=model.context,
            only_for=self.only_for,
            privacy=self.privacy,
            price=self.price,
            tasks=self.tasks,
            device=self.device,
            public_key=self.identity.public_key.hex() if self.identity else "",
        )
        return (offer,)

    @property
    def restriction(self) -> str:
        """The options that restrict whose jobs it accepts; empty: none."""
        given = {"--only-for": self.only_for, "--privacy": self.privacy}
        return " and ".join(option for option, value in given.items() if value)


def unenforceable(restriction: str) -> str:
    """Return why a worker with a restriction cannot serve a coordinator.

    The coordinator does not know Shoal's offers, and its jobs do not name a user.
    """
    return (
        f"{restriction} cannot be enforced: this coordinator is not Shoal's, and its "
        "protocol names neither the user nor the privacy class of a job; leave the "
        "option out, or join a coordinator of `shoal serve`"
    )


class Dialer(Protocol):
    """A worker's state towards one coordinator, across all connections to it.

    Jobs that still run when a connection breaks are kept here, so that the next
    connection can continue them.
    """

    url: str
    headers: Mapping[str, str]
    message_max: int  # bytes

    def start_session(self, headers: Mapping[str, str]) -> WorkerEnd:
        """Return the session for a new connection; takes the response headers."""

    def final_reason(self, code: int, text: str) -> str | None:
        """Return why redialling is pointless after this close; None: redial."""


@runtime_checkable
class DialsText(Protocol):
    """A dialer that can open connections for text past the coordinator."""

    def text_url(self, route: TextRoute) -> str | None:
        """Return the URL of such a connection; None: there is none from here."""

    def start_text(self, route: TextRoute) -> Session[object, TextSent]:
        """Return the session for a new one, which gives something once it is open."""


@runtime_checkable
class KeepsCalls(Protocol):
    """A dialer whose coordinators let function calls go on when a connection breaks."""

    keeps_calls: Literal[True]
