"""This end of every session: settings, identity, hardware, admission rules."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from shoal.domain.errors import ConfigError
from shoal.domain.settings import is_guessable, setting
from shoal.domain.worker import Hardware, Offer
from shoal.protocols.seam.admission import AdmissionCheck, NoThrottle, Throttle
from shoal.protocols.seam.context import Identity, ProtocolContext, WorkerProfile
from shoal.protocols.tealenet.codec.scalars import is_uuid, passcode_hash, well_formed


@dataclass(frozen=True, slots=True)
class Config:
    """The admission of peers, and their addresses.

    Raises ConfigError from the constructor for an owner that is no UUID.
    """

    passcode: str = setting(
        "passcode of the cluster; peers that have it serve and submit "
        "jobs. The peers that this end connects to get its hash, which admits them "
        "as well",
        "",
        secret=True,
    )
    open: bool = setting(
        "admission of peers without a passcode, to serve and to submit jobs", False
    )
    lan: bool = setting("separate TCP port for peers, announced by multicast", True)
    port: int = setting("number of that port; 0: the system chooses one", 0)
    browse: bool = setting(
        "discovery of peers by multicast, and connections to those found", False
    )
    peers: tuple[str, ...] = setting(
        "peers to connect to where multicast is blocked: HOST:PORT, separated by "
        "commas",
        (),
        "ADDRESSES",
    )
    relays: tuple[str, ...] = setting(
        "relays to join: wss://HOST/ws, separated by commas. At relays of "
        "others, any node can copy a registration and take this node's place",
        (),
        "URLS",
    )
    owner: str = setting(
        "UUID of the user that this machine belongs to, for peers to show", "", "UUID"
    )

    def __post_init__(self) -> None:
        check_owner(self.owner, "--tealenet-owner")

    @property
    def admits_peers(self) -> bool:
        """Whether any peer can be admitted, at a coordinator with a join token."""
        return bool(
            self.passcode or self.open or self.browse or self.peers or self.relays
        )


def check_owner(owner: str, flag: str) -> None:
    """Raise ConfigError unless an owner is empty or a UUID: Macs refuse any other."""
    if owner and not is_uuid(owner):
        raise ConfigError(
            f"{flag} {owner}: expected a UUID such as "
            "550E8400-E29B-41D4-A716-446655440000"
        )


def _ignore(reason: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class TealeLocalNode:
    """This end of every session; times and randomness are as in ``ProtocolContext``.

    ``device_id`` is a UUID in upper case.  ``passcode`` is the hash of the cluster's
    passcode, or None.  A worker ``serves_only``: it submits no jobs.  Without an
    ``admission``, as at a worker, every dialled peer may submit jobs.  ``on_rejected``
    gets the reason when a dialled peer is not admitted, and ``throttle`` counts wrong
    passcodes.  ``offers`` are the first ones.  ``owner`` is a UUID in upper case, or
    None, and ``registered_at`` the Unix time of the identity; None: the current time.
    """

    name: str
    device_id: str
    hardware: Hardware
    epoch: float  # seconds
    random_bytes: Callable[[int], bytes]
    identity: Identity | None
    serves_only: bool = False
    passcode: str | None = None
    admission: AdmissionCheck | None = None
    open: bool = False
    on_rejected: Callable[[str], None] = _ignore
    weak_passcode: bool = False
    throttle: Throttle = NoThrottle()  # noqa: RUF009  # it has no state
    offers: tuple[Offer, ...] = ()
    owner: str | None = None
    registered_at: float | None = None


def coordinator_node(config: Config, context: ProtocolContext) -> TealeLocalNode:
    """Return a coordinator's end."""
    return TealeLocalNode(
        name=context.name,
        device_id=device_id(context.identity, context.name),
        hardware=context.hardware,
        epoch=context.epoch,
        random_bytes=context.random_bytes,
        identity=context.identity,
        passcode=passcode_hash(config.passcode) if config.passcode else None,
        weak_passcode=is_guessable(config.passcode),
        admission=context.admission,
        open=config.open,
        throttle=context.throttle,
        owner=config.owner.upper() or None,
        registered_at=context.registered_at,
    )


def worker_node(profile: WorkerProfile) -> TealeLocalNode:
    """Return a worker's end, without its token: the wire has none.

    Raises ConfigError for an owner that is no UUID.
    """
    check_owner(profile.owner, "--owner")
    return TealeLocalNode(
        name=profile.name,
        device_id=device_id(profile.identity, profile.name),
        hardware=profile.hardware,
        epoch=profile.epoch,
        random_bytes=profile.random_bytes,
        identity=profile.identity,
        serves_only=True,
        passcode=passcode_hash(profile.passcode) if profile.passcode else None,
        offers=profile.first_offers,
        owner=profile.owner.upper() or None,
        registered_at=profile.registered_at,
    )


def device_id(identity: Identity | None, name: str) -> str:
    """Return a device's UUID: the same for the same key, or for the same name.

    It has version 8, whose bits an application defines (RFC 9562, section 5.8).
    """
    seed = well_formed(name).encode() if identity is None else identity.public_key
    return uuid_from(hashlib.sha256(b"shoal device\n" + seed).digest())


def uuid_from(random_bytes: bytes) -> str:
    """Format the first 16 bytes as a UUID, in upper case as Macs do."""
    marked = bytearray(random_bytes[:16])
    marked[6] = marked[6] & 0x0F | 0x80
    marked[8] = marked[8] & 0x3F | 0x80
    text = marked.hex().upper()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
