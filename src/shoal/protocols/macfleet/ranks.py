"""What ranks exchange with MacFleet's own programs: a handshake, then whole arrays.

The handshake is that of all nodes; the arrays are GRADIENT frames on stream 1, in the
order of the schedule: a header, then the numbers, without a copy.

Source: MacFleet's own programs (the document does not describe the format)::

    size of the dtype u16 | dimensions u16 | each u32 | dtype | numbers

All integers are big-endian; the numbers are in the dtype's byte order, in C order.
NumPy accepts more dtype names than are safe to read from a stranger (records,
subarrays, Python objects), so a pattern selects the names that are read.  MacFleet's
own programs put each array into one frame, and their collectives distinguish arrays by
order alone.
"""

import re
import struct
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from shoal.domain.errors import InvalidRequest, NotAdmitted, PeerError, TooLarge
from shoal.protocols.macfleet.codec import frames
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.handshake import (
    Agreed,
    ClientHandshake,
    FleetHandshake,
    ServerHandshake,
)
from shoal.protocols.macfleet.member import FleetMember, SentChallenges
from shoal.protocols.seam.framing import FramedMessage
from shoal.protocols.seam.ranks import HandshakeStep, RankIdentity, RankRefused

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

ARRAY_HEADER = struct.Struct("!HH")
DIMENSIONS_MAX = 64  # NumPy's limit
DTYPE_NAME_MAX = 64  # characters of a dtype's name

_DTYPE = re.compile(
    r"bool|u?int(?:8|16|32|64)|float(?:16|32|64|96|128)|complex(?:64|128|192|256)"
    r"|(?:datetime64|timedelta64)(?:\[[0-9]{0,9}[A-Za-z]{1,7}\])?"
    r"|[<>=|]?(?:[?bBhHiIlLqQefdgFDG]|b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)"
    r"|[SUV][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,7}\])?)"
)
"""The dtypes that are accepted: numbers, characters, bytes and times."""
_NO_HARDWARE = b"{}"


class FleetRankHandshake:
    """One end of a handshake, by frames of bytes; see ``RankHandshake``.

    ``check`` checks the client's id.
    """

    head_size = frames.HEADER.size

    def __init__(
        self, handshake: FleetHandshake, check: Callable[[str], object] | None = None
    ) -> None:
        self._handshake = handshake
        self._check = check

    def on_open(self, certificate: bytes) -> None:
        pass  # nothing in the handshake is bound to it

    def start(self, now: float) -> bytes:
        return b"".join(self._handshake.start(now))

    def body_size(self, head: bytes) -> int:
        try:
            return frames.FrameReader(self._handshake.limit).body_size(head)
        except PeerError as error:
            raise RankRefused(str(error)) from error

    def receive(self, head: bytes, body: bytes, now: float) -> HandshakeStep:
        try:
            frame = frames.FrameReader.read(FramedMessage(head, memoryview(body)))
            step = self._handshake.receive(frame, now)
            if not isinstance(step, Agreed):
                return HandshakeStep(b"".join(step.send), None)
            if self._check is not None:
                self._check(step.peer_id)
        except (PeerError, NotAdmitted) as error:
            raise RankRefused(str(error)) from error
        return HandshakeStep(b"".join(step.send), step.peer_id)


class FleetRanks:
    """The messages and handshakes of one rank; see ``ArrayWire``."""

    head_size = frames.HEADER.size
    payload_max = frames.PAYLOAD_MAX

    def __init__(self) -> None:
        self._challenges = SentChallenges()

    def client(
        self, identity: RankIdentity, server: str, address: str
    ) -> FleetRankHandshake:
        return FleetRankHandshake(
            ClientHandshake(
                self._member(identity), _NO_HARDWARE, server, server=address
            )
        )

    def server(
        self, identity: RankIdentity, address: str, secret_of: Callable[[str], str]
    ) -> FleetRankHandshake:
        return FleetRankHandshake(
            ServerHandshake(self._member(identity), _NO_HARDWARE), check=secret_of
        )

    def encode_array(self, array: "Array") -> tuple[bytes, memoryview]:
        head, numbers = encode_array(array)
        checksum = frames.crc32(numbers, frames.crc32(head))
        size = len(head) + len(numbers)
        return frames.encode_header(
            frames.FrameType.GRADIENT, size, checksum
        ) + head, numbers

    def array_size(self, head: bytes) -> int:
        # MacFleet's programs read any frame as an array, whatever its type.
        return frames.FrameReader().body_size(head)

    def decode_array(self, head: bytes, payload: memoryview) -> "Array":
        frame = frames.FrameReader.read(FramedMessage(head, payload))
        return decode_array(frame.payload)

    def _member(self, identity: RankIdentity) -> FleetMember:
        return FleetMember(
            identity.node_id,
            fleet_key(identity.secret, identity.fleet) if identity.secret else None,
            HardwareProfile,
            identity.random_bytes,
            challenges=self._challenges,
        )


def encode_array(array: "Array") -> tuple[bytes, memoryview]:
    """Return the header of an array, and its numbers as bytes.

    These are the array's own memory if it is in C order, else a copy.

    Raises InvalidRequest for an unsupported dtype, and TooLarge.
    """
    import numpy as np

    name = str(array.dtype)
    if len(name) > DTYPE_NAME_MAX or _DTYPE.fullmatch(name) is None:
        raise InvalidRequest(
            f"an array of {name} cannot be sent: convert it to numbers with astype"
        )
    label = name.encode()
    shape = struct.pack(f"!{array.ndim}I", *array.shape)
    head = ARRAY_HEADER.pack(len(label), array.ndim) + shape + label
    if len(head) + array.nbytes > frames.PAYLOAD_MAX:
        raise TooLarge(
            f"an array of {array.nbytes} bytes exceeds the limit of "
            f"{frames.PAYLOAD_MAX} with its header: split it"
        )
    if not array.nbytes:
        return head, memoryview(b"")
    flat = np.ascontiguousarray(array).reshape(-1)
    return head, flat.view(np.uint8).data


def decode_array(payload: frames.Payload) -> "Array":
    """Return the array in a payload: a view of it, writable if the payload is.

    Raises PeerError if it is malformed, has an unsupported dtype, or does not have the
    size that its shape requires.
    """
    import numpy as np

    if len(payload) < ARRAY_HEADER.size:
        raise PeerError(f"an array of {len(payload)} bytes has no header")
    label, dimensions = ARRAY_HEADER.unpack_from(payload)
    begin = ARRAY_HEADER.size + 4 * dimensions + label
    if dimensions > DIMENSIONS_MAX or label > DTYPE_NAME_MAX or begin > len(payload):
        raise PeerError(
            f"an array of {dimensions} dimensions with a dtype name of {label} "
            f"characters in {len(payload)} bytes"
        )
    shape = struct.unpack_from(f"!{dimensions}I", payload, ARRAY_HEADER.size)
    name = bytes(payload[begin - label : begin]).decode("ascii", "replace")
    if _DTYPE.fullmatch(name) is None:
        raise PeerError(f"an array of the unsupported dtype {name!r}")
    try:
        dtype = np.dtype(name)
        wanted = prod(shape) * dtype.itemsize
        if wanted != len(payload) - begin:
            raise PeerError(
                f"an array of {name} and shape {shape} has {wanted} bytes, and "
                f"{len(payload) - begin} were received"
            )
        return np.ndarray(shape, dtype, payload, begin)
    except (TypeError, ValueError, OverflowError) as error:
        raise PeerError(f"an array of {name} and shape {shape}: {error}") from error
