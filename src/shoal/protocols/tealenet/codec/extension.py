"""The field ``shoal``: Shoal's extension of TealeNet's messages.

Other peers ignore it.  An invalid or unknown value counts as absent, so that newer
peers may send more.
"""

from collections.abc import Iterable
from dataclasses import astuple
from enum import StrEnum
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Raw, UnsetType

from shoal.domain.errors import PeerError
from shoal.domain.job import PRIVACY_CLASSES
from shoal.domain.json_limits import has_more_values
from shoal.domain.outcome import Fault, Usage
from shoal.domain.receipts import RECEIPT_SIZE_MAX, SignedReceipt
from shoal.domain.vocabulary import Completed, Failed, Rejected
from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import CHAT_ONLY, DeviceKind, Offer
from shoal.protocols.seam.document_fields import Unread
from shoal.protocols.tealenet.codec.scalars import (
    MODELS_MAX,
    NAME_MAX,
    TEXT_MAX,
    Count,
    Name,
    ShoalField,
    encode_json,
    well_formed,
)

SLOTS_MAX = 1024  # concurrent jobs that an offer may announce
NAMES_MAX = 256  # tasks or keys that an offer may name
CONTEXT_MAX = 2**31 - 1  # tokens


class WireOffer(msgspec.Struct, frozen=True, omit_defaults=True):
    """An offer on the wire; without ``kinds`` it is for chats."""

    models: list[str] = []
    kinds: list[str] = []
    features: list[str] = []
    slots: Count = 1
    context: Count = 0
    only_for: list[str] = []
    privacy: Name = ""
    tasks: list[str] = []
    device: Name = ""
    price: Name = ""
    streams: bool = True
    engine: Name = ""


def wire_offers(offers: Iterable[Offer]) -> list[WireOffer]:
    """Translate offers to the wire's."""
    return [
        WireOffer(
            models=sorted(offer.models),
            kinds=[] if offer.kinds == CHAT_ONLY else _sorted_values(offer.kinds),
            features=_sorted_values(offer.features),
            slots=offer.slots,
            context=offer.context,
            only_for=sorted(offer.only_for)[:NAMES_MAX],
            privacy=offer.privacy.value if offer.privacy is not None else "",
            tasks=sorted(offer.tasks)[:NAMES_MAX],
            device=offer.device.value if offer.device is not None else "",
            price=offer.price[:NAME_MAX],
            streams=offer.streams,
            engine=offer.engine[:NAME_MAX],
        )
        for offer in offers
    ]


def read_offers(
    entries: Iterable[WireOffer],
    *,
    coordinator: bool = False,
    public_key: bytes = b"",
    proven: bool = False,
) -> tuple[Offer, ...]:
    """Translate offers from the wire's, for ``MODELS_MAX`` models at most.

    Skips offers without a known kind of work, or with a name that is too long.
    """
    offers = []
    models = 0
    for given in entries:
        kinds = frozenset(kind for kind in JobKind if kind.value in given.kinds)
        names = frozenset(well_formed(name) for name in given.models)
        models += max(1, len(names))
        if models > MODELS_MAX:
            break
        if (given.kinds and not kinds) or any(len(each) > NAME_MAX for each in names):
            continue
        offers.append(
            Offer(
                kinds=kinds or CHAT_ONLY,
                models=names,
                slots=min(given.slots, SLOTS_MAX),
                features=frozenset(f for f in Feature if f.value in given.features),
                context=min(given.context, CONTEXT_MAX),
                only_for=_limited_names(given.only_for),
                privacy=PRIVACY_CLASSES.get(given.privacy),
                tasks=_limited_names(given.tasks),
                streams=given.streams,
                device=next((d for d in DeviceKind if d.value == given.device), None),
                public_key=public_key.hex(),
                proven=proven,
                price=given.price,
                neighbour=coordinator,
                engine=given.engine,
            )
        )
    return tuple(offers)


def _sorted_values(members: Iterable[JobKind | Feature]) -> list[str]:
    return sorted(each.value for each in members)


def _limited_names(names: list[str]) -> frozenset[str]:
    return frozenset(well_formed(name) for name in names[:NAMES_MAX] if name)


