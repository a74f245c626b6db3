"""Connections with several peers, as they are without a wire format, and who is there.

What is said goes over the link as its number in a list of all that was said.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from runtime.hubs import Coordinator, moment
from runtime.wires import MemoryLink
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Piece
from shoal.domain.sharing import ModelAnswer, ModelQuery
from shoal.domain.vocabulary import (
    CancelJob,
    Command,
    Completed,
    Conditioned,
    Dismiss,
    Draining,
    Event,
    Failed,
    GiveBlob,
    Offered,
    Progress,
    PushCalls,
    RecallCalls,
    Rejected,
    Reported,
    RunJob,
)
from shoal.domain.work import Chat, Feature
from shoal.domain.worker import CHATS, Offer
from shoal.protocols.crowd import From, Gone, Met, To
from shoal.protocols.session import Batch, Data, Output, Send
from shoal.runtime.clock import LoopClock
from shoal.runtime.crowd import Crowds
from shoal.runtime.door import Door, token_book
from shoal.runtime.driver import End
from shoal.runtime.guests import Share
from shoal.runtime.neighbours import HOUSE, House
from shoal.store.memory_keys import MemoryKeys

SAYABLE: frozenset[type] = frozenset(
    {
        *(RunJob, CancelJob, Dismiss, Progress, Completed, Rejected, Failed),
        *(Offered, Conditioned, Draining, Reported, ModelQuery, ModelAnswer),
        *(PushCalls, RecallCalls, GiveBlob),
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
    return Offer(CHATS, names, slots, features, neighbour=neighbour)


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

    def hear(self, said: Any) -> From:
        if isinstance(said, Exception):
            raise said
        assert isinstance(said, From)
        return said

    def issue(self, message: To, now: float) -> Sequence[Output]:
        assert type(message.word) in self.accepts, "what its wire cannot express"
        self.words.append(message)
        number, word = str(len(self.words) - 1), message.word
        # As long as it would be on a wire, about: blanks around a number mean nothing.
        size = len(str(word.pieces)) if isinstance(word, Progress) else 0
        return (Send(number.ljust(size)),)

    def tick(self, now: float) -> Sequence[Any]:
        opening, self.opening = self.opening, ()
        return opening


@dataclass
class Line:
    """A connection of which the test is the other end."""

    serving: "asyncio.Task[End]"
    words: list[Any]
    link: MemoryLink = field(default_factory=MemoryLink)

    def says(self, peer: str, *words: Met | Gone | Event | Command) -> None:
        """Let a peer say something."""
        for word in words:
            self.words.append(From(peer, word))
            self.link.arrive(str(len(self.words) - 1))

    def breaks(self, error: Exception) -> None:
        """Let the session run into a bug."""
        self.words.append(error)
        self.link.arrive(str(len(self.words) - 1))

    @property
    def told(self) -> list[To]:
        """What was said to the peers, as far as they have read it."""
        return [self.words[int(data)] for data in self.link.sent]

    def heard(self, peer: str, kind: type[W]) -> list[W]:
        """Return what of one kind a peer was told."""
        words = [said.word for said in self.told if said.peer == peer]
        return [word for word in words if isinstance(word, kind)]

    def writes(self, peer: str, *pieces: Piece, run: int = -1) -> None:
        """Let a peer write pieces of the answer to a job that it was given."""
        job = self.heard(peer, RunJob)[run]
        for piece in pieces:
            self.says(peer, Progress(job.job_id, job.lease, [piece]))

    def completes(self, peer: str, run: int = -1) -> None:
        job = self.heard(peer, RunJob)[run]
        self.says(peer, Completed(job.job_id, job.lease))

    async def end(self) -> End:
        self.link.cut()
        end = await self.serving
        await moment()
        return end


@dataclass
class Place:
    """A coordinator with its crowds."""

    its: Coordinator
    crowds: Crowds
    door: Door
    keys: MemoryKeys

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
    house: House = HOUSE,
    share: Share | None = None,
    keys: MemoryKeys | None = None,
) -> Place:
    """Let a coordinator serve crowds."""
    keys = keys or MemoryKeys()
    clock = LoopClock(asyncio.get_running_loop().time)
    door = Door(await token_book(keys), keys, clock)
    return Place(its, Crowds(its.hub, clock, door, house, share), door, keys)


def asks(number: str = "theirs", model: str = "m", continues: str = "") -> RunJob:
    """Return what a peer asks for."""
    return RunJob(JobId(number), LeaseNumber(1), chat(model), continues)


# Two coordinators that are each other's peers.


class _HalfSession(PlayedSession):
    """Hears what is said at the other end as the words of its only peer."""

    def hear(self, said: Any) -> From:
        assert isinstance(said, To)
        return From("1", said.word)


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
                _HalfSession(words, [From("1", Met(name, cancels=True, asks=True))]),
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
