"""The field ``shoal``: what Shoal's peers say beyond TealeNet's document.

Other peers ignore it.  It is read with limits, and what cannot be read counts as
absent, so that newer peers may say more.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Raw, UnsetType

from shoal.domain.errors import PeerError
from shoal.domain.json_limits import has_more_values
from shoal.domain.outcome import Fault, Usage
from shoal.domain.receipts import RECEIPT_SIZE_MAX, SignedReceipt
from shoal.domain.vocabulary import Completed, Failed, Rejected
from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import CHAT_ONLY, DeviceKind, Offer
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

SLOTS_MAX = 1024  # jobs at a time that we believe a peer to run
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
    tasks: list[str] = []
    device: Name = ""
    price: Name = ""
    streams: bool = True


def wire_offers(offers: Iterable[Offer]) -> list[WireOffer]:
    """Return offers as they are written."""
    return [
        WireOffer(
            models=sorted(offer.models),
            kinds=[] if offer.kinds == CHAT_ONLY else _sorted_values(offer.kinds),
            features=_sorted_values(offer.features),
            slots=offer.slots,
            context=offer.context,
            only_for=sorted(offer.only_for)[:NAMES_MAX],
            tasks=sorted(offer.tasks)[:NAMES_MAX],
            device=offer.device.value if offer.device is not None else "",
            price=offer.price[:NAME_MAX],
            streams=offer.streams,
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
    """Return offers as they were read, those of more than ``MODELS_MAX`` left out.

    So are those that offer no kind of work that we know, or a name that is too long.
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
                tasks=_limited_names(given.tasks),
                streams=given.streams,
                device=next((d for d in DeviceKind if d.value == given.device), None),
                public_key=public_key.hex(),
                proven=proven,
                price=given.price,
                neighbour=coordinator,
            )
        )
    return tuple(offers)


def _sorted_values(members: Iterable[JobKind | Feature]) -> list[str]:
    return sorted(word.value for word in members)


def _limited_names(names: list[str]) -> frozenset[str]:
    return frozenset(well_formed(name) for name in names[:NAMES_MAX] if name)


VERSION = 1
VALUES_MAX = 100_000  # values in our field
WORD_MAX = 64  # characters of a reason to finish
RAW_MAX = 4 << 20  # bytes of a piece of a model that is sent as it is


class ShoalFeature(StrEnum):
    """Something that a peer of ours knows beyond the document."""

    CANCEL = "cancel"  # inferenceCancel
    RECEIPT = "receipt"  # signed receipts in inferenceComplete
    RESUME = "resume"  # the beginning of an answer in inferenceRequest
    NOISE = "noise"  # Noise_IK_25519_ChaChaPoly_BLAKE2s on relays
    RAW = "raw"  # pieces of models as they are: see ``model_sharing``


_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
_Base64: TypeAlias = Annotated[str, msgspec.Meta(max_length=128)]
_Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=WORD_MAX)]


class IntroductionExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a peer says of itself in ``hello``, ``helloAck`` and a relay's capabilities.

    ``key`` is its Ed25519 key and ``noise`` its X25519 key, both in hexadecimal, and
    ``noise_proof`` binds the second to the first.  ``challenge`` is what the other is
    to sign, and ``proof`` what came of the other's challenge: see ``signatures``.
    ``role`` is worker or coordinator.  ``token`` is a join token, which is left out
    where others can read along.  ``refusal`` says why the other is not let in.
    """

    version: Annotated[int, msgspec.Meta(ge=VERSION)]
    features: list[str] = []
    name: Name = ""
    role: Name = ""
    token: Name = ""
    refusal: _Text = ""
    offers: list[WireOffer] | None = None
    key: _Base64 = ""
    challenge: _Base64 = ""
    proof: _Base64 = ""
    noise: _Base64 = ""
    noise_proof: _Base64 = ""

    @property
    def shoal_features(self) -> frozenset[ShoalFeature]:
        """What of our extension it knows."""
        return frozenset(each for each in ShoalFeature if each.value in self.features)


class HeartbeatExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a peer says in ``heartbeat``; what is None or empty was not said.

    ``offers`` is there when they changed, and ``proof`` in the first heartbeat of who
    dialled.  ``farewell`` says why it hangs up.  ``unfit``, ``queued`` and ``speed``
    are as in ``WorkerLoad``; ``cpu`` and ``memory`` are in percent.
    """

    proof: _Base64 = ""
    offers: list[WireOffer] | None = None
    draining: _Text | None = None
    farewell: _Text | None = None
    jobs: Count | None = None
    cpu: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    memory: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    unfit: _Text | None = None
    queued: Count | None = None
    speed: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None


