"""Sessions for both ends of bench/transport.py: frames alone, and nodes that call."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import Completed, RunJob
from shoal.domain.work import Call
from shoal.protocols.macfleet.codec.frames import FrameReader, FrameType, write_frame
from shoal.protocols.macfleet.codec.hardware import HardwareProfile
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.local_node import (
    FleetConnectionInfo,
    FleetLocalNode,
    FleetRole,
)
from shoal.protocols.macfleet.member import FleetMember
from shoal.protocols.macfleet.membership import FleetRegistry
from shoal.protocols.macfleet.rate_limiter import FleetRateLimiter
from shoal.protocols.macfleet.session import FleetSession
from shoal.protocols.seam.admission import NoThrottle
from shoal.protocols.seam.framing import FramedMessage
from shoal.protocols.seam.peer_session import ALL_PEERS, PeerJoined, PeerMessage, ToPeer
from shoal.protocols.seam.session import Batch, Output, Session

TOKEN = "bench-fleet-token"
NIL = b"\xc0"  # in MessagePack
NO_NAMES = b"\x80"  # an empty map
LEASE = LeaseNumber(1)
DONE = "done"


class Frames:
    """Sends payloads as frames, and acknowledges each that comes; no handshake.

    What it hears are ``DONE``: first that it is open, then each acknowledgement.
    """

    head_size = FrameReader.head_size
    accepts: frozenset[type] = frozenset()
    deadline = None

    def __init__(self) -> None:
        reader = FrameReader()
        self.body_size = reader.body_size
        self.checksum = reader.checksum
        self._read = reader.read

    def tick(self, now: float) -> Sequence[Any]:
        return (DONE,)

    def receive_messages(
        self, messages: Sequence[FramedMessage], now: float
    ) -> Sequence[Any]:
        received = []
        for message in messages:
            payload = self._read(message).type is FrameType.TASK
            received.append(write_frame(FrameType.RESULT, b"") if payload else DONE)
        return received

    def receive(self, batch: Batch, now: float) -> Sequence[Any]:
        raise AssertionError("its link cuts messages")

    def send(self, payload: bytes, now: float) -> Sequence[Output]:
        return (write_frame(FrameType.TASK, payload),)


class Calling:
    """A node's session, which is given payloads and has a function called with each.

    What it hears is as with ``Frames``.
    """

    def __init__(self, session: FleetSession) -> None:
        self._inner = session
        self.accepts = session.accepts
        self.head_size = session.head_size
        self.body_size = session.body_size
        self.checksum = session.checksum
        self.buffer_for = session.buffer_for
        self._count = 0

    @property
    def deadline(self) -> float | None:
        return self._inner.deadline

    def tick(self, now: float) -> Sequence[Any]:
        return self._heard(self._inner.tick(now), now)

    def receive_messages(
        self, messages: Sequence[FramedMessage], now: float
    ) -> Sequence[Any]:
        return self._heard(self._inner.receive_messages(messages, now), now)

    def receive(self, batch: Batch, now: float) -> Sequence[Any]:
        raise AssertionError("its link cuts messages")

    def send(self, payload: bytes, now: float) -> Sequence[Output]:
        self._count += 1
        args = b"\x91\xc6" + len(payload).to_bytes(4, "big") + payload
        call = Call("f", args, NO_NAMES)
        job = RunJob(JobId(str(self._count)), LEASE, call)
        return self._inner.send(ToPeer(ALL_PEERS, job), now)

    def _heard(self, inputs: Sequence[PeerMessage | Output], now: float) -> list[Any]:
        received: list[Any] = []
        for each in inputs:
            if not isinstance(each, PeerMessage):
                received.append(each)
            elif isinstance(each.message, PeerJoined | Completed):
                received.append(DONE)
            elif isinstance(command := each.message, RunJob):
                done = Completed(command.job_id, command.lease, value=NIL)
                received += self._inner.send(ToPeer(each.peer, done), now)
        return received


def node(role: FleetRole, address: str, *, dialled: bool, secure: bool) -> Calling:
    """Return a session of a node of ours."""
    key = fleet_key(TOKEN, "") if secure else None
    own = FleetMember(role.value, key, HardwareProfile, os.urandom)
    ourselves = FleetLocalNode(
        *(role, own, 4, FleetRateLimiter(NoThrottle())),
        FleetRegistry(role.value, HardwareProfile),
    )
    return Calling(
        FleetSession(ourselves, FleetConnectionInfo(dialled=dialled, address=address))
    )


WAYS: dict[str, Callable[[str, bool, bool], Session[Any, Any]]] = {
    "a frame": lambda address, dialled, secure: Frames(),
    "a call": lambda address, dialled, secure: node(
        FleetRole.COORDINATOR if dialled else FleetRole.WORKER,
        address,
        dialled=dialled,
        secure=secure,
    ),
}
"""Sessions, by how they send a payload: given an address, who dialled, and security."""
