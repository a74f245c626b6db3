"""Admission of workers: token, proof of the key, and the offer they join with."""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

from msgspec import UnsetType

from shoal.domain.errors import NotAdmitted, PeerError
from shoal.domain.job import PRIVACY_CLASSES
from shoal.domain.work import JobKind
from shoal.domain.worker import DeviceKind, Offer
from shoal.protocols.dispatch.codec.ecmascript_json import to_string, well_formed
from shoal.protocols.dispatch.codec.extension import (
    CHALLENGE_SIZE,
    CONTEXT_MAX,
    HEADER,
    NAME_MAX,
    SLOTS_MAX,
    CoordinatorAnnouncement,
    WorkerPresentation,
    known_features,
    known_kinds,
    proof_message,
    read_header,
    read_presentation,
    write_header,
)
from shoal.protocols.dispatch.codec.messages import (
    JobType,
    ProviderType,
    RegisterProvider,
)
from shoal.protocols.dispatch.codec.receipts import signature_of
from shoal.protocols.dispatch.config import Config
from shoal.protocols.seam.admission import AdmissionGrant, JoinRequest
from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.endpoints import UpgradeRequest

ID_SIZE = 16  # bytes of a worker's id
PRICE_MAX = 256  # characters of a pricing hint

UNPROVEN = (
    "has not proved its key: it gets private jobs only if the coordinator runs with "
    "--dispatch-trust-unproven"
)
TRUSTED_UNPROVEN = "has not proved its key, but is trusted"
TOKEN_REQUIRED = (
    "workers need a token here: present the join token in the header "
    "'Authorization: Bearer TOKEN', or start the coordinator with --dispatch-open"
)
NAME_REQUIRED = (
    f"a token counts only for a worker that names its key in the header {HEADER}, "
    "such as '1, key=PUBLIC_KEY'"
)

DEVICES: Mapping[ProviderType, DeviceKind] = {
    ProviderType.DESKTOP: DeviceKind.DESKTOP,
    ProviderType.SEEKER: DeviceKind.PHONE,
}
CAPABILITIES: Mapping[JobType, JobKind] = {
    JobType.LLM_INFER: JobKind.CHAT,
    JobType.TASK: JobKind.TASK,
}

_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)
_SUBPROTOCOL = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@dataclass(frozen=True, slots=True)
class ProviderConnection:
    """A connection before it registers; ``refusal`` is why it may not, if so."""

    announced: CoordinatorAnnouncement
    model: str
    challenge: bytes
    worker_id: str
    admitted: AdmissionGrant = field(default_factory=AdmissionGrant)
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class RegisteredProvider:
    """A worker as it registered; ``extended`` if it uses the extension's messages."""

    identity: str
    offer: Offer
    extended: bool


def admit_connection(
    request: UpgradeRequest, config: Config, context: ProtocolContext
) -> ProviderConnection:
    """Decide whether the peer may register on this connection."""
    announced = read_header(request.headers.get(HEADER.lower(), ""))
    challenge = context.random_bytes(CHALLENGE_SIZE)
    worker_id = _uuid(context.random_bytes(ID_SIZE))
    model = well_formed(announced.model) or config.model
    connection = ProviderConnection(announced, model, challenge, worker_id)
    try:
        admitted = _admit(request, connection, config, context)
    except NotAdmitted as error:
        return replace(connection, refusal=str(error))
    return replace(connection, admitted=admitted)


def answer_headers(
    request: UpgradeRequest, connection: ProviderConnection, context: ProtocolContext
) -> Mapping[str, str]:
    """Return the headers of the upgrade response."""
    headers = {}
    offered = (
        request.headers.get("sec-websocket-protocol", "").partition(",")[0].strip()
    )
    if _SUBPROTOCOL.fullmatch(offered):
        headers["Sec-WebSocket-Protocol"] = offered  # as the original does
    if connection.announced.known:
        headers[HEADER] = write_header(
            {
                "key": context.identity.public_key.hex(),
                "challenge": base64.b64encode(connection.challenge).decode(),
            }
        )
    return headers