class UsageExtension(msgspec.Struct, frozen=True):
    """Usage."""

    prompt_tokens: Count
    completion_tokens: Count


class ReceiptExtension(msgspec.Struct, frozen=True):
    """What the worker signed, byte for byte, and its signature; in base64."""

    body: bytes
    signature: bytes


class InferenceCompleteExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a peer says in ``inferenceComplete``: how the answer ended.

    ``output`` is as in ``Outcome``.
    """

    finish_reason: _Word = "stop"
    usage: UsageExtension | None = None
    output: str = ""
    receipt: ReceiptExtension | None = None


class InferenceErrorExtension(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a peer says in ``inferenceError``: whether the job was run, whose fault."""

    failed: bool = False
    fault: _Word = ""


class RawChunkExtension(msgspec.Struct, frozen=True):
    """What a peer says in ``modelTransferChunk``: as many bytes are the next message.

    They are the piece, and there is no ``data``.
    """

    raw: Annotated[int, msgspec.Meta(ge=1, le=RAW_MAX)]


# Reading.  Other peers' fields of the same name are none of ours.


def read_introduction(raw: ShoalField) -> IntroductionExtension | None:
    """Read what a peer says of itself; None if it is none of ours."""
    return _decode(_introductions, raw)


def read_heartbeat(raw: ShoalField) -> HeartbeatExtension | None:
    """Read what a heartbeat says; None if it says nothing of ours."""
    return _decode(_heartbeats, raw)


def read_error(raw: ShoalField) -> InferenceErrorExtension:
    """Read how a job failed; what cannot be read is not said."""
    return _decode(_errors, raw) or InferenceErrorExtension()


def read_raw_chunk(raw: ShoalField) -> RawChunkExtension | None:
    """Read whether a piece of a model comes next; None if it does not."""
    return _decode(_raw_chunks, raw)


def read_completion(raw: ShoalField) -> InferenceCompleteExtension:
    """Read how an answer ended.

    Raises PeerError if it cannot be read: usage and receipt are not to be lost.
    """
    if isinstance(raw, UnsetType):
        return InferenceCompleteExtension()
    ending = _decode(_completions, raw)
    if ending is None:
        raise PeerError("inferenceComplete: shoal: it cannot be read")
    return ending


def write_extension(
    field: IntroductionExtension
    | HeartbeatExtension
    | InferenceCompleteExtension
    | InferenceErrorExtension
    | RawChunkExtension,
) -> Raw:
    """Return our field as it is put into a message."""
    return Raw(encode_json(field))


# Translations.


def usage_of(tokens: UsageExtension | None) -> Usage | None:
    """Return usage as it was read."""
    if tokens is None:
        return None
    return Usage(tokens.prompt_tokens, tokens.completion_tokens)


def completion_extension(event: Completed) -> InferenceCompleteExtension:
    """Return what is said of an answer that is whole."""
    usage, receipt = event.usage, event.receipt
    return InferenceCompleteExtension(
        finish_reason=well_formed(event.finish_reason)[:WORD_MAX],
        usage=None
        if usage is None
        else UsageExtension(usage.prompt_tokens, usage.completion_tokens),
        output=event.output,
        receipt=None
        if receipt is None
        else ReceiptExtension(receipt.body, receipt.signature),
    )


def error_extension(event: Rejected | Failed) -> InferenceErrorExtension:
    """Return what is said beside the error's text."""
    if isinstance(event, Rejected):
        return InferenceErrorExtension()
    return InferenceErrorExtension(failed=True, fault=event.fault.value)


def receipt_of(receipt: ReceiptExtension | None) -> SignedReceipt | None:
    """Return a receipt as it was read, if it is not too large to be one."""
    if receipt is None or len(receipt.body) + len(receipt.signature) > RECEIPT_SIZE_MAX:
        return None
    return SignedReceipt(receipt.body, receipt.signature)


def fault_of(error: InferenceErrorExtension) -> Fault:
    """Return whose fault it was; the worker's, where it does not say."""
    return next((f for f in Fault if f.value == error.fault), Fault.WORKER)


# Private parts, in the order in which they are called.

T = TypeVar("T")

_introductions = msgspec.json.Decoder(IntroductionExtension)
_heartbeats = msgspec.json.Decoder(HeartbeatExtension)
_errors = msgspec.json.Decoder(InferenceErrorExtension)
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
