"""The messages between ranks: frames with whole arrays, in the order of the schedule.

MacFleet's own programs send them as GRADIENT frames on stream 1.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.domain.credentials import digest_of
from shoal.domain.errors import NotAdmitted
from shoal.protocols.macfleet.codec.arrays import decode_array, encode_array
from shoal.protocols.macfleet.codec.frames import (
    DEFAULT_STREAM,
    HEADER,
    PAYLOAD_MAX,
    FrameReader,
    FrameType,
    crc32,
    encode_header,
)
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.handshake import (
    HandshakeSettings,
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
from shoal.protocols.seam.ranks import RankIdentity

if TYPE_CHECKING:
    from shoal.protocols.macfleet.codec.arrays import Array

_NO_PROFILE = b"{}"


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
                self._settings(identity),
                server,
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
        return HandshakeSettings(
            node_id=identity.node_id,
            key=fleet_key(identity.secret, identity.fleet) if identity.secret else None,
            profile=_NO_PROFILE,
            random_bytes=identity.random_bytes,
            challenges=self._challenges,
            digest=digest_of(identity.secret) if identity.secret else b"",
            fleet=identity.fleet,
            admission=admission,
        )
