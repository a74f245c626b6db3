"""The messages between ranks: frames with parts of arrays, or with whole arrays.

MacFleet's own programs send whole arrays, in the order of the schedule, on stream 1.
Between Shoal's ranks a segment is a GRADIENT frame too, without a shape and a dtype,
which both ends know, and without a checksum::

    stream     number of the operation
    flags      CHUNKED, and from bit 8 on the kind of the collective
    sequence   number of the segment
    reserved   generation, 12 bits | step, 20 bits

Only after the strong handshake are there segments: a rank of Shoal's own groups accepts
no other.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.domain.credentials import digest_of
from shoal.domain.errors import NotAdmitted, PeerError
from shoal.protocols.macfleet.codec.arrays import decode_array, encode_array
from shoal.protocols.macfleet.codec.frames import (
    DEFAULT_STREAM,
    HEADER,
    PAYLOAD_MAX,
    Flag,
    FrameReader,
    FrameType,
    crc32,
    encode_header,
)
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.handshake import (
    DEFAULT_STRENGTHS,
    HandshakeSettings,
    HandshakeStrength,
    SentChallenges,
)
from shoal.protocols.macfleet.handshake_client import ClientHandshake
from shoal.protocols.macfleet.handshake_server import ServerHandshake
from shoal.protocols.macfleet.ranks.handshake import FleetRankHandshake
from shoal.protocols.seam.admission import (
    NO_JOIN_TOKEN,
    WRONG_TOKEN,
    AdmissionGrant,
    JoinRequest,
    proves_token,
)
from shoal.protocols.seam.framing import FramedMessage
from shoal.protocols.seam.ranks import (
    RankIdentity,
    SegmentHead,
    SegmentLabel,
)

if TYPE_CHECKING:
    from shoal.protocols.macfleet.codec.arrays import Array

_KIND_SHIFT = 8  # of the flags: the lower bits are the document's
_STEP_BITS = 20
_NO_PROFILE = b"{}"


class FleetRanks:
    """The messages and handshakes of one rank; see ``RankWire``."""

    head_size = HEADER.size
    payload_max = PAYLOAD_MAX

    def __init__(self) -> None:
        self._challenges = SentChallenges()

    def client(
        self, identity: RankIdentity, server: str, address: str
    ) -> FleetRankHandshake:
        return FleetRankHandshake(
            ClientHandshake(
                self._settings(identity),
                server,
                require_strong=identity.fleet is None,
                server=address,
            )
        )

    def server(
        self, identity: RankIdentity, address: str, secret_of: Callable[[str], str]
    ) -> FleetRankHandshake:
        def admission(request: JoinRequest) -> AdmissionGrant:
            if not proves_token(request.token, secret_of(request.name)):
                raise NotAdmitted(WRONG_TOKEN)
            return NO_JOIN_TOKEN

        return FleetRankHandshake(
            ServerHandshake(self._settings(identity, admission), address), secret_of
        )

    def encode_segment(self, label: SegmentLabel, size: int) -> bytes:
        kind, operation, index, generation, step = label
        return encode_header(
            FrameType.GRADIENT,
            size,
            0,
            operation,
            Flag.CHUNKED | kind << _KIND_SHIFT,
            index,
            generation << _STEP_BITS | step,
        )

    def decode_segment(self, head: bytes) -> SegmentHead:
        stream, type, flags, size, sequence, _, group = HEADER.unpack(head)
        if type != FrameType.GRADIENT or not flags & Flag.CHUNKED:
            raise PeerError(f"expected a segment, found a frame of type {type}")
        step = group & (1 << _STEP_BITS) - 1
        label = SegmentLabel(
            flags >> _KIND_SHIFT, stream, sequence, group >> _STEP_BITS, step
        )
        return SegmentHead(label, size)

    def encode_array(self, array: "Array") -> tuple[bytes, memoryview]:
        head, numbers = encode_array(array)
        checksum = crc32(numbers, crc32(head))
        size = len(head) + len(numbers)
        return (
            encode_header(FrameType.GRADIENT, size, checksum, DEFAULT_STREAM) + head,
            numbers,
        )

    def array_size(self, head: bytes) -> int:
        # MacFleet's programs read any frame as an array, whatever its type.
        return FrameReader().body_size(head)

    def decode_array(self, head: bytes, payload: memoryview) -> "Array":
        frame = FrameReader.read(FramedMessage(head, payload))
        return decode_array(frame.payload)

    def _settings(
        self,
        identity: RankIdentity,
        admission: Callable[[JoinRequest], AdmissionGrant] | None = None,
    ) -> HandshakeSettings:
        """Return the settings of one handshake."""
        mixed = identity.fleet is not None
        return HandshakeSettings(
            node_id=identity.node_id,
            key=fleet_key(identity.secret, identity.fleet or "")
            if mixed and identity.secret
            else None,
            profile=_NO_PROFILE,
            random_bytes=identity.random_bytes,
            challenges=self._challenges,
            digest=digest_of(identity.secret) if identity.secret else b"",
            fleet=identity.fleet or "",
            admission=admission,
            accepts=DEFAULT_STRENGTHS
            if mixed
            else frozenset({HandshakeStrength.STRONG}),
        )
