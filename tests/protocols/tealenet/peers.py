"""Peer sessions connected in memory, in virtual time."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import msgspec

from protocols.contexts import protocol_context
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import Command, Event, RunJob
from shoal.domain.work import Chat, Feature, JobKind
from shoal.domain.worker import UNKNOWN_HARDWARE, Offer
from shoal.ledger.keys import Signer
from shoal.protocols.seam.admission import AdmissionCheck
from shoal.protocols.seam.peer_session import PeerJoined, PeerRefused
from shoal.protocols.seam.session import Close, Notice, Send
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.codec.hardware import device_info
from shoal.protocols.tealenet.codec.messages import (
    ChatCompletionChunk,
    ChunkChoice,
    Heartbeat,
    Hello,
    HelloAck,
    InferenceChunk,
    InferenceRequest,
    SentMessage,
)
from shoal.protocols.tealenet.codec.scalars import passcode_hash
from shoal.protocols.tealenet.handshake import DeviceConnections
from shoal.protocols.tealenet.local_node import (
    Config,
    TealeLocalNode,
    coordinator_node,
    device_id,
)
from shoal.protocols.tealenet.peer import LAN, LinkProfile, TealeConnection
from shoal.protocols.tealenet.peer_session import TealePeerSession

OFFER = Offer(
    frozenset({JobKind.CHAT}),
    frozenset({"m"}),
    slots=2,
    features=frozenset({Feature.STOP}),
)


def signer(name: str) -> Signer:
    """Return the key that belongs to a name."""
    return Signer.from_seed(sha256(name.encode()).digest())


def local_coordinator(name: str, **given: Any) -> TealeLocalNode:
    """Return a coordinator's end, with a key of its own."""
    config = Config(**{k: v for k, v in given.items() if k in ("open", "passcode")})
    admission: AdmissionCheck | None = given.get("admission")
    key = signer(name)
    context = replace(
        protocol_context(admission=admission),
        name=name,
        identity=key,
        random_bytes=bytes,
        epoch=1e9,
    )
    return replace(coordinator_node(config, context), offers=given.get("offers", ()))


def local_worker(name: str, passcode: str = "") -> TealeLocalNode:
    """Return a worker's end, with one model."""
    key = signer(name)
    return TealeLocalNode(
        name=name,
        device_id=device_id(key, name),
        hardware=protocol_context().hardware,
        epoch=1e9,
        random_bytes=bytes,
        identity=key,
        serves_only=True,
        passcode=passcode_hash(passcode) if passcode else None,
        offers=(OFFER,),
    )


@dataclass
class PeerEnd:
    """A session, and what it received and sent."""

    session: TealePeerSession
    received: list[PeerJoined | PeerRefused | Event | Command] = field(
        default_factory=list
    )
    closed: str | None = None
    sent: list[bytes] = field(default_factory=list)
    outbox: list[bytes] = field(default_factory=list)  # not delivered yet
    notices: list[str] = field(default_factory=list)

    def send(self, message: Event | Command, now: float) -> None:
        """Send a message through the session."""
        self.apply(self.session.send(message, now))

    def receive(self, batch: Sequence[bytes], now: float) -> None:
        """Let the session receive messages of the other end."""
        self.apply(self.session.receive(batch, now))

    def apply(self, outputs: Sequence[object]) -> None:
        """Record the outputs of the session."""
        for output in outputs:
            match output:
                case Send(data):
                    assert isinstance(data, bytes)
                    self.sent.append(data)
                    self.outbox.append(data)
                case Close(reason):
                    self.closed = reason
                case Notice(text):
                    self.notices.append(text)
                case message:
                    self.received.append(message)  # type: ignore[arg-type]  # no other types

    def messages(self, kind: type) -> list[Any]:
        """Return the received messages of a type."""
        return [each for each in self.received if isinstance(each, kind)]

    @property
    def sent_messages(self) -> list[tuple[str, Any]]:
        """All sent messages, each as its kind and payload."""
        return [message_of(data) for data in self.sent]


