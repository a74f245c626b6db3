"""What peers say of themselves when they meet, written and read."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.domain.worker import Offer
from shoal.protocols.tealenet.admission import same_passcode
from shoal.protocols.tealenet.ourselves import Ourselves
from shoal.protocols.tealenet.wire.extension import (
    VERSION,
    Ability,
    Introduction,
    read_introduction,
    write,
)
from shoal.protocols.tealenet.wire.hardware import DeviceInfo, device_of
from shoal.protocols.tealenet.wire.messages import VERSION as PROTOCOL_VERSION
from shoal.protocols.tealenet.wire.messages import Hello, HelloAck
from shoal.protocols.tealenet.wire.offerings import offerings_of
from shoal.protocols.tealenet.wire.proving import base64_of, bytes_of, key_of, proof_of
from shoal.protocols.tealenet.wire.scalars import (
    MODELS_MAX,
    NAME_MAX,
    TEXT_MAX,
    date_of,
    well_formed,
)
from shoal.protocols.tealenet.wire.scalars import key_of as device_key

ABILITIES = (Ability.CANCEL, Ability.RECEIPT, Ability.RESUME, Ability.RAW)


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a peer said in ``hello`` or ``helloAck``.

    ``device_id`` is in upper case, and ``ours`` what only peers of our kind say.
    """

    device_id: str
    models: tuple[str, ...]
    passcode: str | None
    ours: Introduction | None

    @property
    def key(self) -> bytes:
        """The Ed25519 key that it names, which is not proven by that."""
        return b"" if self.ours is None else key_of(self.ours.key)

    @property
    def challenge(self) -> bytes:
        """What it wants to see signed."""
        return b"" if self.ours is None else bytes_of(self.ours.challenge)

    @property
    def proof(self) -> bytes:
        """What it signed of ours."""
        return b"" if self.ours is None else bytes_of(self.ours.proof)


def read_greeting(message: Hello | HelloAck) -> Greeting:
    """Read who a peer says that it is."""
    return Greeting(
        device_key(message.device_info.id),
        message.loaded_models,
        message.cluster_passcode_hash,
        read_introduction(message.shoal),
    )


def hello(
    own: Ourselves, offers: Sequence[Offer], challenge: bytes, now: float
) -> Hello:
    """Return how we introduce ourselves to whom we dialled."""
    said = Introduction(
        version=VERSION,
        features=[each.value for each in ABILITIES],
        name=_short(own.name),
        role=own.role.value,
        token=well_formed(own.token),
        offers=offerings_of(offers),
        key=_key(own),
        challenge=_challenge(challenge),
    )
    models = model_names(offers)
    return Hello(
        _device(own, models, now),
        PROTOCOL_VERSION,
        models,
        own.passcode,
        shoal=write(said),
    )


def hello_ack(
    own: Ourselves,
    offers: Sequence[Offer],
    challenge: bytes,
    peer: Greeting,
    now: float,
) -> HelloAck:
    """Return how we introduce ourselves to who dialled us.

    Our passcode's hash, with which anybody could come in, is only for who showed the
    same: one that came by a token may show anything.
    """
    said = Introduction(
        version=VERSION,
        features=[each.value for each in ABILITIES],
        name=_short(own.name),
        role=own.role.value,
        offers=offerings_of(offers),
        key=_key(own),
        challenge=_challenge(challenge),
        proof=prove(own, peer),
    )
    models = model_names(offers)
    return HelloAck(
        _device(own, models, now),
        PROTOCOL_VERSION,
        models,
        own.passcode if same_passcode(own.passcode, peer.passcode) else None,
        shoal=write(said),
    )


def refusal(own: Ourselves, why: str, now: float) -> HelloAck:
    """Return what a peer of ours is told that is not let in; others hear nothing."""
    said = Introduction(
        version=VERSION, role=own.role.value, refusal=well_formed(why[:TEXT_MAX])
    )
    return HelloAck(_device(own, (), now), PROTOCOL_VERSION, shoal=write(said))


def prove(own: Ourselves, peer: Greeting) -> str:
    """Return the proof of our key that a peer wants to see; empty if it wants none."""
    if own.identity is None or not peer.challenge:
        return ""
    proof = proof_of(peer.challenge, peer.key, own.identity.public_key)
    return base64_of(own.identity.sign(proof))


def model_names(offers: Sequence[Offer]) -> tuple[str, ...]:
    """Return the models on offer, as peers are told of them that know no more."""
    names = dict.fromkeys(
        well_formed(name)
        for offer in offers
        for name in sorted(offer.models)
        if len(name) <= NAME_MAX
    )
    return tuple(names)[:MODELS_MAX]


def _device(own: Ourselves, models: Sequence[str], now: float) -> DeviceInfo:
    at = date_of(now + own.epoch)
    return device_of(
        own.device_id,
        own.name,
        own.hardware,
        registered_at=at,
        seen_at=at,
        models=models,
    )


def _short(name: str) -> str:
    return well_formed(name[:NAME_MAX])


def _key(own: Ourselves) -> str:
    return "" if own.identity is None else own.identity.public_key.hex()


def _challenge(challenge: bytes) -> str:
    return base64_of(challenge) if challenge else ""
