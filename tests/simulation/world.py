"""A whole pool in one process: the real hub, drivers, sessions and agents, with links,
engines and faults that are made up, all of it reproducible from one seed."""

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random

from shoal.domain.errors import JobError, ShoalError, Unavailable
from shoal.domain.facts import (
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
)
from shoal.domain.ids import JobId
from shoal.domain.work import Chat, Feature, Limits, Usage, text_of
from shoal.engines.port import Finished, Piece
from shoal.protocols import Protocol
from shoal.protocols.session import Data, Hello, Member
from shoal.runtime.clock import LoopClock
from shoal.runtime.hub import Hub
from shoal.runtime.link import LinkClosed
from shoal.runtime.serving import serve_worker
from shoal.store.memory import MemoryStore
from shoal.worker.agent import Agent, Happening

ENDS = (JobCompleted, JobFailed, JobCancelled, JobExpired)
EPOCH = 1_800_000_000.0  # the wall clock at the beginning of every simulation


def answer_to(prompt: str) -> list[str]:
    """Return the pieces of the one right answer to ``prompt``."""
    digest = hashlib.sha256(prompt.encode()).digest()
    pieces = 200 if "long" in prompt else 1 + digest[0] % 24
    return [f"{digest[n % 32]:x} {n} é" for n in range(pieces)]


class Pipe:
    """One direction of a connection: what is sent arrives later, in order."""

    def __init__(self, latency: float) -> None:
        self._latency = latency
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[Data] = deque()
        self._arrived: deque[Data] = deque()
        self._wake = asyncio.Event()
        self.closed: LinkClosed | None = None
        self.stalled = False  # nothing gets through, and nobody is told

    def send(self, data: Data) -> None:
        if self.closed is not None:
            raise self.closed
        if not self.stalled:
            # Timers of the same moment fire in any order, so they carry no data.
            self._under_way.append(data)
            self._loop.call_later(self._latency, self._arrive)

    async def receive(self) -> Data:
        while not self._arrived:
            if self.closed is not None:
                raise self.closed
            self._wake.clear()
            await self._wake.wait()
        return self._arrived.popleft()

    def close(self, reason: LinkClosed, *, at_once: bool) -> None:
        """Let the receiver find the end, after what was sent unless ``at_once``."""
        if self.stalled:
            return
        if at_once:
            self._arrived.clear()
            self._end(reason)
        else:
            late = self._latency + 0.001  # after what is under way
            self._loop.call_later(late, self._end, reason)

    def _arrive(self) -> None:
        data = self._under_way.popleft()
        if self.closed is None:
            self._arrived.append(data)
            self._wake.set()

    def _end(self, reason: LinkClosed) -> None:
        self.closed = self.closed or reason
        self._wake.set()


class Ends:
    """One end of a connection."""

    def __init__(self, peer: str, incoming: Pipe, outgoing: Pipe) -> None:
        self.peer = peer
        self._incoming = incoming
        self._outgoing = outgoing

    async def receive(self) -> Data:
        return await self._incoming.receive()

    async def send(self, data: Data) -> None:
        self._outgoing.send(data)

    async def close(self, code: int, text: str) -> None:
        ours = LinkClosed("closed here", 1000)
        self._incoming.close(ours, at_once=True)
        self._outgoing.close(
            LinkClosed(f"closed by peer: {code} {text}", code, text), at_once=False
        )


class Wire:
    """A connection that faults can be done to."""

    def __init__(self, random: Random) -> None:
        latency = random.uniform(0.001, 0.08)
        self._up, self._down = Pipe(latency), Pipe(latency)
        self.coordinator = Ends("sim", self._up, self._down)
        self.worker = Ends("sim", self._down, self._up)

    def cut(self) -> None:
        """Lose what is on the way, and tell both ends."""
        for pipe in (self._up, self._down):
            pipe.stalled = False
            pipe.close(LinkClosed("connection reset"), at_once=True)

    def stall(self) -> None:
        """Lose everything from now on, and tell nobody."""
        self._up.stalled = self._down.stalled = True


class SimEngine:
    """Answers as ``answer_to`` says, more or less quickly."""

    def __init__(
        self,
        model: str,
        slots: int,
        random: Random,
        *,
        continues: bool,
        refuses: float,
    ) -> None:
        self.model = model
        self.slots = slots
        can = {Feature.OPTIONS, Feature.STOP}
        self.features = frozenset(can | ({Feature.CONTINUE} if continues else set()))
        self._random = random
        self._refuses = refuses  # which share of its jobs
        self._pace = random.uniform(0.01, 0.4)  # seconds for a piece

    async def start(self) -> None:
        pass

    async def chat(
        self, chat: Chat, continues: str = ""
    ) -> AsyncGenerator[Piece, None]:
        prompt = text_of(chat.messages[-1])
        if "poison" in prompt:
            raise JobError("the model cannot read this")
        if self._random.random() < self._refuses:
            raise Unavailable("the model is being loaded")
        whole = "".join(answer_to(prompt))
        assert whole.startswith(continues), "asked to continue another answer"
        written = 0
        for piece in answer_to(prompt):
            written += len(piece)
            if written <= len(continues):
                continue
            await asyncio.sleep(self._pace * self._random.uniform(0.5, 1.5))
            yield piece[-(written - len(continues)) :]
        yield Finished("stop", Usage(len(prompt), written))

    async def close(self) -> None:
        pass