def register_provider(
    message: RegisterProvider,
    connection: ProviderConnection,
    config: Config,
    context: ProtocolContext,
) -> RegisteredProvider:
    """Build the registration of a worker.  Raises PeerError if it is invalid."""
    shoal = message.shoal
    presentation = None
    if connection.announced.known and not isinstance(shoal, UnsetType):
        presentation = read_presentation(bytes(shoal))
        _check_proof(message, presentation, connection, context)
    elif connection.announced.key:
        # It was admitted under that key.
        raise PeerError(f"register: shoal.proof: missing, for {HEADER} names a key")
    kinds = frozenset(
        kind
        for name, kind in CAPABILITIES.items()
        if name.value in message.capabilities
    )
    if presentation is not None and presentation.version:
        kinds = known_kinds(presentation.kinds) or kinds
    if not kinds:
        raise PeerError(
            "register: capabilities: expected LLM_INFER or TASK, got neither"
        )
    key = message.provider_pubkey.lower()
    proven = presentation is not None
    return RegisteredProvider(
        # A worker that only names a key must not replace one that has proved it.
        key if proven else f"{key}/unproven",
        _offer(message, presentation, kinds, connection, config),
        presentation is not None and presentation.version > 0,
    )


# Private parts, in the order in which they are called.


def _admit(
    request: UpgradeRequest,
    connection: ProviderConnection,
    config: Config,
    context: ProtocolContext,
) -> AdmissionGrant:
    header = _BEARER.fullmatch(request.headers.get("authorization", "").strip())
    token = well_formed(unquote(header[1])) if header else ""
    if len(connection.model) > NAME_MAX:
        raise NotAdmitted(f"the model's name is longer than {NAME_MAX} characters")
    if not token and config.open:
        return AdmissionGrant()
    models = frozenset({connection.model})
    key = connection.announced.key.hex()
    if token and not key:
        # Otherwise all unnamed workers could share a token that is for one worker.
        raise NotAdmitted(NAME_REQUIRED)
    try:
        return context.admission(JoinRequest(token, key, models, request.address))
    except NotAdmitted as error:
        reason = f"{error}: check the token" if token else TOKEN_REQUIRED
        raise NotAdmitted(reason) from error


def _uuid(random_bytes: bytes) -> str:
    """Format random bytes as a version 4 UUID (RFC 9562, section 5.4)."""
    octets = bytearray(random_bytes)
    octets[6] = octets[6] & 0x0F | 0x40
    octets[8] = octets[8] & 0x3F | 0x80
    text = octets.hex()
    parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
    return "-".join(parts)


def _check_proof(
    message: RegisterProvider,
    presentation: WorkerPresentation,
    connection: ProviderConnection,
    context: ProtocolContext,
) -> None:
    key = bytes.fromhex(message.provider_pubkey)
    if connection.announced.key not in (b"", key):
        raise PeerError(f"register: provider_pubkey: the header {HEADER} names another")
    proof = proof_message(connection.challenge, context.identity.public_key, key)
    if not context.verify(key, signature_of(presentation.proof), proof):
        raise PeerError(
            "register: shoal.proof: not a signature of this connection's challenge by "
            "provider_pubkey"
        )


def _price(hint: object) -> str:
    """Return a pricing hint as text; an unusable one is none, for it is optional."""
    match hint:
        case str():
            return hint[:PRICE_MAX]
        case int() | float() if not isinstance(hint, bool):
            return to_string(hint)
        case _:
            return ""


def _offer(
    message: RegisterProvider,
    presentation: WorkerPresentation | None,
    kinds: frozenset[JobKind],
    connection: ProviderConnection,
    config: Config,
) -> Offer:
    models = frozenset({connection.model}) if kinds != {JobKind.TASK} else frozenset()
    presented = (
        presentation
        if presentation is not None and presentation.version
        else WorkerPresentation("")
    )
    remark = TRUSTED_UNPROVEN if config.trust_unproven else UNPROVEN
    return Offer(
        kinds=kinds,
        models=models,
        slots=min(presented.slots, SLOTS_MAX),
        features=known_features(presented.features),
        context=min(presented.context, CONTEXT_MAX),
        only_for=frozenset(presented.only_for),
        privacy=PRIVACY_CLASSES.get(presented.privacy),
        remark="" if presentation is not None else remark,
        tasks=frozenset(presented.tasks),
        streams=False,
        device=DEVICES[message.provider_type],
        public_key=message.provider_pubkey.lower(),
        proven=presentation is not None or config.trust_unproven,
        price=_price(message.pricing_hint),
        engine=presented.engine,
    )
