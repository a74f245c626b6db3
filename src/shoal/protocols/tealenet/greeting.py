"""``hello`` and ``helloAck``: the introduction of a peer, encoded and decoded."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Raw

from shoal import __version__
from shoal.domain.credentials import digest_of
from shoal.domain.worker import Offer
from shoal.protocols.seam.session import PeerProfile
from shoal.protocols.seam.token_proof import ProofRole, prove_token
from shoal.protocols.tealenet.admission import passcodes_match
from shoal.protocols.tealenet.codec.envelope import VERSION as PROTOCOL_VERSION
from shoal.protocols.tealenet.codec.extension import (
    VERSION,
    IntroductionExtension,
    ShoalFeature,
    read_introduction,
    wire_offers,
    write_extension,
)
from shoal.protocols.tealenet.codec.hardware import (
    DeviceInfo,
    device_info,
    read_hardware,
    shown_name,
)
from shoal.protocols.tealenet.codec.messages import Hello, HelloAck
from shoal.protocols.tealenet.codec.scalars import (
    MODELS_MAX,
    NAME_MAX,
    TEXT_MAX,
    from_date,
    to_date,
    well_formed,
)
from shoal.protocols.tealenet.codec.scalars import normalized_id as device_key
from shoal.protocols.tealenet.codec.signatures import (
    decode_base64,
    encode_base64,
    parse_key,
    proof_text,
)
from shoal.protocols.tealenet.local_node import TealeLocalNode, TealeRole

HELLO_FEATURES = (
    ShoalFeature.CANCEL,
    ShoalFeature.RECEIPT,
    ShoalFeature.RESUME,
    ShoalFeature.RAW,
    ShoalFeature.PULL,
)


@dataclass(frozen=True, slots=True)
class Greeting:
    """The contents of a ``hello`` or ``helloAck``.

    ``device_id`` is in upper case; only Shoal peers have an ``introduction``.
    """

    device_id: str
    models: tuple[str, ...]
    passcode: str | None
    introduction: IntroductionExtension | None
    profile: PeerProfile

    @property
    def is_worker(self) -> bool:
        """Whether the peer is a Shoal worker."""
        introduction = self.introduction
        return introduction is not None and introduction.role == TealeRole.WORKER.value

    @property
    def name(self) -> str:
        """The name that a Shoal worker chose, or else the device's id."""
        if self.introduction is not None and self.is_worker and self.introduction.name:
            return well_formed(self.introduction.name)
        return self.device_id

    @property
    def label(self) -> str:
        """The name for people, with the device's id unless it is the same."""
        if self.profile.name in ("", self.name):
            return ascii(self.name)
        return f"{self.profile.name!a} ({self.name})"

    @property
    def key(self) -> bytes:
        """The Ed25519 key that the peer announces, without a proof."""
        return b"" if self.introduction is None else parse_key(self.introduction.key)

    @property
    def challenge(self) -> bytes:
        """The challenge that the peer wants signed."""
        if self.introduction is None:
            return b""
        return decode_base64(self.introduction.challenge)

    @property
    def token_proof(self) -> bytes:
        """The peer's proof of a join token; empty: none."""
        if self.introduction is None:
            return b""
        return decode_base64(self.introduction.token_proof)

    @property
    def proof(self) -> bytes:
        """The peer's signature of this end's challenge."""
        if self.introduction is None:
            return b""
        return decode_base64(self.introduction.proof)


def read_greeting(message: Hello | HelloAck) -> Greeting:
    """Read a peer's introduction."""
    introduction = read_introduction(message.shoal)
    return Greeting(
        device_key(message.device_info.id),
        message.loaded_models,
        message.cluster_passcode_hash,
        introduction,
        _profile(message, introduction),
    )


def describe_newer_version(greeting: Greeting) -> str:
    """Return a warning if the peer's protocol is newer than this end's, else ''."""
    if not greeting.profile.remark:
        return ""
    return f"{greeting.label} {greeting.profile.remark}"


