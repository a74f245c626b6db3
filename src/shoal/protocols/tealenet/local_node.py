"""This end of every session: identity, hardware, credentials and admission rules."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from shoal.domain.work import JobKind
from shoal.domain.worker import Hardware, Offer
from shoal.protocols.seam.session import (
    AdmissionCheck,
    Identity,
    NoThrottle,
    ProtocolContext,
    Throttle,
    WorkerProfile,
)
from shoal.protocols.tealenet.codec.scalars import passcode_hash, well_formed
from shoal.protocols.tealenet.config import Config


class TealeRole(Enum):
    """What one of our own is to the other end."""

    COORDINATOR = "coordinator"
    WORKER = "worker"  # serves who has let it in, and asks for nothing


def _ignore(reason: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class TealeLocalNode:
    """One end's own side; times and randomness are as in ``ProtocolContext``.

    ``device_id`` is a UUID in upper case.  ``passcode`` is what peers are shown of the
    cluster's, and None if there is none.  ``token`` is what we present to be let in.
    Without an ``admission`` whomever we dialled may ask, as a worker has it, and
    without ``verify`` nobody is asked to prove a key.  ``on_rejected`` is told why
    a peer does not want us, now or later, and ``throttle`` of wrong passcodes.
    ``offers`` is what we can run to begin with.
    """

    role: TealeRole
    name: str
    device_id: str
    hardware: Hardware
    epoch: float  # seconds
    random_bytes: Callable[[int], bytes]
    identity: Identity | None
    flat: bool = False
    passcode: str | None = None
    token: str = ""
    admission: AdmissionCheck | None = None
    open: bool = False
    verify: Callable[[bytes, bytes, bytes], bool] | None = None
    on_rejected: Callable[[str], None] = _ignore
    throttle: Throttle = NoThrottle()  # noqa: RUF009  # it has no state
    offers: tuple[Offer, ...] = ()


def coordinator_node(config: Config, context: ProtocolContext) -> TealeLocalNode:
    """Return a coordinator's side."""
    return TealeLocalNode(
        role=TealeRole.COORDINATOR,
        name=context.name,
        device_id=device_id(context.identity, context.name),
        hardware=context.hardware,
        epoch=context.epoch,
        random_bytes=context.random_bytes,
        identity=context.identity,
        flat=config.flat,
        passcode=passcode_hash(config.passcode) if config.passcode else None,
        admission=context.admission,
        open=config.open,
        verify=context.verify,
        throttle=context.throttle,
    )


def worker_node(profile: WorkerProfile) -> TealeLocalNode:
    """Return a worker's side."""
    return TealeLocalNode(
        role=TealeRole.WORKER,
        name=profile.name,
        device_id=device_id(profile.identity, profile.name),
        hardware=profile.hardware,
        epoch=profile.epoch,
        random_bytes=profile.random_bytes,
        identity=profile.identity,
        passcode=passcode_hash(profile.passcode) if profile.passcode else None,
        token=profile.token,
        offers=profile.offers or (_default_offer(profile),),
    )


def device_id(identity: Identity | None, name: str) -> str:
    """Return the UUID that a machine is known by: always the same for the same key.

    It is of version 8, whose bits are anybody's own (RFC 9562, section 5.8).
    """
    own = well_formed(name).encode() if identity is None else identity.public_key
    return uuid_from(hashlib.sha256(b"shoal device\n" + own).digest())


def uuid_from(random_bytes: bytes) -> str:
    """Write 16 bytes or more as a UUID, in upper case as Macs do."""
    marked = bytearray(random_bytes[:16])
    marked[6] = marked[6] & 0x0F | 0x80
    marked[8] = marked[8] & 0x3F | 0x80
    text = marked.hex().upper()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _default_offer(profile: WorkerProfile) -> Offer:
    """Return the offer of a worker that says nothing but its model."""
    model = profile.model
    kinds = model.kinds - {JobKind.TASK}
    key = "" if profile.identity is None else profile.identity.public_key.hex()
    offer = Offer(
        kinds=kinds,
        models=frozenset({model.name}),
        slots=profile.slots,
        features=model.features,
        context=model.context,
        only_for=profile.only_for,
        device=profile.device,
        public_key=key,
    )
    if not profile.tasks:
        return offer
    return replace(offer, kinds=kinds | {JobKind.TASK}, tasks=profile.tasks)
