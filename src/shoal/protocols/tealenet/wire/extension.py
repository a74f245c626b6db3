"""Our field ``shoal``: what peers of our kind say that the document has no words for.

Other peers ignore it.  What is in it is read with limits, and what is not understood
counts as not said: newer peers may say more.
"""

from enum import StrEnum
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Raw, UnsetType

from shoal.domain.errors import PeerError
from shoal.domain.nesting import has_more_values
from shoal.domain.outcome import Fault, Usage
from shoal.domain.receipts import SIGNED_MAX, SignedReceipt
from shoal.domain.vocabulary import Completed, Failed, Rejected
from shoal.protocols.tealenet.wire.offerings import Offering
from shoal.protocols.tealenet.wire.scalars import (
    TEXT_MAX,
    Count,
    Extra,
    Name,
    well_formed,
    written,
)

VERSION = 1
VALUES_MAX = 100_000  # values in our field
WORD_MAX = 64  # characters of a reason to finish
RAW_MAX = 4 << 20  # bytes of a piece of a model that is sent as it is


class Ability(StrEnum):
    """Something that a peer of ours knows beyond the document."""

    CANCEL = "cancel"  # inferenceCancel
    RECEIPT = "receipt"  # signed receipts in inferenceComplete
    RESUME = "resume"  # the beginning of an answer in inferenceRequest
    NOISE = "noise"  # Noise_IK_25519_ChaChaPoly_BLAKE2s on relays
    RAW = "raw"  # pieces of models as they are, after what they are: see ``sharing``


_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
_Base64: TypeAlias = Annotated[str, msgspec.Meta(max_length=128)]
_Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=WORD_MAX)]


class Introduction(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a peer says of itself in ``hello``, ``helloAck`` and a relay's capabilities.

    ``key`` is its Ed25519 key and ``noise`` its X25519 key, both in hexadecimal, and
    ``noise_proof`` binds the second to the first.  ``challenge`` is what the other is
    to sign, and ``proof`` what came of the other's challenge: see ``proving``.
    ``role`` is worker or coordinator.  ``token`` is a join token, which is left out
    where others can read along.  ``refusal`` says why the other is not let in.
    """

    version: Annotated[int, msgspec.Meta(ge=VERSION)]
    features: list[str] = []
    name: Name = ""
    role: Name = ""
    token: Name = ""
    refusal: _Text = ""
    offers: list[Offering] | None = None
    key: _Base64 = ""
    challenge: _Base64 = ""
    proof: _Base64 = ""
    noise: _Base64 = ""
    noise_proof: _Base64 = ""

    @property
    def abilities(self) -> frozenset[Ability]:
        """What of our extension it knows."""
        return frozenset(each for each in Ability if each.value in self.features)


class Pulse(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a peer says in ``heartbeat``; what is None or empty was not said.

    ``offers`` is there when they changed, and ``proof`` in the first heartbeat of who
    dialled.  ``farewell`` says why it hangs up.  ``unfit``, ``queued`` and ``speed``
    are as in ``Condition``; ``cpu`` and ``memory`` are in percent.
    """

    proof: _Base64 = ""
    offers: list[Offering] | None = None
    draining: _Text | None = None
    farewell: _Text | None = None
    jobs: Count | None = None
    cpu: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    memory: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    unfit: _Text | None = None
    queued: Count | None = None
    speed: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None


class Tokens(msgspec.Struct, frozen=True):
    """Usage."""

    prompt_tokens: Count
    completion_tokens: Count


class Receipt(msgspec.Struct, frozen=True):
    """What the worker signed, byte for byte, and its signature; in base64."""

    body: bytes
    signature: bytes


class Ending(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a peer says in ``inferenceComplete``: how the answer ended.

    ``output`` is as in ``Outcome``.
    """

    finish_reason: _Word = "stop"
    usage: Tokens | None = None
    output: str = ""
    receipt: Receipt | None = None


class Failing(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a peer says in ``inferenceError``: whether the job was run, whose fault."""

    failed: bool = False
    fault: _Word = ""


class Following(msgspec.Struct, frozen=True):
    """What a peer says in ``modelTransferChunk``: as many bytes are the next message.

    They are the piece, and there is no ``data``.
    """

    raw: Annotated[int, msgspec.Meta(ge=1, le=RAW_MAX)]


# Reading.  Other peers' fields of the same name are none of ours.


def read_introduction(raw: Extra) -> Introduction | None:
    """Read what a peer says of itself; None if it is none of ours."""
    return _read(_introductions, raw)


def read_pulse(raw: Extra) -> Pulse | None:
    """Read what a heartbeat says; None if it says nothing of ours."""
    return _read(_pulses, raw)


def read_failing(raw: Extra) -> Failing:
    """Read how a job failed; what cannot be read is not said."""
    return _read(_failings, raw) or Failing()


def read_following(raw: Extra) -> Following | None:
    """Read whether a piece of a model comes next; None if it does not."""
    return _read(_followings, raw)


def read_ending(raw: Extra) -> Ending:
    """Read how an answer ended.

    Raises PeerError if it cannot be read: usage and receipt are not to be lost.
    """
    if isinstance(raw, UnsetType):
        return Ending()
    ending = _read(_endings, raw)
    if ending is None:
        raise PeerError("inferenceComplete: shoal: it cannot be read")
    return ending


def write(field: Introduction | Pulse | Ending | Failing | Following) -> Raw:
    """Return our field as it is put into a message."""
    return Raw(written(field))


# Translations.


def usage_of(tokens: Tokens | None) -> Usage | None:
    """Return usage as it was read."""
    if tokens is None:
        return None
    return Usage(tokens.prompt_tokens, tokens.completion_tokens)


def ending_of(done: Completed) -> Ending:
    """Return what is said of an answer that is whole."""
    usage, receipt = done.usage, done.receipt
    return Ending(
        finish_reason=well_formed(done.finish_reason)[:WORD_MAX],
        usage=None
        if usage is None
        else Tokens(usage.prompt_tokens, usage.completion_tokens),
        output=done.output,
        receipt=None if receipt is None else Receipt(receipt.body, receipt.signature),
    )


def failing_of(end: Rejected | Failed) -> Failing:
    """Return what is said beside the error's text."""
    if isinstance(end, Rejected):
        return Failing()
    return Failing(failed=True, fault=end.fault.value)


def receipt_of(receipt: Receipt | None) -> SignedReceipt | None:
    """Return a receipt as it was read, if it is not too large to be one."""
    if receipt is None or len(receipt.body) + len(receipt.signature) > SIGNED_MAX:
        return None
    return SignedReceipt(receipt.body, receipt.signature)


def fault_of(failing: Failing) -> Fault:
    """Return whose fault it was; the worker's, where it does not say."""
    return next((f for f in Fault if f.value == failing.fault), Fault.WORKER)


# Private parts, in the order in which they are called.

T = TypeVar("T")

_introductions = msgspec.json.Decoder(Introduction)
_pulses = msgspec.json.Decoder(Pulse)
_failings = msgspec.json.Decoder(Failing)
_followings = msgspec.json.Decoder(Following)
_endings = msgspec.json.Decoder(Ending)


def _read(decoder: "msgspec.json.Decoder[T]", raw: Extra) -> T | None:
    if isinstance(raw, UnsetType):
        return None
    data = bytes(raw)
    try:
        if len(data) > 2 * VALUES_MAX and has_more_values(data.decode(), VALUES_MAX):
            return None
        return decoder.decode(data)
    except (ValueError, RecursionError):
        return None
