"""Both ends of one connection, tied together without a network."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TypeVar
from urllib.parse import urlsplit

from protocols.settings import setting
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import Command, Event, Joined, RunJob
from shoal.domain.work import Chat, Feature, Kind
from shoal.domain.worker import Model
from shoal.ledger.keys import Signer
from shoal.protocols import Protocol
from shoal.protocols.session import (
    Close,
    CoordinatorSession,
    Data,
    Dialer,
    Hello,
    Member,
    Notice,
    Output,
    Send,
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
            heard += meant(self.worker.receive([data], now))
        return heard

    def to_coordinator(
        self, outputs: Sequence[Output | Command], now: float
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
    (endpoint,) = protocol.endpoints(protocol.config(), setting(START))
    dialer = protocol.dial(f"{min(protocol.schemes)}://127.0.0.1:8000", member)
    url = urlsplit(dialer.url)
    headers = {name.lower(): value for name, value in dialer.headers.items()}
    hello = Hello(url.path, url.query, headers)
    assert endpoint.claims(hello)
    accepted = endpoint.accept(hello, now)
    pair = Pair(accepted.session, dialer.connected(accepted.headers), dialer)
    opening = pair.coordinator.tick(now)
    heard: list[Event] = meant(opening)
    assert not pair.to_worker(opening, now)
    heard += pair.to_coordinator(pair.worker.tick(now), now)
    return pair, heard


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


def meant(outputs: Sequence[M | Output]) -> list[M]:
    """Return the commands or events among the outputs of a session."""
    return [o for o in outputs if not isinstance(o, Send | Close | Notice)]
