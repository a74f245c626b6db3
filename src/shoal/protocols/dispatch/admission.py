"""Admission of workers: the settings, their token, and the offer they join with."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from shoal.domain.errors import NotAdmitted, PeerError
from shoal.domain.settings import setting
from shoal.domain.work import JobKind
from shoal.domain.worker import DeviceKind, Offer
from shoal.protocols.dispatch import messages
from shoal.protocols.dispatch.ecmascript_json import to_string, well_formed
from shoal.protocols.seam.admission import NO_JOIN_TOKEN, AdmissionGrant, JoinRequest
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

DEVICES: Mapping[messages.ProviderType, DeviceKind] = {
    messages.ProviderType.DESKTOP: DeviceKind.DESKTOP,
    messages.ProviderType.SEEKER: DeviceKind.PHONE,
}
CAPABILITIES: Mapping[messages.JobType, JobKind] = {
    messages.JobType.LLM_INFER: JobKind.CHAT,
    messages.JobType.TASK: JobKind.TASK,
}

_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of the wire."""

    token: str = setting(
        "token of workers, beside the coordinator's join token", "", secret=True
    )
    open: bool = setting(
        "admission of Dispatch clients and workers without a key or token", False
    )
    model: str = setting("model name for workers that report none", "dispatch")
    silence: float = setting(
        "seconds of silence until a worker counts as lost; workers send a "
        "heartbeat every 10",
        30.0,
    )
    trust_unproven: bool = setting(
        "private jobs also for workers that name a trusted key without proof, as "
        "anyone can",
        False,
    )


def admit(
    key: str, request: UpgradeRequest, config: Config, context: ProtocolContext
) -> AdmissionGrant:
    """Admit the worker with this key by the token of its upgrade request.

    Raises NotAdmitted with the reason.
    """
    header = _BEARER.fullmatch(request.headers.get("authorization", "").strip())
    token = well_formed(unquote(header[1])) if header else ""
    if not token and config.open:
        return NO_JOIN_TOKEN
    models = frozenset({config.model})
    try:
        return context.admission(JoinRequest(token, key, models, request.address))
    except NotAdmitted as error:
        reason = f"{error}: check the token" if token else TOKEN_REQUIRED
        raise NotAdmitted(reason) from error


def new_worker_id(context: ProtocolContext) -> str:
    """Return a version 4 UUID (RFC 9562, section 5.4)."""
    octets = bytearray(context.random_bytes(ID_SIZE))
    octets[6] = octets[6] & 0x0F | 0x40
    octets[8] = octets[8] & 0x3F | 0x80
    text = octets.hex()
    parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
    return "-".join(parts)


def offer_of(message: messages.RegisterProvider, config: Config) -> Offer:
    """Return the offer of a worker.  Raises PeerError if it can do nothing here."""
    kinds = frozenset(
        kind
        for name, kind in CAPABILITIES.items()
        if name.value in message.capabilities
    )
    if not kinds:
        raise PeerError(
            "register: capabilities: expected LLM_INFER or TASK, got neither"
        )
    return Offer(
        kinds=kinds,
        models=frozenset({config.model} if JobKind.CHAT in kinds else ()),
        remark=TRUSTED_UNPROVEN if config.trust_unproven else UNPROVEN,
        streams=False,
        device=DEVICES[message.provider_type],
        public_key=message.provider_pubkey.lower(),
        proven=config.trust_unproven,
        price=_price(message.pricing_hint),
    )


def _price(hint: object) -> str:
    """Return a pricing hint as text; an unusable one is ignored: it is optional."""
    match hint:
        case str():
            return hint[:PRICE_MAX]
        case int() | float() if not isinstance(hint, bool):
            return to_string(hint)
        case _:
            return ""
