"""What our own peers tell each other beside tasks: words in CONTROL frames.

Each is a map in MessagePack with its name as ``word``.  Real peers are never sent one.
"""

from typing import Annotated, TypeAlias, get_args

import msgspec
from msgspec import Meta

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.codec.frames import Payload

CONTROL_MAX = 4 << 20  # bytes of a word
NAMES_MAX = 10_000  # functions, or keys, that an offer names
TEXT_MAX = 4096  # characters of what is for people
RECALLED_MAX = 1 << 16  # calls that are recalled together

Name = Annotated[str, Meta(max_length=1024)]
Names = Annotated[frozenset[Name], Meta(max_length=NAMES_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Id = Annotated[str, Meta(max_length=256)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Percent = Annotated[float, Meta(ge=0.0, le=100.0)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]  # SHA-256


class OfferMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="offer"
):
    """What a worker does, and how much it can take now; the newest counts.

    The fields are those of ``domain.worker.Offer`` and ``WorkerLoad``.  Kinds, features
    and devices are called as there; those that we do not know are for newer peers.
    """

    kinds: Names = frozenset()
    tasks: Names = frozenset()
    slots: Count = 1
    features: Names = frozenset()
    device: Name = ""
    only_for: Names = frozenset()
    queued: Count = 0
    unfit: Text = ""
    speed: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0


class DrainingMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="draining"
):
    """The worker takes nothing more, and ends when it has done what it has."""

    reason: Text = ""


class DismissedMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="dismissed"
):
    """The coordinator wants nothing more of the worker, ever."""

    reason: Text = ""


class LoadReportMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="reported"
):
    """How a worker's machine is doing; percent of all processors and of the memory."""

    cpu: Percent | None = None
    memory: Percent | None = None
    jobs: Count | None = None


class CancelMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="cancel"
):
    """Stop a task; nothing is said about it any more."""

    task_id: Id


class ProgressMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="progress"
):
    """How far a task has come: a share, if it says so, and a remark."""

    task_id: Id
    share: Share | None = None
    remark: Text = ""


class OpenCallStreamMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="open lane"
):
    """Give a slot to calls of one function, which come on a stream of their own."""

    task_id: Id
    stream: Count
    name: Name
    timeout: Seconds | None = None
    features: Names = frozenset()


class RecallCallsMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="recall"
):
    """Do not make these calls of a lane, or stop in the middle."""

    stream: Count
    numbers: Annotated[tuple[Count, ...], Meta(max_length=RECALLED_MAX)]


class CloseCallStreamMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="close lane"
):
    """Give the slot back; whatever runs in it stops."""

    stream: Count


class BlobMissingMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="blob lacked"
):
    """Send a blob in STATE frames: a task needs it, and it is not here."""

    digest: Digest


ControlMessage: TypeAlias = (
    OfferMessage
    | DrainingMessage
    | DismissedMessage
    | LoadReportMessage
    | CancelMessage
    | ProgressMessage
    | OpenCallStreamMessage
    | RecallCallsMessage
    | CloseCallStreamMessage
    | BlobMissingMessage
)


class _TaggedMessage(msgspec.Struct):
    word: str


_encoder = msgspec.msgpack.Encoder()
_tag_decoder = msgspec.msgpack.Decoder(_TaggedMessage)
_decoder: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(
    ControlMessage
)
_KNOWN = frozenset(each.__struct_config__.tag for each in get_args(ControlMessage))


def encode_control(message: ControlMessage) -> bytes:
    """Return the payload of a CONTROL frame."""
    return _encoder.encode(message)


def decode_control(payload: Payload) -> ControlMessage | None:
    """Read the payload of a CONTROL frame; None if we do not know the word.

    Raises PeerError if it is none, or a known one is not as it should be.
    """
    if len(payload) > CONTROL_MAX:
        raise LimitExceeded("control word", len(payload), CONTROL_MAX)
    try:
        if _tag_decoder.decode(payload).word not in _KNOWN:
            return None
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"control word: {error}") from error
