"""Both ends of one connection on which a worker answers chats, without a network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from typing import TypeAlias
from urllib.parse import quote, urlsplit

from protocols.contexts import protocol_context, require_token
from protocols.session_pair import Pair, ReceivedMessage
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Privacy
from shoal.domain.vocabulary import (
    CancelJob,
    Command,
    Dismiss,
    Event,
    Joined,
    OffersChanged,
    RunJob,
    WakeMachine,
)
from shoal.domain.work import Chat, Feature, JobKind
from shoal.domain.worker import ServedModel
from shoal.ledger.keys import Signer
from shoal.protocols.seam.admission import NO_JOIN_TOKEN, AdmissionGrant
from shoal.protocols.seam.context import Dialer, WorkerProfile
from shoal.protocols.seam.endpoints import (
    AcceptedConnection,
    Listener,
    UpgradeRequest,
    WebSocketRoute,
)
from shoal.protocols.seam.peer_session import (
    PeerDescribed,
    PeerJoined,
    PeerLeft,
    PeerMessage,
    PeerRefused,
    PeerSession,
    ToPeer,
)
from shoal.protocols.seam.protocol import AnyWireProtocol
from shoal.protocols.seam.session import (
    Batch,
    BoundSession,
    CoordinatorEnd,
    Output,
)

ChatPair: TypeAlias = Pair[Event, Command]

BINDING = b"the only channel"
ANSWER_DELAY = 0.2  # seconds, at most, until an end answers the other's greeting
EPOCH = 1_700_000_000.0  # Unix time at which the clock was at 0
MODEL = ServedModel("family/model:7b", frozenset(JobKind), frozenset(Feature), 4096)
SIGNER = Signer.from_seed(bytes(reversed(range(32))))
MEMBER = WorkerProfile(
    "worker one",
    MODEL,
    3,
    "a token",
    frozenset({"al", "bo, c=d é"}),
    identity=SIGNER,
    random_bytes=bytes,
    privacy=Privacy.PUBLIC,
    price="$0.010",
)
# No word of the other wires restricts a worker, or says what it costs.
PLAIN_MEMBER = replace(MEMBER, only_for=frozenset(), privacy=None, price="")
CHAT = Chat("family/model:7b", ({"role": "user", "content": "hi"},))
RUN = RunJob(JobId("job"), LeaseNumber(2), CHAT)


@dataclass
class AcceptedWorker:
    """What an endpoint answers a worker, and its session without peers."""

    session: CoordinatorEnd
    headers: Mapping[str, str] = field(default_factory=dict)
    grant: AdmissionGrant = NO_JOIN_TOKEN


def streams(protocol: AnyWireProtocol) -> bool:
    """Say whether the wire carries answers piece by piece."""
    _, messages = connect(protocol)
    return any(isinstance(each, Joined) and each.offer.streams for each in messages)


def member_of(protocol: AnyWireProtocol) -> WorkerProfile:
    """Return a worker that can join on a wire."""
    return MEMBER if protocol.preferred else PLAIN_MEMBER


def connect(
    protocol: AnyWireProtocol, member: WorkerProfile | None = None, now: float = 0.0
) -> tuple[ChatPair, list[ReceivedMessage]]:
    """Let a worker join; return both ends and what the coordinator received."""
    member = member or member_of(protocol)
    dialer, accepted = _connect(protocol, member, now)
    pair = tied(accepted, dialer, BINDING if protocol.encrypts else b"")
    pair.begin(now)
    pair.tick(now + ANSWER_DELAY)
    return pair, [*pair.events]


def tied(accepted: AcceptedWorker, dialer: Dialer, binding: bytes = b"") -> ChatPair:
    """Return both ends of a connection that is not open yet."""
    worker = dialer.start_session(accepted.headers)
    return Pair(accepted.session, worker, dialer, unaddressed, binding)


def unaddressed(command: Command) -> Command:
    """Return a command for the only worker of a connection."""
    return command


def _connect(
    protocol: AnyWireProtocol, member: WorkerProfile, now: float
) -> tuple[Dialer, AcceptedWorker]:
    """Connect a worker, on a port of the wire's own if it has one."""
    context = protocol_context(EPOCH, require_token(member.token))
    config = protocol.config()
    if "open" in {each.name for each in fields(config)}:
        config = replace(config, open=True)
    endpoints = protocol.endpoints(config, context)
    for endpoint in endpoints:
        if isinstance(endpoint, Listener):
            dialer = protocol.dial("tcp://127.0.0.1:8000", member)
            session = endpoint.accept("127.0.0.1", now)
            return dialer, AcceptedWorker(OneWorker(session))
    route = endpoints[0]
    assert isinstance(route, WebSocketRoute)
    dialer = protocol.dial(f"{min(protocol.schemes)}://127.0.0.1:8000", member)
    url = urlsplit(dialer.url)
    headers = {name.lower(): value for name, value in dialer.headers.items()}
    request = UpgradeRequest(url.path, url.query, headers)
    assert route.claims(request)
    return dialer, as_worker(route.accept(request, now))


class OneWorker:
    """A session with peers, as its only one sees it: a worker with one model."""

    def __init__(self, session: PeerSession) -> None:
        self._session = session
        self._peer = ""
        self._name = ""

    def bind(self, binding: bytes) -> None:
        assert isinstance(self._session, BoundSession)
        self._session.bind(binding)

    @property
    def accepts(self) -> frozenset[type]:
        return self._session.accepts & {RunJob, CancelJob, Dismiss}

    @property
    def deadline(self) -> float | None:
        return self._session.deadline

    def receive(self, batch: Batch, now: float) -> Sequence[Event | Output]:
        return self._decode_all(self._session.receive(batch, now))

    def send(self, message: Command, now: float) -> Sequence[Output]:
        return self._session.send(ToPeer(self._peer, message), now)

    def tick(self, now: float) -> Sequence[Event | Output]:
        return self._decode_all(self._session.tick(now))

    def _decode_all(
        self, outputs: Sequence[PeerMessage | Output]
    ) -> tuple[Event | Output, ...]:
        messages: list[Event | Output] = []
        for output in outputs:
            if not isinstance(output, PeerMessage):
                messages.append(output)
                continue
            match output.message:
                case PeerJoined(name=name):
                    self._peer, self._name = output.peer, quote(name, safe=" ")
                case OffersChanged(offers):
                    # None while it refuses work.
                    messages += [
                        Joined(f"{self._name}/{quote(model, safe='')}", offer)
                        for offer in offers
                        for model in offer.models
                    ]
                case PeerDescribed():
                    pass
                case (
                    PeerRefused()
                    | PeerLeft()
                    | RunJob()
                    | CancelJob()
                    | Dismiss()
                    | WakeMachine()
                ):
                    raise AssertionError("a worker asks for nothing")
                case event:
                    messages.append(event)
        return tuple(messages)


def as_worker(accepted: AcceptedConnection) -> AcceptedWorker:
    """Return a connection on which there is one worker as if it had no peers."""
    session = OneWorker(accepted.session)
    return AcceptedWorker(session, accepted.headers, accepted.grant)


def other_profile(name: str, model: str) -> WorkerProfile:
    """Return another member, with a key of its own."""
    signer = Signer.from_seed(sha256(f"{name} {model}".encode()).digest())
    return replace(
        PLAIN_MEMBER,
        name=name,
        model=ServedModel(model),
        identity=signer,
    )