@dataclass
class Tally:
    """What clients saw."""

    whole: int = 0
    refused: int = 0
    ended_badly: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)


class World:
    """A coordinator, its workers and their network, under one seed."""

    def __init__(self, protocol: Protocol, seed: int, refusals: float = 0.02) -> None:
        self._refusals = refusals
        self.random = Random(seed)
        self.store = MemoryStore()
        self.clock = LoopClock(lambda: EPOCH + asyncio.get_running_loop().time())
        self.tally = Tally()
        self.hub: Hub
        self._protocol = protocol
        self._jobs = 0
        self._wires: list[Wire] = []
        self._serving: dict[asyncio.Task[None], Wire] = {}
        self._hub_task: asyncio.Task[None]
        self._up = False
        self._clients: set[asyncio.Task[None]] = set()
        self.accepted: list[JobId] = []

    async def start(self) -> None:
        """Start the coordinator, on what its predecessor left in the store."""
        self.hub = Hub(self.store, self.clock, self._new_id)
        await self.hub.restore()
        start = int(self.clock.wall() * 1000)
        (self._route,) = self._protocol.endpoints(self._protocol.config(), start)
        self._hub_task = asyncio.create_task(self.hub.run())
        self._up = True

    async def crash(self) -> None:
        """End the coordinator as ``kill -9`` does: no farewell, nothing flushed."""
        self._up = False
        dead = [self._hub_task, *self._serving, *self._clients]
        for wire in self._serving.values():
            wire.cut()
        for task in dead:
            task.cancel()
        await asyncio.gather(*dead, return_exceptions=True)

    @asynccontextmanager
    async def _dial(
        self, wires: list[Wire], url: str, headers: Mapping[str, str], message_max: int
    ) -> AsyncIterator[tuple[Ends, Mapping[str, str]]]:
        """Stand in for the transport's ``dial``."""
        if not self._up:
            raise LinkClosed("connection refused")
        path, _, query = url.removeprefix("ws://coordinator").partition("?")
        lower = {name.lower(): value for name, value in headers.items()}
        accepted = self._route.accept(Hello(path, query, lower), self.clock.now())
        wire = Wire(self.random)
        serving = asyncio.create_task(
            serve_worker(
                self.hub,
                self.clock,
                self._protocol.name,
                accepted.session,
                wire.coordinator,
            )
        )
        self._serving[serving] = wire
        serving.add_done_callback(self._serving.pop)
        self._wires.append(wire)
        wires.append(wire)
        answer = {name.lower(): value for name, value in accepted.headers.items()}
        try:
            yield wire.worker, answer
        finally:
            self._wires.remove(wire)
            await wire.worker.close(1000, "")

    async def work(self, name: str, model: str, *, continues: bool) -> None:
        """Be a worker until cancelled, which is how it is killed."""
        slots = self.random.randint(1, 4)
        engine = SimEngine(
            model, slots, self.random, continues=continues, refuses=self._refusals
        )
        member = Member(name, model, slots, engine.features)
        dialer = self._protocol.dial("ws://coordinator", member)
        wires: list[Wire] = []
        dial = partial(self._dial, wires)
        agent = Agent(dialer, dial, engine, self.clock, self.random, slots, _nothing)
        try:
            await agent.run()
        finally:
            for wire in wires:
                wire.cut()

    async def ask(self, model: str, *, patience: float | None = None) -> None:
        """Be a client, which leaves after ``patience`` seconds; note what came."""
        if not self._up:
            self.tally.refused += 1
            return
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)
        self._jobs += 1
        prompt = f"question {self._jobs}"
        if self.random.random() < 0.01:
            prompt += " poison"
        chat = Chat(model, ({"role": "user", "content": prompt},))
        text = ""
        try:
            async with (
                asyncio.timeout(patience),
                self.hub.answering(chat, Limits(queue=3600.0)) as reader,
            ):
                self.accepted.append(reader.job_id)
                while pieces := await reader.read():
                    text += "".join(pieces)
                await reader.outcome()
        except TimeoutError:
            self.tally.left += 1
        except ShoalError:
            self.tally.ended_badly += 1
        else:
            self.tally.whole += 1
            if text != "".join(answer_to(prompt)):
                self.tally.wrong.append(f"{prompt}: {text!r}")

    async def settle(self) -> None:
        """Wait until no job is open.  Raises what the hub died of, if it did."""
        settled = asyncio.ensure_future(self.hub.drain())
        await asyncio.wait(
            (settled, self._hub_task), return_when=asyncio.FIRST_COMPLETED
        )
        if self._hub_task.done():
            self._hub_task.result()

    def any_wire(self) -> Wire | None:
        return self.random.choice(self._wires) if self._wires else None

    async def ends(self) -> Counter[int]:
        """Count the accepted jobs by how often they have ended."""
        stories = [await self.store.story(job_id) for job_id in self.accepted]
        return Counter(
            sum(isinstance(each.fact, ENDS) for each in story) for story in stories
        )

    def _new_id(self) -> JobId:
        return JobId(f"{self.random.getrandbits(64):016x}")


def _nothing(happening: Happening) -> None:
    pass
