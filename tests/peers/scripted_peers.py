"""Connections with several scripted peers, without a wire format.

A message crosses the link as its index in a list of all messages.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coordinator.hubs import Coordinator, run_pending
from shoal.coordinator.admission import WorkerAdmission, load_join_tokens
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.model_messages import ModelAnswer, ModelQuery
from shoal.domain.outcome import AnswerPiece
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelCalls,
    CancelJob,
    Command,
    Completed,
    Dismiss,
    Draining,
    Event,
    Failed,
    HealthReported,
    LoadChanged,
    OffersChanged,
    PushCalls,
    Rejected,
    RunJob,
    SendBlob,
)
from shoal.domain.work import Chat, Feature
from shoal.domain.worker import CHAT_ONLY, Offer
from shoal.peers.connections import PeerConnections
from shoal.peers.inbound_jobs import DEFAULT_POLICY, PeerJobPolicy
from shoal.peers.remote_peer import ModelSharing
from shoal.protocols.seam.peer_session import PeerJoined, PeerLeft, PeerMessage, ToPeer
from shoal.protocols.seam.session import Batch, Data, Output, Send
from shoal.store.sql.keys import SqlKeys
from shoal.transports.clock import LoopClock
from shoal.transports.driver import ConnectionEnd
from transports.memory_links import MemoryLink

ACCEPTED: frozenset[type] = frozenset(
    {
        *(RunJob, CancelJob, Dismiss, AnswerChunk, Completed, Rejected, Failed),
        *(
            OffersChanged,
            LoadChanged,
            Draining,
            HealthReported,
            ModelQuery,
            ModelAnswer,
        ),
        *(PushCalls, CancelCalls, SendBlob),
    }
)
W = TypeVar("W")


def offer(
    *models: str,
    slots: int = 1,
    features: frozenset[Feature] = frozenset(),
    neighbour: bool = False,
) -> Offer:
    names = frozenset(models or ("m",))
    return Offer(CHAT_ONLY, names, slots, features, neighbour=neighbour)


def chat(model: str = "m", prompt: str = "hi") -> Chat:
    return Chat(model, ({"role": "user", "content": prompt},))


@dataclass
class ScriptedPeerSession:
    """Decodes and encodes messages as their indexes in ``messages``."""

    messages: list[Any]
    opening: Sequence[Any] = ()
    deadline: float | None = None
    accepts: frozenset[type] = ACCEPTED
    opened: bool = False

    def receive(self, batch: Batch, now: float) -> Sequence[Any]:
        return [self.decode(self.messages[int(data)]) for data in batch]

    def decode(self, message: Any) -> PeerMessage:
        if isinstance(message, Exception):
            raise message
        assert isinstance(message, PeerMessage)
        return message

    def send(self, message: ToPeer, now: float) -> Sequence[Output]:
        assert type(message.message) in self.accepts, "unsupported by the wire"
        self.messages.append(message)
        number, sent = str(len(self.messages) - 1), message.message
        # About as long as on a wire: blanks around a number have no meaning.
        size = len(str(sent.pieces)) if isinstance(sent, AnswerChunk) else 0
        return (Send(number.ljust(size)),)

    def tick(self, now: float) -> Sequence[Any]:
        opening, self.opening = self.opening, ()
        return opening


@dataclass
class ScriptedConnection:
    """A connection whose other end is the test."""

    serving: "asyncio.Task[ConnectionEnd]"
    messages: list[Any]
    link: MemoryLink = field(default_factory=MemoryLink)

    def emit(
        self, peer: str, *messages: PeerJoined | PeerLeft | Event | Command
    ) -> None:
        """Send messages of a peer."""
        for message in messages:
            self.messages.append(PeerMessage(peer, message))
            self.link.deliver(str(len(self.messages) - 1))

    def fail(self, error: Exception) -> None:
        """Raise ``error`` in the session."""
        self.messages.append(error)
        self.link.deliver(str(len(self.messages) - 1))

    @property
    def sent(self) -> list[ToPeer]:
        """The messages to all peers that the link has accepted."""
        return [self.messages[int(data)] for data in self.link.sent]

    def received(self, peer: str, kind: type[W]) -> list[W]:
        """Return the messages of one kind to a peer."""
        messages = [sent.message for sent in self.sent if sent.peer == peer]
        return [message for message in messages if isinstance(message, kind)]

    def write(self, peer: str, *pieces: AnswerPiece, run: int = -1) -> None:
        """Send pieces of a peer's answer to one of its jobs."""
        job = self.received(peer, RunJob)[run]
        for piece in pieces:
            self.emit(peer, AnswerChunk(job.job_id, job.lease, [piece]))

    def complete(self, peer: str, run: int = -1) -> None:
        job = self.received(peer, RunJob)[run]
        self.emit(peer, Completed(job.job_id, job.lease))

    async def end(self) -> ConnectionEnd:
        self.link.cut()
        end = await self.serving
        await run_pending()
        return end