VERSION = 1
VALUES_MAX = 100_000  # values in the field
WORD_MAX = 64  # characters of a finish reason
RAW_MAX = 4 << 20  # bytes of a raw chunk of a model
WINDOW_MAX = 1 << 30  # bytes of a model that may be sent ahead


class ShoalFeature(StrEnum):
    """A part of the extension that a Shoal peer supports."""

    CANCEL = "cancel"  # inferenceCancel
    RECEIPT = "receipt"  # signed receipts in inferenceComplete
    RESUME = "resume"  # the beginning of an answer in inferenceRequest
    NOISE = "noise"  # Noise_IK_25519_ChaChaPoly_BLAKE2s on relays
    RAW = "raw"  # chunks of models as raw bytes: see ``model_sharing``
    PULL = "pull"  # models at the pace of their receiver: ``modelTransferPull``


_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
_Base64: TypeAlias = Annotated[str, msgspec.Meta(max_length=128)]
_Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=WORD_MAX)]


class IntroductionExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """A peer's introduction in ``hello``, ``helloAck`` and a relay's capabilities.

    ``key`` is its Ed25519 key and ``noise`` its X25519 key, both in hexadecimal;
    ``noise_proof`` binds the second to the first.  ``challenge`` is for the other peer
    to sign, and ``proof`` answers the other peer's challenge: see ``signatures``.
    ``role`` is worker or coordinator.  ``token`` is a join token, on a connection that
    is not encrypted and need not be; on an encrypted one ``token_proof`` proves it: see
    ``token_proof`` of the seam.
    ``refusal``: why the other peer is not admitted.  ``release`` is that of the peer's
    program.
    """

    version: Annotated[
        int,
        msgspec.Meta(ge=VERSION),
        Unread("checked by the decoder; there is one version"),
    ]
    features: list[str] = []
    name: Name = ""
    role: Name = ""
    token: Name = ""
    token_proof: _Base64 = ""
    refusal: _Text = ""
    offers: list[WireOffer] | None = None
    key: _Base64 = ""
    challenge: _Base64 = ""
    proof: _Base64 = ""
    noise: _Base64 = ""
    noise_proof: _Base64 = ""
    release: _Word = ""

    @property
    def shoal_features(self) -> frozenset[ShoalFeature]:
        """The parts of the extension that the peer supports."""
        return frozenset(each for each in ShoalFeature if each.value in self.features)


class HeartbeatExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """A peer's state in ``heartbeat``; None or empty: absent.

    ``offers`` is present when they changed, and ``proof`` in the first heartbeat of the
    dialling peer.  ``farewell``: why the peer disconnects.  ``unfit`` and ``queued``
    are as in ``WorkerLoad``; ``cpu`` and ``memory`` are in percent, ``temperature`` in
    °C.
    """

    proof: _Base64 = ""
    offers: list[WireOffer] | None = None
    draining: _Text | None = None
    farewell: _Text | None = None
    jobs: Count | None = None
    cpu: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    memory: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=-100, le=1000)] | None = None
    unfit: _Text | None = None
    queued: Count | None = None


class UsageExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token usage, as in ``Usage``."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count | None = None
    reasoning_tokens: Count | None = None


class ReceiptExtension(msgspec.Struct, frozen=True):
    """The bytes that the worker signed, and its signature; in base64."""

    body: bytes
    signature: bytes


class InferenceCompleteExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of an answer, in ``inferenceComplete``; ``output``: see ``Outcome``."""

    finish_reason: _Word = "stop"
    usage: UsageExtension | None = None
    output: str = ""
    receipt: ReceiptExtension | None = None


class InferenceErrorExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether a job was run, and whose fault the error is, in ``inferenceError``."""

    failed: bool = False
    fault: _Word = ""


class TransferRequestExtension(msgspec.Struct, frozen=True):
    """How many bytes may be sent before a pull, in ``modelTransferRequest``."""

    window: Annotated[int, msgspec.Meta(ge=1, le=WINDOW_MAX)]


class RawChunkExtension(msgspec.Struct, frozen=True):
    """The size of a raw chunk, in ``modelTransferChunk``, whose ``data`` is empty."""

    raw: Annotated[int, msgspec.Meta(ge=1, le=RAW_MAX)]


