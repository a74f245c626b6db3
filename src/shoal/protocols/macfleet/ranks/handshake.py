"""The handshake between ranks: that of all nodes, by frames of bytes."""

from collections.abc import Callable

from shoal.domain.errors import NotAdmitted, PeerError
from shoal.protocols.macfleet.codec.frames import HEADER, FrameReader
from shoal.protocols.macfleet.handshake import (
    Agreed,
    FleetHandshake,
    HandshakeRefused,
)
from shoal.protocols.seam.framing import FramedMessage
from shoal.protocols.seam.ranks import HandshakeStep, RankRefused


class FleetRankHandshake:
    """One end of a handshake, by frames of bytes; see ``RankHandshake``.

    ``check`` checks the client's id, where the handshake itself does not call it.
    """

    head_size = HEADER.size

    def __init__(
        self, handshake: FleetHandshake, check: Callable[[str], object] | None = None
    ) -> None:
        self._handshake = handshake
        self._check = check

    def on_open(self, certificate: bytes) -> None:
        self._handshake.on_open(certificate)

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
            if self._check is not None and step.strong is None:
                self._check(step.peer_id)
        except HandshakeRefused as error:
            raise RankRefused(str(error), b"".join(error.send)) from error
        except (PeerError, NotAdmitted) as error:
            raise RankRefused(str(error)) from error
        return HandshakeStep(b"".join(step.send), step.peer_id)