@dataclass
class PeerCoordinator:
    """A coordinator that accepts connections with several peers."""

    coordinator: Coordinator
    connections: PeerConnections
    admission: WorkerAdmission
    keys: SqlKeys

    async def connect(self, wire: str = "wire") -> ScriptedConnection:
        """Open a connection."""
        messages: list[Any] = []
        link = MemoryLink()
        session = ScriptedPeerSession(messages)
        serving = asyncio.create_task(self.connections.serve(wire, session, link))
        await run_pending()
        return ScriptedConnection(serving, messages, link)

    @property
    def workers(self) -> list[str]:
        return sorted(self.coordinator.hub.pool.workers)


async def accept_peers(
    coordinator: Coordinator,
    policy: PeerJobPolicy = DEFAULT_POLICY,
    share: ModelSharing | None = None,
    keys: SqlKeys | None = None,
) -> PeerCoordinator:
    """Let a coordinator accept connections with several peers."""
    keys = keys or coordinator.store.keys
    clock = LoopClock(asyncio.get_running_loop().time)
    admission = WorkerAdmission(await load_join_tokens(keys), keys, clock)
    return PeerCoordinator(
        coordinator,
        PeerConnections(coordinator.hub, clock, admission, policy, share),
        admission,
        keys,
    )


def requested_chat(
    number: str = "theirs", model: str = "m", continues: str = ""
) -> RunJob:
    """Return a job that a peer submits."""
    return RunJob(JobId(number), LeaseNumber(1), chat(model), continues)


# Two coordinators that are each other's peers.


class _PairedSession(ScriptedPeerSession):
    """Receives the messages of the other end as those of its only peer."""

    def decode(self, message: Any) -> PeerMessage:
        assert isinstance(message, ToPeer)
        return PeerMessage("1", message.message)


class _PairedLink(MemoryLink):
    """Delivers sent data to the other end."""

    other: "_PairedLink"

    async def send(self, data: Data) -> None:
        self.other.deliver(data)

    async def close(self, code: int, text: str) -> None:
        self.other.cut()


@asynccontextmanager
async def connected(
    one: PeerCoordinator, other: PeerCoordinator
) -> AsyncIterator[None]:
    """Make two coordinators peers of each other within the block."""
    messages: list[Any] = []
    links = (_PairedLink(), _PairedLink())
    links[0].other, links[1].other = links[1], links[0]
    names = ("other", "one")
    serving = [
        asyncio.create_task(
            place.connections.serve(
                "wire",
                _PairedSession(
                    messages,
                    [
                        PeerMessage(
                            "1", PeerJoined(name, cancels=True, submits_jobs=True)
                        )
                    ],
                ),
                link,
            )
        )
        for place, link, name in zip((one, other), links, names, strict=True)
    ]
    await run_pending()
    try:
        yield
    finally:
        for link in links:
            link.cut()
        await asyncio.gather(*serving)
