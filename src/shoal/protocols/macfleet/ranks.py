"""What ranks exchange with MacFleet's own programs: a handshake, then whole arrays.

The handshake is that of all nodes; the arrays are GRADIENT frames on stream 1, in the
order of the schedule.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.domain.errors import NotAdmitted, PeerError
from shoal.protocols.macfleet.codec.arrays import decode_array, encode_array
from shoal.protocols.macfleet.codec.frames import (
    HEADER,
    PAYLOAD_MAX,
    FrameReader,
    FrameType,
    crc32,
    encode_header,
)
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
    from shoal.protocols.macfleet.codec.arrays import Array

_NO_HARDWARE = b"{}"


class FleetRankHandshake:
    """One end of a handshake, by frames of bytes; see ``RankHandshake``.

    ``check`` checks the client's id.
    """

    head_size = HEADER.size

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
            return FrameReader(self._handshake.limit).body_size(head)
        except PeerError as error:
            raise RankRefused(str(error)) from error

    def receive(self, head: bytes, body: bytes, now: float) -> HandshakeStep:
        try:
            frame = FrameReader.read(FramedMessage(head, memoryview(body)))
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

    head_size = HEADER.size
    payload_max = PAYLOAD_MAX

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
        checksum = crc32(numbers, crc32(head))
        size = len(head) + len(numbers)
        return encode_header(FrameType.GRADIENT, size, checksum) + head, numbers

    def array_size(self, head: bytes) -> int:
        # MacFleet's programs read any frame as an array, whatever its type.
        return FrameReader().body_size(head)

    def decode_array(self, head: bytes, payload: memoryview) -> "Array":
        frame = FrameReader.read(FramedMessage(head, payload))
        return decode_array(frame.payload)

    def _member(self, identity: RankIdentity) -> FleetMember:
        return FleetMember(
            identity.node_id,
            fleet_key(identity.secret, identity.fleet) if identity.secret else None,
            HardwareProfile,
            identity.random_bytes,
            challenges=self._challenges,
        )
