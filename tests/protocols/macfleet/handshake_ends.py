"""Two ends of a handshake, and the messages between them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count

from shoal.domain.errors import PeerError
from shoal.protocols.macfleet.codec.frames import Frame, FrameReader, encode_frame
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.handshake import (
    Agreed,
    ClientHandshake,
    FleetHandshake,
    ServerHandshake,
)
from shoal.protocols.macfleet.handshake_messages import HandshakeRefused
from shoal.protocols.macfleet.member import FleetMember

TOKEN = "vector-token-0001"


def drawing(seed: str) -> Callable[[int], bytes]:
    """Return a deterministic source of bytes that look random."""
    numbers = count()

    def draw(size: int) -> bytes:
        return sha256(f"{seed} {next(numbers)}".encode()).digest()[:size]

    return draw


def giving(*challenges: bytes) -> Callable[[int], bytes]:
    """Return a source of exactly these bytes."""
    left = iter(challenges)

    def draw(size: int) -> bytes:
        given = next(left)
        assert len(given) == size
        return given

    return draw


def node(node_id: str, token: str | None = TOKEN, **others: object) -> FleetMember:
    """Return a node of a fleet; without a token, of an open one."""
    own = FleetMember(
        node_id=node_id,
        key=None if token is None else fleet_key(token),
        profile=lambda: HardwareProfile(chip=node_id),
        random_bytes=drawing(node_id),
    )
    return replace(own, **others)  # type: ignore[arg-type]  # as Own has them


@dataclass
class HandshakeEnd:
    """One end of a handshake, and its outcome."""

    handshake: FleetHandshake
    reader: FrameReader = field(default_factory=FrameReader)
    sent: list[bytes] = field(default_factory=list)
    agreed: Agreed | None = None
    refused: PeerError | None = None

    def open(self) -> "HandshakeEnd":
        """Begin."""
        self.sent += self.handshake.start(0.0)
        return self

    @property
    def over(self) -> bool:
        return self.agreed is not None or self.refused is not None

    @property
    def why(self) -> str:
        """Why it refused; empty if it did not."""
        return "" if self.refused is None else str(self.refused)

    @property
    def counts(self) -> bool:
        """Whether it counts a failure for the peer's address."""
        if isinstance(self.refused, HandshakeRefused):
            return self.refused.counts_as_failure
        return (
            self.refused is not None
            and self.handshake.disconnected("x").counts_as_failure
        )

    def hear(self, data: bytes, now: float = 1.0) -> None:
        """Receive bytes, as a session does."""
        try:
            self.reader.limit = self.handshake.limit
            for whole in self.reader.split(data):
                if self.over:
                    return
                self._take(self.reader.read(whole), now)
                self.reader.limit = self.handshake.limit
        except PeerError as error:
            self._refuse(error)

    def wait(self) -> None:
        """Let its deadline pass."""
        if not self.over:
            try:
                self.handshake.tick(self.handshake.deadline)
            except HandshakeRefused as refusal:
                self._refuse(refusal)

    def hang_up(self) -> None:
        """Let the peer disconnect."""
        if not self.over:
            self._refuse(self.handshake.disconnected("disconnected"))

    def _take(self, frame: Frame, now: float) -> None:
        step = self.handshake.receive(frame, now)
        self.sent += step.send
        if isinstance(step, Agreed):
            self.agreed = step

    def _refuse(self, error: PeerError) -> None:
        self.refused = error


def client(
    own: FleetMember, expected: str = "", hardware: bytes | None = None
) -> HandshakeEnd:
    """Return the end that dials."""
    told = own.hardware() if hardware is None else hardware
    made = ClientHandshake(own, told, expected, server="10.0.0.2:50052")
    return HandshakeEnd(made)


def server(own: FleetMember, hardware: bytes | None = None) -> HandshakeEnd:
    """Return the end that is dialled."""
    told = own.hardware() if hardware is None else hardware
    return HandshakeEnd(ServerHandshake(own, told))


Alter = Callable[[int, bytes], bytes]


def as_it_is(number: int, data: bytes) -> bytes:
    """Return a message unchanged."""
    return data


def meet(
    one: HandshakeEnd, other: HandshakeEnd, alter: Alter = as_it_is
) -> list[bytes]:
    """Exchange messages until neither end has more; return all of them.

    ``alter`` receives the number of each message and its bytes, and may change them.
    """
    carried: list[bytes] = []
    heard = {id(one): 0, id(other): 0}
    while True:
        before = len(carried)
        for teller, hearer in ((one, other), (other, one)):
            for data in teller.sent[heard[id(teller)] :]:
                heard[id(teller)] += 1
                carried.append(data)
                hearer.hear(alter(len(carried) - 1, data))
        if len(carried) == before:
            return carried


def frame_of(data: bytes) -> Frame:
    """Return the frame in the bytes."""
    (whole,) = FrameReader().split(data)
    return FrameReader.read(whole)


def rewritten(data: bytes, flags: int | None = None, payload: bytes = b"") -> bytes:
    """Return a frame with other flags or another payload, and a valid checksum."""
    frame = frame_of(data)
    if flags is not None:
        frame = frame._replace(flags=flags)
    return encode_frame(frame._replace(payload=payload or bytes(frame.payload)))
