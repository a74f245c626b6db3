"""What our own peers tell each other beside tasks: words in CONTROL frames.

Each is a map in MessagePack with its name as ``word``.  Real peers are never sent one.
"""

from typing import Annotated, TypeAlias, get_args

import msgspec
from msgspec import Meta

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.wire.frames import Payload

WORD_MAX = 4 << 20  # bytes of a word
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


class Offer(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="offer"
):
    """What a worker does, and how much it can take now; the newest counts.

    The fields are those of ``domain.worker.Offer`` and ``Condition``.  Kinds, features
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


class Draining(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="draining"
):
    """The worker takes nothing more, and ends when it has done what it has."""

    reason: Text = ""


class Dismissed(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="dismissed"
):
    """The coordinator wants nothing more of the worker, ever."""

    reason: Text = ""


class Reported(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="reported"
):
    """How a worker's machine is doing; percent of all processors and of the memory."""

    cpu: Percent | None = None
    memory: Percent | None = None
    jobs: Count | None = None


class Cancel(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="cancel"
):
    """Stop a task; nothing is said about it any more."""

    task_id: Id


class Progress(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="progress"
):
    """How far a task has come: a share, if it says so, and a remark."""

    task_id: Id
    share: Share | None = None
    remark: Text = ""


class OpenLane(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="open lane"
):
    """Give a slot to calls of one function, which come on a stream of their own."""

    task_id: Id
    stream: Count
    name: Name
    timeout: Seconds | None = None
    features: Names = frozenset()


class RecallCalls(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="recall"
):
    """Do not make these calls of a lane, or stop in the middle."""

    stream: Count
    numbers: Annotated[tuple[Count, ...], Meta(max_length=RECALLED_MAX)]


class CloseLane(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="close lane"
):
    """Give the slot back; whatever runs in it stops."""

    stream: Count


class BlobLacked(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="word", tag="blob lacked"
):
    """Send a blob in STATE frames: a task needs it, and it is not here."""

    digest: Digest


Word: TypeAlias = (
    Offer
    | Draining
    | Dismissed
    | Reported
    | Cancel
    | Progress
    | OpenLane
    | RecallCalls
    | CloseLane
    | BlobLacked
)


class _Called(msgspec.Struct):
    word: str


_encoder = msgspec.msgpack.Encoder()
_called = msgspec.msgpack.Decoder(_Called)
_decoder: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)
_KNOWN = frozenset(each.__struct_config__.tag for each in get_args(Word))


def write_word(word: Word) -> bytes:
    """Return the payload of a CONTROL frame."""
    return _encoder.encode(word)


def read_word(payload: Payload) -> Word | None:
    """Read the payload of a CONTROL frame; None if we do not know the word.

    Raises PeerError if it is none, or a known one is not as it should be.
    """
    if len(payload) > WORD_MAX:
        raise LimitExceeded("control word", len(payload), WORD_MAX)
    try:
        if _called.decode(payload).word not in _KNOWN:
            return None
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"control word: {error}") from error
