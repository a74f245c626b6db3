"""Both ends of one connection, tied together without a network."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TypeVar
from urllib.parse import quote, urlsplit

from protocols.settings import setting
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    CancelJob,
    Command,
    Dismiss,
    Event,
    Joined,
    Offered,
    RunJob,
)
from shoal.domain.work import Chat, Feature, Kind
from shoal.domain.worker import Model
from shoal.ledger.keys import Signer
from shoal.protocols import Protocol
from shoal.protocols.crowd import CrowdSession, From, Gone, Listener, Met, To
from shoal.protocols.session import (
    Accepted,
    Batch,
    Bulk,
    Close,
    CoordinatorSession,
    Data,
    Dialer,
    Hello,
    Member,
    Notice,
    Output,
    Send,
    WebSocketRoute,
    Welcome,
    WorkerSession,
)

M = TypeVar("M")

START = 1_700_000_000_000
MODEL = Model("family/model:7b", frozenset(Kind), frozenset(Feature), 4096)
SIGNER = Signer.from_seed(bytes(reversed(range(32))))
MEMBER = Member(
    "worker one",
    MODEL,
    3,
    "a token",
    frozenset({"al", "bo, c=d é"}),
    identity=SIGNER,
    draw=bytes,
)
CHAT = Chat("family/model:7b", ({"role": "user", "content": "hi"},))
RUN = RunJob(JobId("job"), LeaseNumber(2), CHAT)


@dataclass
class Pair:
    """A coordinator's and a worker's session; what is sent by one reaches the other."""

    coordinator: CoordinatorSession
    worker: WorkerSession
    dialer: Dialer
    said: list[Data] = field(default_factory=list)  # all that the worker sent
    told: list[Data] = field(default_factory=list)  # all that the coordinator sent
    overheard: list[Event] = field(default_factory=list)  # what came of answers

    def issue_command(self, command: Command, now: float = 0.0) -> list[Command]:
        """Let the coordinator issue ``command``; return what the worker hears."""
        return self.to_worker(self.coordinator.issue(command, now), now)

    def issue_event(self, event: Event, now: float = 0.0) -> list[Event]:
        """Let the worker issue ``event``; return what the coordinator hears."""
        return self.to_coordinator(self.worker.issue(event, now), now)

    def to_worker(self, outputs: Sequence[Output | Event], now: float) -> list[Command]:
        heard: list[Command] = []
        for data in sent(outputs):
            self.told.append(data)
            answers = self.worker.receive([data], now)
            heard += meant(answers)
            self.overheard += self.to_coordinator(answers, now)
        return heard

    def to_coordinator(
        self, outputs: Sequence[Output | Command | Welcome], now: float
    ) -> list[Event]:
        heard: list[Event] = []
        for data in sent(outputs):
            self.said.append(data)
            answers = self.coordinator.receive([data], now)
            heard += meant(answers)
            assert not self.to_worker(answers, now), "an answer that is a new command"
        return heard


def streams(protocol: Protocol) -> bool:
    """Say whether the wire carries answers piece by piece."""
    _, heard = connect(protocol)
    return any(isinstance(each, Joined) and each.offer.streams for each in heard)


def connect(
    protocol: Protocol, member: Member = MEMBER, now: float = 0.0
) -> tuple[Pair, list[Event]]:
    """Let a worker join; return both ends and what the coordinator heard."""
    dialer, accepted = _met(protocol, member, now)
    pair = Pair(accepted.session, dialer.connected(accepted.headers), dialer)
    opening = pair.coordinator.tick(now)
    heard: list[Event] = meant(opening)
    assert not pair.to_worker(opening, now)
    heard += pair.to_coordinator(pair.worker.tick(now), now)
    heard += pair.overheard
    pair.overheard.clear()
    return pair, heard


def _met(protocol: Protocol, member: Member, now: float) -> tuple[Dialer, Accepted]:
    """Connect a worker, on a port of the wire's own if it has one."""
    endpoints = protocol.endpoints(protocol.config(), setting(START))
    for endpoint in endpoints:
        if isinstance(endpoint, Listener):
            dialer = protocol.dial("tcp://127.0.0.1:8000", member)
            session = endpoint.accept("127.0.0.1", now)
            return dialer, Accepted(OneWorker(session))
    (route,) = endpoints
    assert isinstance(route, WebSocketRoute)
    dialer = protocol.dial(f"{min(protocol.schemes)}://127.0.0.1:8000", member)
    url = urlsplit(dialer.url)
    headers = {name.lower(): value for name, value in dialer.headers.items()}
    hello = Hello(url.path, url.query, headers)
    assert route.claims(hello)
    return dialer, route.accept(hello, now)


class OneWorker:
    """A connection on which there could be many peers, with one that has one model."""

    accepts: frozenset[type] = frozenset({RunJob, CancelJob, Dismiss})

    def __init__(self, crowd: CrowdSession) -> None:
        self._crowd = crowd
        self._peer = ""
        self._name = ""

    @property
    def deadline(self) -> float | None:
        return self._crowd.deadline

    def receive(self, batch: Batch, now: float) -> Sequence[Event | Output]:
        return self._heard(self._crowd.receive(batch, now))

    def issue(self, message: Command, now: float) -> Sequence[Output]:
        return self._crowd.issue(To(self._peer, message), now)

    def tick(self, now: float) -> Sequence[Event | Output]:
        return self._heard(self._crowd.tick(now))

    def _heard(self, outputs: Sequence[From | Output]) -> list[Event | Output]:
        heard: list[Event | Output] = []
        for output in outputs:
            if not isinstance(output, From):
                heard.append(output)
                continue
            match output.word:
                case Met(name=name):
                    self._peer, self._name = output.peer, quote(name, safe=" ")
                case Offered(offers):
                    (offer,) = offers
                    (model,) = offer.models
                    heard.append(Joined(f"{self._name}/{quote(model, safe='')}", offer))
                case Gone() | RunJob() | CancelJob() | Dismiss():
                    raise AssertionError("a worker asks for nothing")
                case event:
                    heard.append(event)
        return heard


def somebody(name: str, model: str) -> Member:
    """Return another member, with a key of its own."""
    signer = Signer.from_seed(sha256(f"{name} {model}".encode()).digest())
    return replace(
        MEMBER,
        name=name,
        model=Model(model),
        identity=signer,
    )


def sent(outputs: Sequence[object]) -> list[Data]:
    """Return what goes to the peer."""
    return [output.data for output in outputs if isinstance(output, Send)]


def meant(outputs: Sequence[M | Welcome | Output]) -> list[M]:
    """Return the commands or events among the outputs of a session."""
    beside = (Send, Bulk, Close, Notice, Welcome)
    return [o for o in outputs if not isinstance(o, beside)]