# Decoding.  Another program may use a field of the same name: an invalid one is
# ignored.


def read_introduction(raw: ShoalField) -> IntroductionExtension | None:
    """Decode an introduction; None if the peer does not run Shoal."""
    return _decode(_introductions, raw)


def read_heartbeat(raw: ShoalField) -> HeartbeatExtension | None:
    """Decode the extension of a heartbeat; None if there is none."""
    return _decode(_heartbeats, raw)


def read_error(raw: ShoalField) -> InferenceErrorExtension:
    """Decode the extension of an error; default values if there is none."""
    return _decode(_errors, raw) or InferenceErrorExtension()


def read_transfer_request(raw: ShoalField) -> TransferRequestExtension | None:
    """Decode the window of a model's transfer; None if there is none."""
    return _decode(_transfer_requests, raw)


def read_raw_chunk(raw: ShoalField) -> RawChunkExtension | None:
    """Decode the announcement of a raw chunk; None if there is none."""
    return _decode(_raw_chunks, raw)


def read_completion(raw: ShoalField) -> InferenceCompleteExtension:
    """Decode the end of an answer.

    Raises PeerError if it is invalid, because usage and receipt would be lost.
    """
    if isinstance(raw, UnsetType):
        return InferenceCompleteExtension()
    completion = _decode(_completions, raw)
    if completion is None:
        raise PeerError("inferenceComplete: shoal: invalid")
    return completion


def write_extension(
    field: IntroductionExtension
    | HeartbeatExtension
    | InferenceCompleteExtension
    | InferenceErrorExtension
    | TransferRequestExtension
    | RawChunkExtension,
) -> Raw:
    """Encode the extension for a message's field."""
    return Raw(encode_json(field))


# Translations.


def usage_of(tokens: UsageExtension | None) -> Usage | None:
    """Translate token usage."""
    if tokens is None:
        return None
    return Usage(
        *(tokens.prompt_tokens, tokens.completion_tokens),
        *(tokens.cached_tokens, tokens.reasoning_tokens),
    )


def completion_extension(event: Completed) -> InferenceCompleteExtension:
    """Return the extension of an ``inferenceComplete``."""
    usage, receipt = event.usage, event.receipt
    return InferenceCompleteExtension(
        finish_reason=well_formed(event.finish_reason)[:WORD_MAX],
        usage=None if usage is None else UsageExtension(*astuple(usage)),
        output=event.output,
        receipt=None
        if receipt is None
        else ReceiptExtension(receipt.body, receipt.signature),
    )


def error_extension(event: Rejected | Failed) -> InferenceErrorExtension:
    """Return the extension of an ``inferenceError``."""
    if isinstance(event, Rejected):
        return InferenceErrorExtension()
    return InferenceErrorExtension(failed=True, fault=event.fault.value)


def receipt_of(receipt: ReceiptExtension | None) -> SignedReceipt | None:
    """Translate a receipt; None if it is larger than any valid one."""
    if receipt is None or len(receipt.body) + len(receipt.signature) > RECEIPT_SIZE_MAX:
        return None
    return SignedReceipt(receipt.body, receipt.signature)


def fault_of(error: InferenceErrorExtension) -> Fault:
    """Return whose fault an error is; by default the worker's."""
    return next((f for f in Fault if f.value == error.fault), Fault.WORKER)


# Private parts, in the order in which they are called.

T = TypeVar("T")

_introductions = msgspec.json.Decoder(IntroductionExtension)
_heartbeats = msgspec.json.Decoder(HeartbeatExtension)
_errors = msgspec.json.Decoder(InferenceErrorExtension)
_transfer_requests = msgspec.json.Decoder(TransferRequestExtension)
_raw_chunks = msgspec.json.Decoder(RawChunkExtension)
_completions = msgspec.json.Decoder(InferenceCompleteExtension)


def _decode(decoder: "msgspec.json.Decoder[T]", raw: ShoalField) -> T | None:
    if isinstance(raw, UnsetType):
        return None
    data = bytes(raw)
    try:
        if len(data) > 2 * VALUES_MAX and has_more_values(data.decode(), VALUES_MAX):
            return None
        return decoder.decode(data)
    except (ValueError, RecursionError):
        return None
