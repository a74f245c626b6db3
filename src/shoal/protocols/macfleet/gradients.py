"""Arrays on a connection: GRADIENT frames out of an array's memory, and into one.

Source: real peers, which put each array into one frame, and whose collectives tell
arrays apart by their order alone.  Between our own a large one goes in pieces.
"""

from typing import TYPE_CHECKING

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.voice import Voice
from shoal.protocols.macfleet.wire.arrays import pack_array, unpack_array
from shoal.protocols.macfleet.wire.frames import Frame, FrameType
from shoal.protocols.session import Bulk, Send

if TYPE_CHECKING:
    from shoal.protocols.macfleet.wire.arrays import Array


def say_array(array: "Array", voice: Voice) -> Send | Bulk:
    """Return how an array of any shape goes out.

    A large one is read from its own memory while it is written, if it is in C order:
    until then it must not change.

    Raises InvalidRequest for a type that cannot be written, and TooLarge beyond what
    real peers take: 256 MiB with its head.
    """
    return voice.say_parts(FrameType.GRADIENT, *pack_array(array))


def array_in(frame: Frame) -> "Array":
    """Return the array in a frame: a view of what was received, without a copy.

    A large one can be worked on in place; a small one may be read-only.  It need not be
    aligned, for the head before it has any length.

    Raises PeerError if the frame is of another type, or holds no array.
    """
    if frame.type is not FrameType.GRADIENT:
        raise PeerError(f"{frame.type.name} came, where an array was expected")
    return unpack_array(frame.payload)
