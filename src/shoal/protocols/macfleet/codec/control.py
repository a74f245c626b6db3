"""Control messages between Shoal nodes, in CONTROL frames.

Each is a MessagePack map with its name as ``word``.  Upstream peers receive none.
"""

from typing import Annotated, TypeAlias, get_args

import msgspec
from msgspec import Meta

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.domain.worker import THROTTLE_MAX, ThermalLevel
from shoal.protocols.macfleet.codec.frames import Payload

CONTROL_MAX = 4 << 20  # bytes of a message
NAMES_MAX = 10_000  # functions or keys in an offer
TEXT_MAX = 4096  # characters of a text for people
RECALLED_MAX = 1 << 16  # calls cancelled by one message

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
    """A worker's offer and load; each message replaces the last.

    The fields are those of ``domain.worker.Offer`` and ``WorkerLoad``, with the values
    of their enums; unknown values are ignored, for newer peers.
    """

    kinds: Names = frozenset()
    tasks: Names = frozenset()
    slots: Count = 1
    features: Names = frozenset()
    device: Name = ""
    only_for: Names = frozenset()
    privacy: Name = ""
    price: Name = ""
    queued: Count = 0
    unfit: Text = ""
    speed: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    pythons: Names = frozenset()
    lent: Count = 0
    thermal: Name = ThermalLevel.NOMINAL.value
    throttle: Annotated[int, Meta(ge=0, le=THROTTLE_MAX)] = THROTTLE_MAX


class DrainingMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="draining"
):
    """The worker accepts no further jobs, and leaves when its jobs are done."""

    reason: Text = ""


class DismissedMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="dismissed"
):
    """The coordinator refuses the worker for good."""

    reason: Text = ""


class LoadReportMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="reported"
):
    """The load of a worker's machine; percentages of all processors and the memory."""

    cpu: Percent | None = None
    memory: Percent | None = None
    jobs: Count | None = None


class CancelMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="cancel"
):
    """Cancel a task; no result follows."""

    task_id: Id


class ProgressMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="progress"
):
    """The progress of a task: a share, if it is known, and a remark."""

    task_id: Id
    share: Share | None = None
    remark: Text = ""


class OpenCallStreamMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="open lane"
):
    """Open a call stream: reserve a slot for calls on a frame stream of their own.

    ``grant`` is as in ``RunJob``.
    """

    task_id: Id
    stream: Count
    name: Name
    timeout: Seconds | None = None
    features: Names = frozenset()
    python: Name = ""
    exact: bool = False
    grant: Name = ""


class RecallCallsMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="recall"
):
    """Cancel calls of a call stream, pending or running."""

    stream: Count
    numbers: Annotated[tuple[Count, ...], Meta(max_length=RECALLED_MAX)]


class CloseCallStreamMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="close lane"
):
    """Close a call stream; its running calls are cancelled."""

    stream: Count


class BlobMissingMessage(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="blob lacked"
):
    """Request a blob, in STATE frames: a task needs it and it is missing."""

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
    """The word of a message, known or not."""

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
    """Decode the payload of a CONTROL frame; None if the message is unknown.

    Raises PeerError if it is malformed.
    """
    if len(payload) > CONTROL_MAX:
        raise LimitExceeded("control message", len(payload), CONTROL_MAX)
    try:
        if _tag_decoder.decode(payload).word not in _KNOWN:
            return None
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"control message: {error}") from error
