"""Real nodes at the other end of a connection of ours: frames, and nothing of our own.

They are of an open fleet, for what comes after the handshake is the same in any.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from protocols.calling import around, counting, packed, sent
from shoal.domain.vocabulary import Command, Event
from shoal.domain.worker import ServedModel
from shoal.protocols.macfleet import Config
from shoal.protocols.macfleet.codec.frames import (
    Frame,
    FrameReader,
    FrameType,
    encode_frame,
)
from shoal.protocols.macfleet.coordinator import endpoints
from shoal.protocols.macfleet.dialer import FleetDialer
from shoal.protocols.macfleet.session import PeerSession
from shoal.protocols.seam.multi_peer import (
    Listener,
    MultiPeerSession,
    PeerMessage,
    ToPeer,
)
from shoal.protocols.seam.session import (
    Bulk,
    Close,
    Notice,
    ProtocolContext,
    Send,
    WorkerEnd,
    WorkerProfile,
)

OPEN = around("")


@dataclass
class UpstreamNode:
    """A session of ours, and what it says to the real node beside it."""

    session: MultiPeerSession | WorkerEnd
    reader: FrameReader = field(default_factory=FrameReader)
    frames: list[Frame] = field(default_factory=list)  # that the node got
    heard: list[object] = field(default_factory=list)  # words, without whose they are
    notices: list[str] = field(default_factory=list)
    end: str = ""

    def take(self, outputs: Sequence[object]) -> list[object]:
        """Take what the session returned; return the words in it."""
        words: list[object] = []
        for output in outputs:
            match output:
                case PeerMessage(_, word):
                    words.append(word)
                case Close(reason):
                    self.end = reason
                case Notice(text):
                    self.notices.append(text)
                case Send() | Bulk():
                    pass
                case word:
                    words.append(word)
        for data in sent(outputs):
            self.frames += map(self.reader.read, self.reader.split(data))
        self.heard += words
        return words

    def says(self, data: bytes, now: float = 0.0) -> list[object]:
        """Let the node send bytes; return what the session hears."""
        return self.take(self.session.receive([data], now))

    def task(self, task_id: str, **fields: object) -> list[object]:
        """Let the node ask for something."""
        return self.says(frame(FrameType.TASK, {"task_id": task_id, **fields}))

    def result(self, task_id: str, **fields: object) -> list[object]:
        """Let the node say what came of something."""
        fields = {"ok": True, "value": None, "error": None, **fields}
        return self.says(frame(FrameType.RESULT, {"task_id": task_id, **fields}))

    def send(self, word: Event | Command, now: float = 0.0) -> list[object]:
        """Let the session say something; return what came of it at once."""
        # A worker's session has one peer, and a crowd's is told which.
        message = ToPeer("", word) if isinstance(self.session, PeerSession) else word
        words = self.take(self.session.send(message, now))  # type: ignore[arg-type]  # one of both
        return [*words, *self.tick(now)]

    def tick(self, now: float) -> list[object]:
        """Let the session act, if it is due."""
        due = self.session.deadline
        return (
            self.take(self.session.tick(now)) if due is not None and due <= now else []
        )


def frame(type: FrameType, said: object) -> bytes:
    return encode_frame(Frame(type, 1, 0, 0, packed(said)))


def coordinator_with_node(
    node_id: str = "node-b",
    setting: ProtocolContext = OPEN,
    config: Config | None = None,
    address: str = "192.0.2.1",
) -> UpstreamNode:
    """Let a real node call a coordinator of an open fleet."""
    return called(listener(setting, config), node_id, address)


def listener(setting: ProtocolContext = OPEN, config: Config | None = None) -> Listener:
    """Return where a coordinator's transport listens."""
    found = endpoints(config or Config(), setting)
    return next(each for each in found if isinstance(each, Listener))


def called(listens: Listener, node_id: str, address: str = "192.0.2.1") -> UpstreamNode:
    """Let a real node call, without a token."""
    beside = UpstreamNode(listens.accept(address, 0.0))
    beside.take(beside.session.tick(0.0))
    beside.says(encode_frame(Frame(FrameType.CONTROL, 0, 0, 0, node_id.encode())))
    return beside


def worker_with_node(node_id: str = "node-a") -> UpstreamNode:
    """Let a worker of ours call a real node of an open fleet."""
    member = WorkerProfile(
        "node-b", ServedModel(""), 1, random_bytes=counting("worker")
    )
    dialer = FleetDialer("tcp://192.0.2.1:50052", member)
    dialer.start_session({})
    assert dialer.why_final(1000, "") is None  # nobody answers there as to a ping
    beside = UpstreamNode(dialer.start_session({}))
    beside.take(beside.session.tick(0.0))
    beside.says(encode_frame(Frame(FrameType.CONTROL, 0, 0, 0, node_id.encode())))
    return beside
