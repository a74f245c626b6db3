"""Both ends of one connection by which functions are called, without a network."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec

from protocols.contexts import protocol_context, require_token
from protocols.pairs import MODEL
from shoal.domain.credentials import digest_of
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import Command, Event, OffersChanged, RunJob
from shoal.domain.work import Call, CallStream, Feature, JobKind, Task
from shoal.domain.worker import Offer
from shoal.ledger.keys import Signer
from shoal.protocols.seam.context import Dialer, ProtocolContext, WorkerProfile
from shoal.protocols.seam.endpoints import Listener
from shoal.protocols.seam.framing import FramedSession
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
from shoal.protocols.seam.session import Admitted, Bulk, Close, Notice, Send, WorkerEnd

ReceivedMessage: TypeAlias = (
    PeerJoined | PeerRefused | PeerDescribed | PeerLeft | Event | Command
)

TOKEN = "a token of the fleet"
SIGNER = Signer.from_seed(bytes(reversed(range(32))))
OFFER = Offer(
    kinds=frozenset({JobKind.TASK, JobKind.CALL, JobKind.CALL_STREAM}),
    slots=3,
    features=frozenset({Feature.VALUES, Feature.CODE}),
    tasks=frozenset({"demo.add", "demo.échó"}),
    streams=False,
    public_key=SIGNER.public_key.hex(),
    proven=True,
    receipts=False,
    pythons=frozenset({"3.12"}),
)


def counted_bytes(owner: str) -> Callable[[int], bytes]:
    """Return what draws bytes that are different each time, and the same each run."""
    count = 0

    def random_bytes(size: int) -> bytes:
        nonlocal count
        count += 1
        return (digest_of(f"{owner} {count}") * (size // 32 + 1))[:size]

    return random_bytes


MEMBER = WorkerProfile(
    "worker-one",
    MODEL,
    3,
    TOKEN,
    identity=SIGNER,
    offers=(OFFER,),
    random_bytes=counted_bytes("worker"),
)


def fleet_context(token: str = TOKEN) -> ProtocolContext:
    """Return a context in which workers present a token; empty: none."""
    return replace(
        protocol_context(admission=require_token(token)),
        token=token,
        name="coordinator",
        random_bytes=counted_bytes("coordinator"),
    )


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


CALL = Call("demo.add", packed([1, 41]), packed({}), 5.0)
STREAM = CallStream("demo.add", 5.0, python="3.12")
TASK = Task("demo.add", {"task_type": "demo.add", "args": [1], "kwargs": {"y": 2}})
RUN = RunJob(JobId("job"), LeaseNumber(2), CALL)


def one_piece(data: bytes) -> Iterable[bytes]:
    return (data,)


def in_pieces(sizes: Sequence[int], data: bytes) -> Iterable[bytes]:
    """Cut data into pieces of these sizes, again and again."""
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        yield data[at : at + size]
        at, turn = at + size, turn + 1


@dataclass
class Pair:
    """A coordinator's and a worker's session; what one sends reaches the other."""

    coordinator: PeerSession
    worker: WorkerEnd
    dialer: Dialer
    cut: Callable[[bytes], Iterable[bytes]] = one_piece
    certificate: bytes = b"the fingerprint of a certificate"
    worker_sent: list[bytes] = field(default_factory=list)  # by the worker
    coordinator_sent: list[bytes] = field(default_factory=list)  # by the coordinator
    events: list[ReceivedMessage] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)  # why either closed

    def begin(self, now: float = 0.0) -> None:
        """Open the connection."""
        self.open()
        outputs = self.coordinator.tick(now)
        self.deliver(outputs, self.worker.tick(now), now)

    def open(self) -> None:
        """Let both know what protects the connection."""
        for session in (self.coordinator, self.worker):
            if isinstance(session, FramedSession):
                session.on_open(self.certificate)

    def command(self, message: Command, now: float = 0.0) -> list[Command]:
        """Let the coordinator issue a command; return what the worker hears."""
        before = len(self.commands)
        self.deliver(self.coordinator.send(ToPeer("", message), now), (), now)
        return self.commands[before:]

    def event(self, message: Event, now: float = 0.0) -> list[ReceivedMessage]:
        """Let the worker issue an event; return what the coordinator hears."""
        before = len(self.events)
        self.deliver((), self.worker.send(message, now), now)
        return self.events[before:]

    def tick(self, now: float) -> None:
        """Let both act on the time, if they are due."""
        for session, by_worker in ((self.coordinator, False), (self.worker, True)):
            if session.deadline is not None and session.deadline <= now:
                outputs = session.tick(now)
                from_coordinator = () if by_worker else outputs
                self.deliver(from_coordinator, outputs if by_worker else (), now)

    def deliver(
        self,
        from_coordinator: Sequence[object],
        from_worker: Sequence[object],
        now: float,
    ) -> None:
        """Carry what both sent to the other, until nothing more is answered."""
        while from_coordinator or from_worker:
            self.events += [
                each.message
                for each in from_coordinator
                if isinstance(each, PeerMessage)
            ]
            self.commands += [each for each in from_worker if is_command(each)]  # type: ignore[misc]  # just looked at
            self.ends += [
                each.reason
                for each in (*from_coordinator, *from_worker)
                if isinstance(each, Close)
            ]
            to_worker, to_coordinator = sent(from_coordinator), sent(from_worker)
            self.coordinator_sent += to_worker
            self.worker_sent += to_coordinator
            from_coordinator = [
                each
                for data in to_coordinator
                for piece in self.cut(data)
                for each in self.coordinator.receive([piece], now)
            ]
            from_worker = [
                each
                for data in to_worker
                for piece in self.cut(data)
                for each in self.worker.receive([piece], now)
            ]


def sent(outputs: Sequence[object]) -> list[bytes]:
    """Return what goes to the other end, each message as one piece."""
    data: list[bytes] = []
    for output in outputs:
        if isinstance(output, Send):
            assert isinstance(output.data, bytes)
            data.append(output.data)
        elif isinstance(output, Bulk):
            parts = b"".join(bytes(part) for part in output.parts)
            assert output.size in (None, len(parts))
            data.append(parts)
    return data


def is_command(output: object) -> bool:
    return not isinstance(output, Admitted | Send | Bulk | Close | Notice)


def connect(
    protocol: AnyWireProtocol,
    member: WorkerProfile = MEMBER,
    context: ProtocolContext | None = None,
    cut: Callable[[bytes], Iterable[bytes]] = one_piece,
    config: object = None,
) -> Pair:
    """Let a worker join that offers what the member does; return both ends."""
    pair = unconnected(protocol, member, context or fleet_context(), cut, config)
    pair.begin()
    pair.event(OffersChanged(member.offers))
    return pair


def unconnected(
    protocol: AnyWireProtocol,
    member: WorkerProfile,
    protocol_context: ProtocolContext,
    cut: Callable[[bytes], Iterable[bytes]] = one_piece,
    config: object = None,
) -> Pair:
    """Return both ends of a connection that is not open yet."""
    endpoints = protocol.endpoints(config or protocol.config(), protocol_context)
    listeners = {
        each.advertised_label: each for each in endpoints if isinstance(each, Listener)
    }
    ports = {label: 8000 + n for n, label in enumerate(listeners)}
    assert protocol.address is not None
    direct = protocol.address("127.0.0.1", ports)
    dialer = protocol.dial("http://127.0.0.1:4010", replace(member, direct_url=direct))
    label = next(each for each, port in ports.items() if f":{port}" in dialer.url)
    session = listeners[label].accept("127.0.0.1", 0.0)
    return Pair(session, dialer.start_session({}), dialer, cut)


def start_job(pair: Pair, run: RunJob = RUN) -> RunJob:
    """Give the worker a job; return it as the worker has it."""
    (received,) = pair.command(run)
    assert isinstance(received, RunJob)
    return received
