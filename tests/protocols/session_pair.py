"""Both ends of one connection, tied together without a network and without a wire.

``protocols.pairs`` connects workers that answer chats, ``protocols.calling`` workers
whose functions are called.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from shoal.domain.vocabulary import Command, Event
from shoal.protocols.seam.context import Dialer
from shoal.protocols.seam.peer_session import (
    PeerDescribed,
    PeerJoined,
    PeerLeft,
    PeerMessage,
    PeerRefused,
)
from shoal.protocols.seam.session import (
    Admitted,
    BoundSession,
    Bulk,
    Close,
    Data,
    Notice,
    Output,
    Send,
    Session,
    WorkerEnd,
)

In = TypeVar("In")
Out = TypeVar("Out")
M = TypeVar("M")

ReceivedMessage: TypeAlias = (
    PeerJoined | PeerRefused | PeerDescribed | PeerLeft | Event | Command
)


def one_piece(data: bytes) -> Iterable[bytes]:
    return (data,)


@dataclass
class Pair(Generic[In, Out]):
    """A coordinator's and a worker's session; what one sends reaches the other."""

    coordinator: Session[In, Out]
    worker: WorkerEnd
    dialer: Dialer
    addressed: Callable[[Command], Out]  # a command as the coordinator's end sends it
    binding: bytes = b""  # of the encrypted connection; empty if it is plain
    cut: Callable[[bytes], Iterable[bytes]] = one_piece  # how binary data arrives
    streams: bool = True  # on a byte stream, whose data may be cut anywhere
    worker_sent: list[Data] = field(default_factory=list)
    coordinator_sent: list[Data] = field(default_factory=list)
    events: list[ReceivedMessage] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)  # why either closed

    def begin(self, now: float = 0.0) -> None:
        """Open the connection."""
        self.open()
        outputs = self.coordinator.tick(now)
        self.deliver(outputs, self.worker.tick(now), now)

    def open(self) -> None:
        """Tell both ends what protects the connection."""
        for session in (self.coordinator, self.worker):
            if self.binding and isinstance(session, BoundSession):
                session.bind(self.binding)

    def command(self, message: Command, now: float = 0.0) -> list[Command]:
        """Let the coordinator issue a command; return what the worker receives."""
        before = len(self.commands)
        self.deliver(self.coordinator.send(self.addressed(message), now), (), now)
        return self.commands[before:]

    def event(self, message: Event, now: float = 0.0) -> list[ReceivedMessage]:
        """Let the worker issue an event; return what the coordinator receives."""
        before = len(self.events)
        self.deliver((), self.worker.send(message, now), now)
        return self.events[before:]

    def tick(self, now: float) -> None:
        """Let each end that is due act on the time."""
        if self.coordinator.deadline is not None and self.coordinator.deadline <= now:
            self.deliver(self.coordinator.tick(now), (), now)
        if self.worker.deadline is not None and self.worker.deadline <= now:
            self.deliver((), self.worker.tick(now), now)

    def deliver(
        self,
        from_coordinator: Sequence[In | Output],
        from_worker: Sequence[Command | Admitted | Output],
        now: float,
    ) -> None:
        """Carry what both sent to the other, until neither answers any more."""
        while from_coordinator or from_worker:
            self.events += map(_without_sender, messages_in(from_coordinator))
            self.commands += messages_in(from_worker)
            self.ends += [
                each.reason
                for each in (*from_coordinator, *from_worker)
                if isinstance(each, Close)
            ]
            to_worker = sent(from_coordinator, joined=self.streams)
            to_coordinator = sent(from_worker, joined=self.streams)
            self.coordinator_sent += to_worker
            self.worker_sent += to_coordinator
            from_coordinator = [
                each
                for piece in self._pieces(to_coordinator)
                for each in self.coordinator.receive([piece], now)
            ]
            from_worker = [
                each
                for piece in self._pieces(to_worker)
                for each in self.worker.receive([piece], now)
            ]

    def _pieces(self, messages: Iterable[Data]) -> Iterable[Data]:
        for data in messages:
            if isinstance(data, bytes) and self.streams:
                yield from self.cut(data)
            else:
                yield data


def messages_in(outputs: Sequence[M | Admitted | Output]) -> list[M]:
    """Return the commands or events among the outputs of a session."""
    not_messages = (Send, Bulk, Close, Notice, Admitted)
    return [each for each in outputs if not isinstance(each, not_messages)]


def sent(outputs: Sequence[object], *, joined: bool = True) -> list[Data]:
    """Return what goes to the other end, each message as one piece.

    Not ``joined``, each part of a large one is a message of its own.
    """
    data: list[Data] = []
    for output in outputs:
        if isinstance(output, Send):
            data.append(output.data)
        elif isinstance(output, Bulk):
            parts = [bytes(part) for part in output.parts if part]
            assert output.size in (None, sum(map(len, parts)))
            data += [b"".join(parts)] if joined else parts
    return data


def binary(messages: Iterable[Data]) -> list[bytes]:
    """Return messages of a wire on which all are binary."""
    data: list[bytes] = []
    for each in messages:
        assert isinstance(each, bytes)
        data.append(each)
    return data


def _without_sender(message: object) -> ReceivedMessage:
    if isinstance(message, PeerMessage):
        return message.message
    return message  # type: ignore[return-value]  # a coordinator receives nothing else
