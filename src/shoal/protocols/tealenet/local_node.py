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


def coordinator_node(config: Config, setting: ProtocolContext) -> TealeLocalNode:
    """Return a coordinator's side."""
    return TealeLocalNode(
        role=TealeRole.COORDINATOR,
        name=setting.name,
        device_id=device_id(setting.identity, setting.name),
        hardware=setting.hardware,
        epoch=setting.epoch,
        random_bytes=setting.random_bytes,
        identity=setting.identity,
        flat=config.flat,
        passcode=passcode_hash(config.passcode) if config.passcode else None,
        admission=setting.admission,
        open=config.open,
        verify=setting.verify,
        throttle=setting.throttle,
    )


def worker_node(member: WorkerProfile) -> TealeLocalNode:
    """Return a worker's side."""
    return TealeLocalNode(
        role=TealeRole.WORKER,
        name=member.name,
        device_id=device_id(member.identity, member.name),
        hardware=member.hardware,
        epoch=member.epoch,
        random_bytes=member.random_bytes,
        identity=member.identity,
        passcode=passcode_hash(member.passcode) if member.passcode else None,
        token=member.token,
        offers=member.offers or (_default_offer(member),),
    )


def device_id(identity: Identity | None, name: str) -> str:
    """Return the UUID that a machine is known by: always the same for the same key.

    It is of version 8, whose bits are anybody's own (RFC 9562, section 5.8).
    """
    own = well_formed(name).encode() if identity is None else identity.public_key
    return uuid_from(hashlib.sha256(b"shoal device\n" + own).digest())


def uuid_from(drawn: bytes) -> str:
    """Write 16 bytes or more as a UUID, in upper case as Macs do."""
    marked = bytearray(drawn[:16])
    marked[6] = marked[6] & 0x0F | 0x80
    marked[8] = marked[8] & 0x3F | 0x80
    text = marked.hex().upper()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _default_offer(member: WorkerProfile) -> Offer:
    """Return the offer of a worker that says nothing but its model."""
    model = member.model
    kinds = model.kinds - {JobKind.TASK}
    key = "" if member.identity is None else member.identity.public_key.hex()
    offer = Offer(
        kinds=kinds,
        models=frozenset({model.name}),
        slots=member.slots,
        features=model.features,
        context=model.context,
        only_for=member.only_for,
        device=member.device,
        public_key=key,
    )
    if not member.tasks:
        return offer
    return replace(offer, kinds=kinds | {JobKind.TASK}, tasks=member.tasks)