class PeerPair:
    """Two connected sessions: a dialler and an acceptor."""

    def __init__(
        self,
        dialler: TealeLocalNode,
        acceptor: TealeLocalNode,
        profile: LinkProfile = LAN,
        *,
        configured: bool = False,
        device_connections: tuple[
            DeviceConnections | None, DeviceConnections | None
        ] = (None, None),
    ) -> None:
        self.now = 0.0
        outgoing = TealeConnection(True, configured=configured)
        for_dialler, for_acceptor = device_connections or (None, None)
        self.dialler = PeerEnd(
            TealePeerSession(dialler, outgoing, profile, for_dialler)
        )
        incoming = TealeConnection(False)
        self.acceptor = PeerEnd(
            TealePeerSession(acceptor, incoming, profile, for_acceptor)
        )
        for end in (self.acceptor, self.dialler):
            end.apply(end.session.tick(0.0))

    def settle(self) -> "PeerPair":
        """Deliver messages until none is left."""
        while self.dialler.outbox or self.acceptor.outbox:
            for one, other in (
                (self.dialler, self.acceptor),
                (self.acceptor, self.dialler),
            ):
                batch, one.outbox = one.outbox, []
                if batch:
                    other.apply(other.session.receive(batch, self.now))
        return self

    def joined(self) -> "PeerPair":
        """Wait until both ends have joined."""
        return self.until(0.5)

    def until(self, when: float) -> "PeerPair":
        """Advance the clock; handle each deadline at its time."""
        self.settle()
        while True:
            ends = (self.dialler, self.acceptor)
            deadlines = [
                due for end in ends if (due := end.session.deadline) is not None
            ]
            if not deadlines or min(deadlines) > when:
                break
            self.now = max(self.now, min(deadlines))
            for end in ends:
                due = end.session.deadline
                if due is not None and due <= self.now:
                    end.apply(end.session.tick(self.now))
            self.settle()
        self.now = when
        return self


class ForeignPeer:
    """A session whose peer is a test: it writes the peer's messages by hand."""

    def __init__(
        self,
        local: TealeLocalNode,
        *,
        dialled: bool = False,
        profile: LinkProfile = LAN,
        connection: TealeConnection | None = None,
    ) -> None:
        self.now = 0.0
        self.end = PeerEnd(
            TealePeerSession(local, connection or TealeConnection(dialled), profile)
        )
        self.end.apply(self.end.session.tick(0.0))

    def deliver(self, message: SentMessage | bytes, after: float = 0.0) -> None:
        """Deliver a message of the peer, ``after`` seconds later."""
        self.wait(after)
        data = message if isinstance(message, bytes) else encode(message)
        self.end.apply(self.end.session.receive([data], self.now))

    def wait(self, seconds: float) -> None:
        """Advance the clock; handle each deadline at its time."""
        until = self.now + seconds
        session = self.end.session
        while (due := session.deadline) is not None and due <= until:
            self.now = max(self.now, due)
            self.end.apply(session.tick(self.now))
        self.now = until

    def send(self, message: Event | Command) -> None:
        """Send a message to the peer."""
        self.end.send(message, self.now)

    def drain(self) -> list[tuple[str, Any]]:
        """Return the messages sent to the peer since the last call."""
        sent, self.end.outbox = self.end.outbox, []
        return [message_of(data) for data in sent]


def message_of(data: bytes) -> tuple[str, Any]:
    """Return the kind and the payload of a message."""
    ((kind, payload),) = json.loads(data).items()
    return kind, payload.get("_0", payload)


MAC = "550E8400-E29B-41D4-A716-446655440000"


def hello(
    passcode: str | None = None, models: tuple[str, ...] = ("m",), device: str = MAC
) -> Hello:
    info = device_info(
        device, "a Mac", UNKNOWN_HARDWARE, registered_at=0.0, seen_at=0.0, models=models
    )
    return Hello(info, 1, models, passcode)


def hello_ack(passcode: str | None = None, device: str = MAC) -> HelloAck:
    sent = hello(passcode, device=device)
    return HelloAck(sent.device_info, 1, sent.loaded_models, sent.cluster_passcode_hash)


def heartbeat(models: tuple[str, ...] = ("m",), **given: object) -> Heartbeat:
    beat = Heartbeat(MAC, 0.0, "nominal", 100, models, False, 0)
    return msgspec.structs.replace(beat, **given)


CHAT = Chat("m", ({"role": "user", "content": "hi"},))
RUN = RunJob(JobId("job"), LeaseNumber(3), CHAT)
REQUEST = "AAAAAAAA-0000-4000-8000-000000000001"


def inference_request(stream: bool = True, **options: Any) -> InferenceRequest:
    request = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        **options,
    }
    return InferenceRequest(REQUEST, request, stream)


def chunk(request_id: str, text: str, **more: Any) -> InferenceChunk:
    return InferenceChunk(
        request_id, ChatCompletionChunk([ChunkChoice(0, {"content": text}, **more)])
    )


def joined_mac(**given: Any) -> ForeignPeer:
    mac = ForeignPeer(local_coordinator("a", offers=(OFFER,), **given))
    mac.deliver(hello())
    mac.wait(0.2)
    mac.deliver(heartbeat())
    mac.drain()
    mac.end.received.clear()
    return mac


def encoded(message: InferenceChunk) -> bytes:
    payload = msgspec.json.encode(message).decode()
    return f'{{"inferenceChunk":{{"_0":{payload}}}}}'.encode()


def submitted_request(mac: ForeignPeer, run: RunJob = RUN) -> str:
    """Submit a job to the Mac; return the request's id."""
    mac.send(run)
    ((kind, payload),) = mac.drain()
    assert kind == "inferenceRequest"
    request_id = payload["requestID"]
    assert isinstance(request_id, str)
    return request_id
