"""A whole pool in one process: the real hub, drivers, sessions and agents, with links,
engines and faults that are made up, all of it reproducible from one seed."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import TypeVar

from msgspec import structs

from protocols.contexts import protocol_context, require_token
from shoal.calls.durable import DurableCalls
from shoal.coordinator.hub import Hub
from shoal.domain.credentials import Key, Scope, digest_of
from shoal.domain.errors import JobError, ShoalError
from shoal.domain.facts import (
    Fact,
    JobCancelled,
    JobCompleted,
    JobExpired,
    JobFailed,
)
from shoal.domain.ids import JobId
from shoal.domain.job import Job, JobTerms, Priority, TimeLimits
from shoal.domain.vocabulary import TextSent
from shoal.domain.work import Chat
from shoal.domain.worker import Offer, ServedModel
from shoal.front.channel import Channel
from shoal.front.linked_jobs import LinkedJobs
from shoal.gateway.http.access import FIRST_KEY
from shoal.ledger.keys import Signer
from shoal.peers.connections import PeerConnections
from shoal.protocols.seam.context import Dialer, ProtocolContext, WorkerProfile
from shoal.protocols.seam.endpoints import Listener
from shoal.protocols.seam.protocol import AnyWireProtocol
from shoal.protocols.shoal.text import TEXT_PATH, TextHello, TextReceiver, text_ticket
from shoal.transports.clock import LoopClock
from shoal.transports.driver import Driver
from shoal.transports.link import LinkClosed
from shoal.worker.agent import Agent, WorkerEvent
from shoal.worker.calls import FunctionBackend
from shoal.worker.jobs import EngineSlots, FindModel, only_model
from simulation.engine import SimEngine, answer_to, words_of
from simulation.network import Ends, Wire
from simulation.node import KEY_OF_FRONTS, Node
from simulation.shared_store import SharedStore

T = TypeVar("T")

ENDS = (JobCompleted, JobFailed, JobCancelled, JobExpired)
CLIENT_KEY = Key("", FIRST_KEY, digest_of(KEY_OF_FRONTS), "", Scope.ADMIN, 0.0)
EPOCH = 1_800_000_000.0  # the wall clock at the beginning of every simulation
TRIES_MAX = 1000  # times that a client asks again
OWNERS = ("al", "bo", "cy")


@dataclass
class Tally:
    """What clients saw."""

    whole: int = 0
    refused: int = 0
    survived: int = 0  # whole answers of more than one coordinator
    past_the_hub: int = 0  # messages with text
    ended_badly: int = 0
    left: int = 0
    asked_again: int = 0
    wrong: list[str] = field(default_factory=list)


class World:
    """A coordinator, its workers and their network, under one seed."""

    def __init__(
        self,
        protocol: AnyWireProtocol,
        seed: int,
        *,
        refusals: float = 0.02,
        stalls: float = 0.0,
        hedge_after: float | None = None,
        token: str = "",
        price: int = 0,
        approve_nodes: bool = False,
        await_clients: float = 0.0,
    ) -> None:
        self._await_clients = await_clients  # seconds, as in ``Hub.restore``
        self._approve_nodes = approve_nodes
        self.approved: set[str] = set()  # machines that operators have seen
        self._price = price
        self._refusals = refusals
        self._token = token  # that workers present, if there is one
        self._stalls = stalls
        self._hedge_after = hedge_after
        self.random = Random(seed)
        self._random_of_texts = Random(seed)  # so that all else happens as without
        self.store = SharedStore(self.random)
        self.clock = LoopClock(lambda: EPOCH + asyncio.get_running_loop().time())
        self.tally = Tally()
        self.node: Node  # the coordinator that is active
        self.front: LinkedJobs  # of the clients that stay
        self.protocol = protocol
        self._jobs = 0
        self._wires: list[Wire] = []
        self._receiving: set[asyncio.Task[object]] = set()  # text past the hub
        self._nodes: list[Node] = []  # also those that do not know that they are over
        self.accepted: dict[JobId, None] = {}  # in order
        # Without chance, so that any worker can repeat a lost answer.
        self.temperature = 0.0
        self.runs: Counter[str] = Counter()  # of engines, by the prompts
        self.done: dict[str, JobId] = {}  # the jobs that were done, by their keys

    @property
    def up(self) -> bool:
        return hasattr(self, "node") and self.node.up

    @property
    def hub(self) -> Hub:
        return self.node.hub

    @property
    def calls(self) -> DurableCalls:
        return self.node.calls

    @property
    def peers(self) -> PeerConnections:
        return self.node.peers

    async def open(self) -> None:
        """Open the store, and start the coordinator."""
        await self.store.open()
        self.front = LinkedJobs(self._link, self.clock, self.new_id, b"the only")
        self._linking = asyncio.create_task(self.front.run_link())
        await self.start()

    async def close(self) -> None:
        """End all coordinators, and close the store."""
        self._linking.cancel()
        for each in self._receiving:
            each.cancel()
        for node in self._nodes:
            await node.crash()
        await self.store.close()

    async def start(self) -> None:
        """Start a coordinator, which takes over from the one before it."""
        for each in self._nodes:
            each.raise_failure()
        self._nodes = [each for each in self._nodes if each.up]
        node = Node(
            self.protocol,
            self.store.session(),
            self.clock,
            self.new_id,
            self._setting(),
            self._hedge_after,
            approve_nodes=self._approve_nodes,
        )
        await node.start(self._await_clients)
        for each in self._nodes:
            each.watch()
        self.node = node
        for each in self._nodes:
            each.cut_links()  # its fronts have seen the new one
        self._nodes.append(node)

    def _setting(self) -> ProtocolContext:
        context = protocol_context(self.clock.wall() - self.clock.now())
        if not self._token:
            return context
        admission, draw = require_token(self._token), self.random.randbytes
        return replace(
            context, token=self._token, admission=admission, random_bytes=draw
        )

    async def crash(self) -> None:
        """End the active coordinator as ``kill -9`` does."""
        await self.node.crash()

    @asynccontextmanager
    async def _dial(
        self, wires: list[Wire], url: str, headers: Mapping[str, str], message_max: int
    ) -> AsyncIterator[tuple[Ends, Mapping[str, str]]]:
        """Stand in for the transport's ``dial``."""
        to_front = url.endswith(TEXT_PATH)
        if not (self.up or to_front):
            raise LinkClosed("connection refused")
        random = self._random_of_texts if to_front else self.random
        wire = Wire(random, encrypted=url.startswith("noise"))
        if to_front:
            answer: Mapping[str, str] = {}
            self._receive_text(wire)
        else:
            answer = self.node.accept(url, headers, wire)
        self._wires.append(wire)
        wires.append(wire)
        try:
            yield wire.worker, answer
        finally:
            self._wires.remove(wire)
            await wire.worker.close(1000, "")

    def _receive_text(self, wire: Wire) -> None:
        """Be the front's end of a connection that carries text past the hub."""

        def on_message(message: TextHello | TextSent) -> None:
            if isinstance(message, TextSent):
                self.tally.past_the_hub += 1
                self.front.receive_text(message)

        receiver = TextReceiver(lambda name: text_ticket(self.front.text_secret, name))
        driver = Driver[TextHello | TextSent, object](
            *(receiver, wire.coordinator, self.clock, on_message)
        )
        receiving = asyncio.create_task(driver.run())
        self._receiving.add(receiving)
        receiving.add_done_callback(self._receiving.discard)

    async def work(self, name: str, model: str, *, continues: bool) -> None:
        """Be a worker until cancelled, which is how it is killed."""
        slots = self.random.randint(1, 4)
        engine = SimEngine(
            model,
            slots,
            self.random,
            continues=continues,
            refuses=self._refusals,
            stalls=self._stalls,
            runs=self.runs,
        )
        member = self.member(name, engine.models[0], slots)
        scheme = "tcp" if isinstance(self.node.endpoint, Listener) else "ws"
        dialer = self.protocol.dial(f"{scheme}://coordinator:4010", member)
        await self.be(dialer, only_model(engine, EngineSlots(slots)))

    def member(self, name: str, model: ServedModel, slots: int) -> WorkerProfile:
        """Return how a worker presents itself, always with one key for one name."""
        signer = Signer.from_seed(hashlib.sha256(name.encode()).digest())
        return WorkerProfile(
            name,
            model,
            slots,
            self._token,
            identity=signer,
            epoch=EPOCH,
            random_bytes=self.random.randbytes,
        )

    async def be(
        self,
        dialer: Dialer,
        find: FindModel,
        offers: tuple[Offer, ...] | None = None,
        functions: FunctionBackend | None = None,
    ) -> None:
        """Be a worker that dials so until cancelled, which is how it is killed.

        ``offers`` and ``functions`` are as in ``Agent``.
        """
        wires: list[Wire] = []
        dial = partial(self._dial, wires)
        agent = Agent(
            dialer,
            dial,
            find,
            self.clock,
            self.random,
            _nothing,
            offers=offers,
            functions=functions,
        )
        try:
            await agent.run()
        finally:
            for wire in wires:
                wire.cut()

    async def ask(self, model: str, *, patience: float | None = None) -> None:
        """Be a client, which leaves after ``patience`` seconds; note what came."""
        if not self.up:
            self.tally.refused += 1
            return
        try:
            async with asyncio.timeout(patience):
                text, prompt = await self.start_client(self._answer(self._job(model)))
        except TimeoutError:
            self.tally.left += 1
        except ShoalError:
            self.tally.ended_badly += 1
        else:
            self._check(text, prompt)

    async def stay(self, model: str) -> None:
        """Be a client at a front, which goes on at whichever coordinator is active."""
        job, seen = self._job(model), list[str]()
        first = self.front.epoch
        try:
            async with self.front.run(job, CLIENT_KEY, {}) as reader:
                self.accepted[reader.job_id] = None
                while pieces := await reader.read():
                    seen += map(words_of, pieces)
                await reader.outcome()
        except ShoalError:
            self.tally.ended_badly += 1
        else:
            self._check("".join(seen), job.work.text)
            self.tally.survived += self.front.epoch > first
        text, right = "".join(seen), "".join(answer_to(job.work.text))
        if not right.startswith(text):
            self.tally.wrong.append(f"{job.work.text}: {text!r} is not of {right!r}")

    async def _link(self, make: Callable[[], Channel]) -> None:
        """Stand in for the connection of a front to the hub's socket."""
        if not self.up:
            raise ConnectionRefusedError
        self.node.link(make(), copy_context())

    async def first_piece(self, model: str) -> float:
        """Be a client, and say how many seconds it waited for the first piece."""
        began = self.clock.now()
        async with self.hub.run_job(self._job(model)) as reader:
            await reader.read()
            waited = self.clock.now() - began
            with suppress(JobError):
                await reader.outcome()
        return waited

    async def insist(self, model: str) -> None:
        """Be a client that asks under one key until it has its answer, come what may.

        Twice at once, for it has forgotten that it has asked.
        """
        job = self._job(model, named=True)
        await asyncio.gather(self._insist(job), self._insist(job))

    async def _insist(self, job: Job) -> None:
        for _ in range(TRIES_MAX):
            await asyncio.sleep(self.random.uniform(0.0, 5.0))
            if not self.up:
                continue
            self.node.raise_failure()
            asking = self.start_client(
                self._answer(structs.replace(job, id=self.new_id()))
            )
            await asyncio.wait([asking])
            if not asking.cancelled() and asking.exception() is None:
                self._check(*asking.result())
                return
            if not asking.cancelled() and isinstance(asking.exception(), JobError):
                self.tally.ended_badly += 1
                return
            self.tally.asked_again += 1
        self.tally.wrong.append(f"{job.idempotency_key}: asked {TRIES_MAX} times")

    def start_client(self, client: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Run a client of the active coordinator."""
        return self.node.start_client(client)

    async def _answer(self, job: Job) -> tuple[str, str]:
        """Have a job done; return what came, and what was asked."""
        text = ""
        async with self.hub.run_job(job) as reader:
            self.accepted[reader.job_id] = None
            while pieces := await reader.read():
                text += "".join(map(words_of, pieces))
            outcome = await reader.outcome()
        if (key := job.idempotency_key) and self.done.setdefault(
            key, reader.job_id
        ) != reader.job_id:
            self.tally.wrong.append(f"{key}: done twice")
        prompt = job.work.text
        if outcome.text != text:
            self.tally.wrong.append(f"{prompt}: {text!r} is not {outcome.text!r}")
        return text, prompt

    def _check(self, text: str, prompt: str) -> None:
        self.tally.whole += 1
        if text != "".join(answer_to(prompt)):
            self.tally.wrong.append(f"{prompt}: {text!r}")

    def _job(self, model: str, *, named: bool = False) -> Job:
        self._jobs += 1
        prompt = f"question {self._jobs}"
        if self.random.random() < 0.01:
            prompt += " poison"
        elif self.random.random() < 0.05:
            prompt += " rich"
        return Job(
            self.new_id(),
            Chat(
                model,
                ({"role": "user", "content": prompt},),
                temperature=self.temperature,
            ),
            TimeLimits(queue=3600.0),
            self.random.choice(OWNERS),
            self.random.choice(list(Priority)),
            f"session {self._jobs % 50}",
            f"key {self._jobs}" if named else "",
            terms=JobTerms(price=self._price),
        )

    async def _drain(self) -> None:
        while self.calls.open_count:  # noqa: ASYNC110  # nothing tells when it is
            await asyncio.sleep(1.0)
        await self.hub.drain()

    async def settle(self) -> None:
        """Wait until no job is open.  Raises what the hub died of, if it did."""
        settled = asyncio.ensure_future(self._drain())
        await asyncio.wait(
            (settled, *self.node.running), return_when=asyncio.FIRST_COMPLETED
        )
        self.node.raise_failure()

    def any_wire(self) -> Wire | None:
        return self.random.choice(self._wires) if self._wires else None

    async def facts(self) -> list[list[Fact]]:
        """Return the story of each accepted job."""
        stories = [await self.store.history(job_id) for job_id in self.accepted]
        return [[each.fact for each in story] for story in stories]

    async def done_by_key(self) -> Counter[str]:
        """Count by key the jobs that were done."""
        jobs = [await self.store.job(job_id) for job_id in self.accepted]
        return Counter(
            each.job.idempotency_key
            for each in jobs
            if each is not None
            and each.outcome is not None
            and each.job.idempotency_key
        )

    async def ends(self) -> Counter[int]:
        """Count the accepted jobs by how often they have ended."""
        return Counter(
            sum(isinstance(fact, ENDS) for fact in story)
            for story in await self.facts()
        )

    def new_id(self) -> JobId:
        return JobId(f"{self.random.getrandbits(64):016x}")


def _nothing(happening: WorkerEvent) -> None:
    pass
