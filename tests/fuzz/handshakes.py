"""Both ends of a fleet's handshakes, fed with what strangers write.

A message of the input is a frame's type, its flags and its payload: what is wrong with
the rest of a frame is found before a handshake sees it.
"""

from collections.abc import Callable, Sequence

from fuzz.mutations import SEPARATOR
from protocols.macfleet.handshake_ends import (
    HandshakeEnd,
    client,
    frame_of,
    giving,
    meet,
    node,
    server,
)
from protocols.macfleet.recorded import CASES
from shoal.protocols.macfleet.codec.frames import Frame, FrameReader, FrameType
from shoal.protocols.macfleet.handshake import Agreed
from shoal.protocols.macfleet.handshake_messages import HandshakeRefused


def handshakes(data: bytes) -> None:
    """Whatever is said to an end, it goes on, agrees or refuses."""
    for make in ENDS:
        end = make().open().handshake
        for number, message in enumerate(data.split(SEPARATOR)):
            if len(message) < 2:
                continue
            kind = FrameType(message[0] % len(FrameType) + 1)
            frame = Frame(kind, 0, message[1], 0, memoryview(message)[2:])
            try:
                if isinstance(end.receive(frame, float(number)), Agreed):
                    break
            except HandshakeRefused:
                break


def _said(end: HandshakeEnd) -> bytes:
    return SEPARATOR.join(map(_written, end.sent))


def _written(data: bytes) -> bytes:
    frame = frame_of(data)
    kind = (frame.type - 1) % len(FrameType)
    return bytes([kind, frame.flags & 0xFF]) + bytes(frame.payload)


def seeds() -> Sequence[bytes]:
    """Return what was recorded, and what ours say to each other."""
    found = []
    for case in CASES:
        if case["kind"] in ("handshake_server", "handshake_client"):
            given = case["input"]
            sent = given.get("client_sends_hex") or [given["server_replies_hex"]]
            frames = [_whole(bytes.fromhex(each)) for each in sent if each]
            found.append(SEPARATOR.join(each for each in frames if each))
    for ours in (OURS, OPEN):
        one, other = (make().open() for make in ours)
        meet(one, other)
        found += [_said(one), _said(other)]
    return [each for each in found if each]


def _whole(data: bytes) -> bytes:
    """Return a recorded frame as a message, if it is one that a reader takes."""
    size = FrameReader.head_size
    kind, flags = data[5], data[7]
    return bytes([(kind - 1) % len(FrameType), flags]) + data[size:]


def _recorded_server() -> HandshakeEnd:
    return server(node("node-a", accepts_v1=True, random_bytes=giving(B)))


def _recorded_client() -> HandshakeEnd:
    return client(node("node-b", accepts_v1=True, random_bytes=giving(A)))


A, B = bytes(range(32)), bytes(range(0x80, 0xA0))  # what was drawn in the recordings

OURS: tuple[Callable[[], HandshakeEnd], ...] = (
    lambda: client(node("node-b", accepts_v1=True)),
    lambda: server(node("node-a", accepts_v1=True)),
)
OPEN: tuple[Callable[[], HandshakeEnd], ...] = (
    lambda: client(node("node-b", None)),
    lambda: server(node("node-a", None)),
)
ENDS = (*OURS, *OPEN, _recorded_server, _recorded_client)
