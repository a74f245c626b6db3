"""Connections with several peers, as they are without a wire format, and who is there.

What is said goes over the link as its number in a list of all that was said.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coordinator.hubs import Coordinator, moment
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
from shoal.store.sqlite.keys import SqliteKeys
from shoal.transports.clock import LoopClock
from shoal.transports.driver import ConnectionEnd
from transports.memory_links import MemoryLink

SAYABLE: frozenset[type] = frozenset(
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
class PlayedSession:
    """Hears and says words by their numbers in ``words``."""

    words: list[Any]
    opening: Sequence[Any] = ()
    deadline: float | None = None
    accepts: frozenset[type] = SAYABLE
    opened: bool = False

    def receive(self, batch: Batch, now: float) -> Sequence[Any]:
        return [self.hear(self.words[int(data)]) for data in batch]

    def hear(self, said: Any) -> PeerMessage:
        if isinstance(said, Exception):
            raise said
        assert isinstance(said, PeerMessage)
        return said

    def send(self, message: ToPeer, now: float) -> Sequence[Output]:
        assert type(message.message) in self.accepts, "what its wire cannot express"
        self.words.append(message)
        number, word = str(len(self.words) - 1), message.message
        # As long as it would be on a wire, about: blanks around a number mean nothing.
        size = len(str(word.pieces)) if isinstance(word, AnswerChunk) else 0
        return (Send(number.ljust(size)),)

    def tick(self, now: float) -> Sequence[Any]:
        opening, self.opening = self.opening, ()
        return opening


@dataclass
class Line:
    """A connection of which the test is the other end."""

    serving: "asyncio.Task[ConnectionEnd]"
    words: list[Any]
    link: MemoryLink = field(default_factory=MemoryLink)

    def says(self, peer: str, *words: PeerJoined | PeerLeft | Event | Command) -> None:
        """Let a peer say something."""
        for word in words:
            self.words.append(PeerMessage(peer, word))
            self.link.arrive(str(len(self.words) - 1))

    def breaks(self, error: Exception) -> None:
        """Let the session run into a bug."""
        self.words.append(error)
        self.link.arrive(str(len(self.words) - 1))

    @property
    def told(self) -> list[ToPeer]:
        """What was said to the peers, as far as they have read it."""
        return [self.words[int(data)] for data in self.link.sent]

    def heard(self, peer: str, kind: type[W]) -> list[W]:
        """Return what of one kind a peer was told."""
        words = [said.message for said in self.told if said.peer == peer]
        return [word for word in words if isinstance(word, kind)]

    def writes(self, peer: str, *pieces: AnswerPiece, run: int = -1) -> None:
        """Let a peer write pieces of the answer to a job that it was given."""
        job = self.heard(peer, RunJob)[run]
        for piece in pieces:
            self.says(peer, AnswerChunk(job.job_id, job.lease, [piece]))

    def completes(self, peer: str, run: int = -1) -> None:
        job = self.heard(peer, RunJob)[run]
        self.says(peer, Completed(job.job_id, job.lease))

    async def end(self) -> ConnectionEnd:
        self.link.cut()
        end = await self.serving
        await moment()
        return end


@dataclass
class Place:
    """A coordinator with its crowds."""

    its: Coordinator
    crowds: PeerConnections
    admission: WorkerAdmission
    keys: SqliteKeys

    async def line(self, wire: str = "wire") -> Line:
        """Open a connection."""
        words: list[Any] = []
        link = MemoryLink()
        session = PlayedSession(words)
        serving = asyncio.create_task(self.crowds.serve(wire, session, link))
        await moment()
        return Line(serving, words, link)

    @property
    def workers(self) -> list[str]:
        return sorted(self.its.hub.pool.workers)


async def place(
    its: Coordinator,
    house: PeerJobPolicy = DEFAULT_POLICY,
    share: ModelSharing | None = None,
    keys: SqliteKeys | None = None,
) -> Place:
    """Let a coordinator serve crowds."""
    keys = keys or its.store.keys
    clock = LoopClock(asyncio.get_running_loop().time)
    admission = WorkerAdmission(await load_join_tokens(keys), keys, clock)
    return Place(
        its, PeerConnections(its.hub, clock, admission, house, share), admission, keys
    )


def asks(number: str = "theirs", model: str = "m", continues: str = "") -> RunJob:
    """Return what a peer asks for."""
    return RunJob(JobId(number), LeaseNumber(1), chat(model), continues)


# Two coordinators that are each other's peers.


class _HalfSession(PlayedSession):
    """Hears what is said at the other end as the words of its only peer."""

    def hear(self, said: Any) -> PeerMessage:
        assert isinstance(said, ToPeer)
        return PeerMessage("1", said.message)


class _HalfLink(MemoryLink):
    """What is sent arrives at the other end."""

    other: "_HalfLink"

    async def send(self, data: Data) -> None:
        self.other.arrive(data)

    async def close(self, code: int, text: str) -> None:
        self.other.cut()


@asynccontextmanager
async def tied(one: Place, other: Place) -> AsyncIterator[None]:
    """Make two coordinators peers of each other for the length of the block."""
    words: list[Any] = []
    links = (_HalfLink(), _HalfLink())
    links[0].other, links[1].other = links[1], links[0]
    names = ("other", "one")
    serving = [
        asyncio.create_task(
            place.crowds.serve(
                "wire",
                _HalfSession(
                    words,
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
    await moment()
    try:
        yield
    finally:
        for link in links:
            link.cut()
        await asyncio.gather(*serving)