def _profile(
    message: Hello | HelloAck, introduction: IntroductionExtension | None
) -> PeerProfile:
    device, version = message.device_info, message.protocol_version
    newer = f"speaks version {version} of the protocol; this end speaks"
    return PeerProfile(
        shown_name(device.name),
        read_hardware(device.hardware),
        release="" if introduction is None else well_formed(introduction.release),
        owner=well_formed(message.owner_user_id or ""),
        protocol_version=version,
        registered_at=from_date(device.registered_at),
        remark=f"{newer} {PROTOCOL_VERSION}" if version > PROTOCOL_VERSION else "",
    )


def hello(
    local: TealeLocalNode,
    offers: Sequence[Offer],
    challenge: bytes,
    binding: bytes,
    now: float,
) -> Hello:
    """Return the hello for a dialled peer; it proves the token on a bound channel."""
    token, token_proof = "", b""
    if binding and local.token:
        digest = digest_of(local.token)
        token_proof = prove_token(digest, ProofRole.WORKER, binding)
    elif local.plain:
        token = well_formed(local.token)
    models = model_names(offers, local.expected_models)
    return Hello(
        _device(local, models, now),
        PROTOCOL_VERSION,
        models,
        local.passcode,
        local.owner,
        shoal=_introduction(
            local, offers, challenge, token=token, token_proof=token_proof
        ),
    )


def hello_ack(
    local: TealeLocalNode,
    offers: Sequence[Offer],
    challenge: bytes,
    peer: Greeting,
    now: float,
    binding: bytes = b"",
    token_proof: bytes = b"",
) -> HelloAck:
    """Return the helloAck for a peer that dialled.

    It has the passcode's hash, which is all that admission needs, only if the peer
    presented the same hash: a peer with a token may present any.
    """
    models = model_names(offers)
    return HelloAck(
        _device(local, models, now),
        PROTOCOL_VERSION,
        models,
        local.passcode if passcodes_match(local.passcode, peer.passcode) else None,
        local.owner,
        shoal=_introduction(
            local,
            offers,
            challenge,
            token_proof=token_proof,
            proof=prove_key(local, peer, binding),
        ),
    )


def refusal_ack(local: TealeLocalNode, reason: str, now: float) -> HelloAck:
    """Return the helloAck that refuses a Shoal peer; others get no answer."""
    introduction = IntroductionExtension(
        version=VERSION, role=local.role.value, refusal=well_formed(reason[:TEXT_MAX])
    )
    return HelloAck(
        _device(local, (), now), PROTOCOL_VERSION, shoal=write_extension(introduction)
    )


def prove_key(local: TealeLocalNode, peer: Greeting, binding: bytes) -> str:
    """Return the proof of this end's key for a peer; empty without a challenge."""
    if local.identity is None or not peer.challenge:
        return ""
    own_key = local.identity.public_key
    proof = proof_text(peer.challenge, peer.key, own_key, binding)
    return encode_base64(local.identity.sign(proof))


def model_names(
    offers: Sequence[Offer], expected: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the names of the offered models, for peers without Shoal's extension.

    To those with it, the ``expected`` ones show what the offers will be.
    """
    offered = [name for offer in offers for name in sorted(offer.models)]
    names = dict.fromkeys(
        well_formed(name) for name in (*offered, *expected) if len(name) <= NAME_MAX
    )
    return tuple(names)[:MODELS_MAX]


def _introduction(
    local: TealeLocalNode,
    offers: Sequence[Offer],
    challenge: bytes,
    *,
    token: str = "",
    token_proof: bytes = b"",
    proof: str = "",
) -> Raw:
    introduction = IntroductionExtension(
        version=VERSION,
        features=[each.value for each in HELLO_FEATURES],
        name=well_formed(local.name[:NAME_MAX]),
        role=local.role.value,
        token=token,
        token_proof=encode_base64(token_proof) if token_proof else "",
        offers=wire_offers(offers),
        key="" if local.identity is None else local.identity.public_key.hex(),
        challenge=encode_base64(challenge) if challenge else "",
        proof=proof,
        release=__version__,
    )
    return write_extension(introduction)


def _device(local: TealeLocalNode, models: Sequence[str], now: float) -> DeviceInfo:
    at = to_date(now + local.epoch)
    registered_at = local.registered_at
    return device_info(
        local.device_id,
        local.name,
        local.hardware,
        registered_at=at if registered_at is None else to_date(registered_at),
        seen_at=at,
        models=models,
    )
