"""Two ends of a conversation, tied together without a network, in made-up time."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import msgspec

from protocols.settings import setting
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import Command, Event, RunJob
from shoal.domain.work import Chat, Feature, JobKind
from shoal.domain.worker import UNKNOWN_HARDWARE, Offer
from shoal.ledger.keys import Signer
from shoal.protocols.seam.admission import AdmissionCheck
from shoal.protocols.seam.peer_session import PeerJoined
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
from shoal.protocols.tealenet.config import Config
from shoal.protocols.tealenet.handshake import DeviceConnections
from shoal.protocols.tealenet.link_profile import LAN, LinkProfile
from shoal.protocols.tealenet.local_node import (
    TealeLocalNode,
    TealeRole,
    coordinator_node,
    device_id,
)
from shoal.protocols.tealenet.peer import TealeConnection
from shoal.protocols.tealenet.peer_session import TealePeerSession

OFFER = Offer(
    frozenset({JobKind.CHAT}),
    frozenset({"m"}),
    slots=2,
    features=frozenset({Feature.STOP}),
)


def signer(name: str) -> Signer:
    """Return the key of whoever has this name."""
    return Signer.from_seed(sha256(name.encode()).digest())


def coordinator_side(name: str, **given: Any) -> TealeLocalNode:
    """Return a coordinator's side, with a key of its own."""
    config = Config(**{k: v for k, v in given.items() if k in ("open", "passcode")})
    admission: AdmissionCheck | None = given.get("admission")
    key = signer(name)
    around = replace(
        setting(admission=admission),
        name=name,
        identity=key,
        random_bytes=bytes,
        epoch=1e9,
    )
    return replace(coordinator_node(config, around), offers=given.get("offers", ()))


def worker_side(name: str, token: str = "", passcode: str = "") -> TealeLocalNode:
    """Return a worker's side, with one model."""
    key = signer(name)
    return TealeLocalNode(
        role=TealeRole.WORKER,
        name=name,
        device_id=device_id(key, name),
        hardware=setting().hardware,
        epoch=1e9,
        random_bytes=bytes,
        identity=key,
        passcode=passcode_hash(passcode) if passcode else None,
        token=token,
        offers=(replace(OFFER, public_key=key.public_key.hex()),),
    )


@dataclass
class PeerEnd:
    """One end, and what it heard; ``notices`` are for people."""

    conversation: TealePeerSession
    heard: list[PeerJoined | Event | Command] = field(default_factory=list)
    closed: str | None = None
    sent: list[bytes] = field(default_factory=list)  # all, ever
    outbox: list[bytes] = field(default_factory=list)  # not delivered yet
    notices: list[str] = field(default_factory=list)

    def take(self, outputs: Sequence[object]) -> None:
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
                case word:
                    self.heard.append(word)  # type: ignore[arg-type]  # all that is left

    def of(self, kind: type) -> list[Any]:
        """Return what was heard of a kind."""
        return [each for each in self.heard if isinstance(each, kind)]

    @property
    def said(self) -> list[tuple[str, Any]]:
        """All messages that it sent, each with its kind and payload."""
        return [message_of(data) for data in self.sent]


class PeerPair:
    """A dialler and an acceptor."""

    def __init__(
        self,
        dialler: TealeLocalNode,
        acceptor: TealeLocalNode,
        manners: LinkProfile = LAN,
        *,
        named: bool = False,
        desks: tuple[DeviceConnections | None, DeviceConnections | None] = (None, None),
    ) -> None:
        self.now = 0.0
        caller = TealeConnection(True, configured=named)
        self.dialler = PeerEnd(TealePeerSession(dialler, caller, manners, desks[0]))
        callee = TealeConnection(False)
        self.acceptor = PeerEnd(TealePeerSession(acceptor, callee, manners, desks[1]))
        for end in (self.acceptor, self.dialler):
            end.take(end.conversation.tick(0.0))

    def settle(self) -> "PeerPair":
        """Deliver what was sent, and what is answered, until nothing is left."""
        while self.dialler.outbox or self.acceptor.outbox:
            for one, other in (
                (self.dialler, self.acceptor),
                (self.acceptor, self.dialler),
            ):
                batch, one.outbox = one.outbox, []
                if batch:
                    other.take(other.conversation.receive(batch, self.now))
        return self

    def until(self, when: float) -> "PeerPair":
        """Let time pass, with everything that is due in it."""
        self.settle()
        while True:
            ends = (self.dialler, self.acceptor)
            dues = [
                due for end in ends if (due := end.conversation.deadline) is not None
            ]
            if not dues or min(dues) > when:
                break
            self.now = max(self.now, min(dues))
            for end in ends:
                due = end.conversation.deadline
                if due is not None and due <= self.now:
                    end.take(end.conversation.tick(self.now))
            self.settle()
        self.now = when
        return self


class ForeignPeer:
    """One end with a peer that is none of ours: what it says is written by hand."""

    def __init__(
        self,
        own: TealeLocalNode,
        *,
        dialled: bool = False,
        manners: LinkProfile = LAN,
        caller: TealeConnection | None = None,
        desk: DeviceConnections | None = None,
    ) -> None:
        self.now = 0.0
        self.end = PeerEnd(
            TealePeerSession(own, caller or TealeConnection(dialled), manners, desk)
        )
        self.end.take(self.end.conversation.tick(0.0))

    def say(self, message: SentMessage | bytes, after: float = 0.0) -> None:
        """Say something, so much later."""
        self.wait(after)
        data = message if isinstance(message, bytes) else encode(message)
        self.end.take(self.end.conversation.receive([data], self.now))

    def wait(self, seconds: float) -> None:
        """Let time pass, with everything that is due in it."""
        until = self.now + seconds
        conversation = self.end.conversation
        while (due := conversation.deadline) is not None and due <= until:
            self.now = max(self.now, due)
            self.end.take(conversation.tick(self.now))
        self.now = until

    def send(self, word: Event | Command) -> None:
        """Have our end say something."""
        self.end.take(self.end.conversation.send(word, self.now))

    @property
    def said(self) -> list[tuple[str, Any]]:
        """What our end said and was not looked at yet."""
        said, self.end.outbox = self.end.outbox, []
        return [message_of(data) for data in said]


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
    said = hello(passcode, device=device)
    return HelloAck(said.device_info, 1, said.loaded_models, said.cluster_passcode_hash)


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


def met_mac(**given: Any) -> ForeignPeer:
    mac = ForeignPeer(coordinator_side("a", offers=(OFFER,), **given))
    mac.say(hello())
    mac.wait(0.2)
    mac.say(heartbeat())
    _ = mac.said
    mac.end.heard.clear()
    return mac


def encoded(message: InferenceChunk) -> bytes:
    payload = msgspec.json.encode(message).decode()
    return f'{{"inferenceChunk":{{"_0":{payload}}}}}'.encode()


def submitted_request(mac: ForeignPeer, run: RunJob = RUN) -> str:
    """Give the Mac a job; return the request's id."""
    mac.send(run)
    ((kind, payload),) = mac.said
    assert kind == "inferenceRequest"
    request_id = payload["requestID"]
    assert isinstance(request_id, str)
    return request_id
