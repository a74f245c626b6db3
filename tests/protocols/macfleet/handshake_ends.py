"""Two ends of a handshake, and the messages between them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count

from protocols.contexts import require_token
from shoal.domain.credentials import digest_of
from shoal.domain.errors import PeerError
from shoal.ledger.keys import Signer, verify
from shoal.protocols.macfleet.codec.frames import Frame, FrameReader, encode_frame
from shoal.protocols.macfleet.codec.hardware import HardwareProfile, encode_profile
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.handshake import (
    Agreed,
    FleetHandshake,
    HandshakeRefused,
    HandshakeSettings,
    HandshakeStrength,
    SentChallenges,
)
from shoal.protocols.macfleet.handshake_client import ClientHandshake
from shoal.protocols.macfleet.handshake_server import ServerHandshake

TOKEN = "vector-token-0001"
CERTIFICATE = bytes(range(32))
AS_ORIGINALS = frozenset(
    {HandshakeStrength.OPEN, HandshakeStrength.V1, HandshakeStrength.V2}
)
"""What upstream programs speak; they do not mark their challenges."""
UNTIL_V1 = AS_ORIGINALS | {HandshakeStrength.STRONG}

ANNE = Signer.from_seed(b"a" * 32)
BELA = Signer.from_seed(b"b" * 32)


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


def node(
    node_id: str, token: str | None = TOKEN, **others: object
) -> HandshakeSettings:
    """Return a node of a fleet; without a token, of an open one."""
    own = HandshakeSettings(
        node_id=node_id,
        key=None if token is None else fleet_key(token),
        profile=encode_profile(HardwareProfile(chip=node_id)),
        random_bytes=drawing(node_id),
        challenges=SentChallenges(),
        digest=b"" if token is None else digest_of(token),
        admission=require_token(token or ""),
        verifies=verify,
    )
    return replace(own, **others)  # type: ignore[arg-type]  # as Own has them


def joining(node_id: str, token: str) -> HandshakeSettings:
    """Return a node with a join token and no fleet."""
    return replace(node(node_id, None), digest=digest_of(token), admission=None)


@dataclass
class HandshakeEnd:
    """One end of a handshake, and its outcome."""

    handshake: FleetHandshake
    reader: FrameReader = field(default_factory=FrameReader)
    sent: list[bytes] = field(default_factory=list)
    agreed: Agreed | None = None
    refused: PeerError | None = None

    def open(self, certificate: bytes = CERTIFICATE) -> "HandshakeEnd":
        """Begin."""
        self.handshake.on_open(certificate)
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
            self._refuse(self.handshake.disconnected("hung up"))

    def _take(self, frame: Frame, now: float) -> None:
        step = self.handshake.receive(frame, now)
        self.sent += step.send
        if isinstance(step, Agreed):
            self.agreed = step

    def _refuse(self, error: PeerError) -> None:
        self.refused = error
        if isinstance(error, HandshakeRefused):
            self.sent += error.send


def client(
    own: HandshakeSettings, expected: str = "", *, ours: bool = False
) -> HandshakeEnd:
    """Return the end that dials."""
    made = ClientHandshake(own, expected, require_strong=ours, server="10.0.0.2:50052")
    return HandshakeEnd(made)


def server(own: HandshakeSettings, address: str = "10.0.0.1") -> HandshakeEnd:
    """Return the end that is dialled."""
    return HandshakeEnd(ServerHandshake(own, address))


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


def flipped(data: bytes, bits: int) -> Iterator[bytes]:
    """Yield a frame with one bit flipped, and a valid checksum, again and again.

    Covers type, stream, flags and sequence, as far as the types exist, and of each byte
    of the payload ``bits`` bits, which are others in the next byte.
    """
    frame = frame_of(data)
    payload = bytes(frame.payload)
    for place in range(len(payload)):
        for number in range(bits):
            changed = bytearray(payload)
            changed[place] ^= 1 << (place + number) % 8
            yield encode_frame(frame._replace(payload=bytes(changed)))
    for bit in range(16):
        yield encode_frame(frame._replace(flags=frame.flags ^ 1 << bit))
    for bit in range(32):
        yield encode_frame(frame._replace(stream=frame.stream ^ 1 << bit))
        yield encode_frame(frame._replace(sequence=frame.sequence ^ 1 << bit))
    for kind in type(frame.type):
        if kind is not frame.type:
            yield encode_frame(frame._replace(type=kind))
