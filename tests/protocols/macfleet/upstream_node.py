"""Upstream nodes at the other end of a Shoal connection, written as frames.

Their fleet is open: what follows the handshake is the same in any fleet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from protocols.calling import counted_bytes, fleet_context, packed, sent
from shoal.domain.vocabulary import Command, Event
from shoal.domain.worker import ServedModel
from shoal.protocols.macfleet import Config
from shoal.protocols.macfleet.codec.frames import (
    Frame,
    FrameReader,
    FrameType,
    encode_frame,
)
from shoal.protocols.macfleet.dialer import FleetDialer
from shoal.protocols.macfleet.node_endpoints import endpoints
from shoal.protocols.macfleet.session import FleetSession
from shoal.protocols.seam.context import ProtocolContext, WorkerProfile
from shoal.protocols.seam.endpoints import Listener
from shoal.protocols.seam.peer_session import PeerMessage, PeerSession, ToPeer
from shoal.protocols.seam.session import Bulk, Close, Notice, Send, WorkerEnd

OPEN = fleet_context("")


@dataclass
class UpstreamNode:
    """A Shoal session, and what it sends to the upstream node."""

    session: PeerSession | WorkerEnd
    reader: FrameReader = field(default_factory=FrameReader)
    frames: list[Frame] = field(default_factory=list)  # received by the node
    heard: list[object] = field(default_factory=list)  # the session's messages
    notices: list[str] = field(default_factory=list)
    end: str = ""

    def take(self, outputs: Sequence[object]) -> list[object]:
        """Handle the session's outputs; return its messages."""
        messages: list[object] = []
        for output in outputs:
            match output:
                case PeerMessage(_, message):
                    messages.append(message)
                case Close(reason):
                    self.end = reason
                case Notice(text):
                    self.notices.append(text)
                case Send() | Bulk():
                    pass
                case message:
                    messages.append(message)
        for data in sent(outputs):
            self.frames += map(self.reader.read, self.reader.split(data))
        self.heard += messages
        return messages

    def says(self, data: bytes, now: float = 0.0) -> list[object]:
        """Let the node send bytes; return the session's messages."""
        return self.take(self.session.receive([data], now))

    def task(self, task_id: str, **fields: object) -> list[object]:
        """Let the node send a task."""
        return self.says(frame(FrameType.TASK, {"task_id": task_id, **fields}))

    def result(self, task_id: str, **fields: object) -> list[object]:
        """Let the node send a result."""
        fields = {"ok": True, "value": None, "error": None, **fields}
        return self.says(frame(FrameType.RESULT, {"task_id": task_id, **fields}))

    def send(self, message: Event | Command, now: float = 0.0) -> list[object]:
        """Pass the session a message; return its messages in reply."""
        # A worker's session has one peer; a session with peers gets the peer as well.
        sent = (
            ToPeer("", message) if isinstance(self.session, FleetSession) else message
        )
        messages = self.take(self.session.send(sent, now))  # type: ignore[arg-type]  # one of both
        return [*messages, *self.tick(now)]

    def tick(self, now: float) -> list[object]:
        """Call the session's ``tick`` if it is due."""
        due = self.session.deadline
        return (
            self.take(self.session.tick(now)) if due is not None and due <= now else []
        )


def frame(type: FrameType, content: object) -> bytes:
    return encode_frame(Frame(type, 1, 0, 0, packed(content)))


def coordinator_with_node(
    node_id: str = "node-b",
    context: ProtocolContext = OPEN,
    config: Config | None = None,
    address: str = "192.0.2.1",
) -> UpstreamNode:
    """Connect an upstream node to a coordinator of an open fleet."""
    return called(listener(context, config), node_id, address)


def listener(context: ProtocolContext = OPEN, config: Config | None = None) -> Listener:
    """Return the listener of a coordinator's transport."""
    found = endpoints(config or Config(), context)
    return next(each for each in found if isinstance(each, Listener))


def called(listens: Listener, node_id: str, address: str = "192.0.2.1") -> UpstreamNode:
    """Connect an upstream node without a token."""
    beside = UpstreamNode(listens.accept(address, 0.0))
    beside.take(beside.session.tick(0.0))
    beside.says(encode_frame(Frame(FrameType.CONTROL, 0, 0, 0, node_id.encode())))
    return beside


def worker_with_node(node_id: str = "node-a") -> UpstreamNode:
    """Connect a Shoal worker to an upstream node of an open fleet."""
    member = WorkerProfile(
        "node-b", ServedModel(""), 1, random_bytes=counted_bytes("worker")
    )
    dialer = FleetDialer("tcp://192.0.2.1:50052", member)
    dialer.start_session({})
    assert dialer.final_reason(1000, "") is None  # no node answered the ping
    beside = UpstreamNode(dialer.start_session({}))
    beside.take(beside.session.tick(0.0))
    beside.says(encode_frame(Frame(FrameType.CONTROL, 0, 0, 0, node_id.encode())))
    return beside
