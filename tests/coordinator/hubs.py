"""A hub in virtual time, with scripted workers and clients."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from protocols.contexts import SIGNER
from shoal.coordinator.hub import Hub
from shoal.domain.errors import ShoalError, StoreError
from shoal.domain.facts import Fact
from shoal.domain.ids import JobId
from shoal.domain.job import DEFAULT_TERMS, Job, JobTerms, TimeLimits
from shoal.domain.outcome import AnswerPiece, Delta, Outcome
from shoal.domain.receipts import SignedReceipt
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Command,
    Completed,
    Dismiss,
    Event,
    Joined,
    Rejected,
    RunJob,
    RunningJobNames,
)
from shoal.domain.work import (
    Call,
    Chat,
    Completion,
    Embedding,
    Feature,
    JobKind,
    ModelAction,
    ModelOrder,
    Rerank,
    Task,
    Transcription,
    Work,
)
from shoal.domain.worker import CHAT_ONLY, Offer
from shoal.store.ledger import NO_ENTRIES, LedgerEntries
from shoal.store.port import CommitId, JobFilter, RecordedFact
from shoal.store.sqlite.database import SqliteStore
from shoal.transports.clock import LoopClock
from simulation import virtual

EVERYTHING: frozenset[type] = frozenset({RunJob, CancelJob, Dismiss})
CONTINUES = frozenset({Feature.CONTINUE})
NOTHING: frozenset[Feature] = frozenset()
DEAF: frozenset[type] = frozenset({RunJob})  # a wire that can only run jobs
NO_CANCEL: frozenset[type] = frozenset({RunJob, Dismiss})
LIMITS = TimeLimits()
SHORT_LIMITS = TimeLimits(queue=10.0, first_output=20.0, silence=5.0, total=60.0)
TOOL_CALL = Delta(0, {"tool_calls": [{"index": 0, "function": {"name": "f"}}]})
JOBS_MAX = 1_000_000  # more than any test submits
SECRET = "a confidential prompt"


class SlowStore(SqliteStore):
    """A database in memory whose commits can be delayed and can fail."""

    def __init__(self) -> None:
        super().__init__(Path(":memory:"))
        self.writable = asyncio.Event()
        self.writable.set()
        self.full = False  # and cannot heal
        self.no_space = False  # for now
        self.unanswered = False  # it commits, and nobody learns it
        self.appends = 0

    async def append(
        self,
        facts: Sequence[Fact],
        at: float,
        earlier: Sequence[RecordedFact] = (),
        entries: LedgerEntries = NO_ENTRIES,
        commit: CommitId | None = None,
    ) -> None:
        self.appends += 1
        await self.writable.wait()
        if self.full:
            raise StoreError("shoal.db: disk I/O error")
        if self.no_space:
            raise StoreError("disk is full", "/data/shoal.db", temporary=True)
        await super().append(facts, at, earlier, entries, commit)
        if self.unanswered:
            raise StoreError("connection reset", temporary=True)


class ScriptedWorker:
    """A worker's connection; the test emits the worker's events."""

    def __init__(
        self,
        hub: Hub,
        name: str = "w",
        model: str = "m",
        slots: int = 1,
        features: frozenset[Feature] = NOTHING,
        accepts: frozenset[type] = EVERYTHING,
        kinds: frozenset[JobKind] = CHAT_ONLY,
        public_key: str = "",
        *,
        proven: bool = False,
        running: RunningJobNames | None = None,
    ) -> None:
        self.accepts = accepts
        self.commands: list[Command] = []
        self.disconnections: list[tuple[str, int]] = []
        self.port = hub.connect(self, "wire")
        offer = Offer(
            kinds,
            frozenset({model}),
            slots,
            features,
            public_key=public_key,
            proven=proven,
        )
        self.emit(Joined(name, offer, running))

    def send(self, message: Command) -> bool:
        assert type(message) in self.accepts, "unsupported by the wire"
        self.commands.append(message)
        return True

    def disconnect(self, reason: str, code: int, text: str) -> None:
        self.disconnections.append((reason, code))

    @property
    def runs(self) -> list[RunJob]:
        return [each for each in self.commands if isinstance(each, RunJob)]

    @property
    def cancelled(self) -> list[JobId]:
        return [each.job_id for each in self.commands if isinstance(each, CancelJob)]

    def emit(self, *events: Event) -> None:
        for event in events:
            self.port.on_event(event)

    def write(self, *pieces: AnswerPiece, run: int = -1) -> None:
        """Write pieces of the answer to a job, by default the last one."""
        job = self.runs[run]
        self.emit(*(AnswerChunk(job.job_id, job.lease, [piece]) for piece in pieces))

    def complete(self, run: int = -1) -> None:
        job = self.runs[run]
        self.emit(Completed(job.job_id, job.lease))

    def answer(
        self, output: str, receipt: SignedReceipt | None = None, run: int = -1
    ) -> None:
        """Complete a job with its whole answer and an optional receipt."""
        job = self.runs[run]
        whole = Completed(job.job_id, job.lease, rest=(output,), receipt=receipt)
        if not isinstance(job.work, Task):
            whole = replace(whole, rest=("hi",), output=output)
        self.emit(whole)

    def reject(self, reason: str = "loading", run: int = -1) -> None:
        job = self.runs[run]
        self.emit(Rejected(job.job_id, job.lease, reason))


class Client:
    """A client of one job, with the received answer."""

    def __init__(
        self, hub: Hub, job: Job, seen: Sequence[AnswerPiece] | None = None
    ) -> None:
        self.job_id = JobId("")
        self.accepted = False
        self.pieces: list[AnswerPiece] = []
        self.outcome: Outcome | None = None
        self.error: ShoalError | None = None
        self._hub = hub
        self.job = job
        self._seen = seen
        self.task = asyncio.create_task(self._read())

    @property
    def text(self) -> str:
        """The received text."""
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    async def disconnect(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        await run_pending()

    async def _read(self) -> None:
        try:
            async with self._hub.run_job(self.job, seen=self._seen) as reader:
                self.accepted = True
                self.job_id = reader.job_id
                while pieces := await reader.read():
                    self.pieces += pieces
                self.outcome = await reader.outcome()
        except ShoalError as error:
            self.error = error


@dataclass
class Coordinator:
    """A running hub with its store and its task."""

    hub: Hub
    store: SlowStore
    task: asyncio.Task[None]

    def job(
        self,
        model: str = "m",
        limits: TimeLimits = LIMITS,
        *,
        owner: str = "",
        key: str = "",
        prompt: str = SECRET,
        kind: JobKind = JobKind.CHAT,
        terms: JobTerms = DEFAULT_TERMS,
    ) -> Job:
        # Without chance, so that any worker can repeat a lost answer.
        chat = Chat(model, ({"role": "user", "content": prompt},), temperature=0.0)
        works: dict[JobKind, Work] = {
            JobKind.CHAT: chat,
            JobKind.COMPLETION: Completion(model, prompt, temperature=0.0),
            JobKind.EMBEDDING: Embedding(model, (prompt,)),
            JobKind.RERANK: Rerank(model, prompt, (prompt,)),
            JobKind.TRANSCRIPTION: Transcription(model, "AA==", "wav"),
            JobKind.TASK: Task("classify", {"input": prompt}),
            JobKind.CALL: Call("f", b"\x90", b"\x80"),
            JobKind.MODEL: ModelOrder(ModelAction.LOAD, "m", "wire:worker"),
        }
        return Job(
            self.hub.new_id(),
            works[kind],
            limits,
            owner,
            idempotency_key=key,
            terms=terms,
        )

    async def request(
        self,
        model: str = "m",
        limits: TimeLimits = LIMITS,
        *,
        owner: str = "",
        key: str = "",
        prompt: str = SECRET,
        kind: JobKind = JobKind.CHAT,
        terms: JobTerms = DEFAULT_TERMS,
    ) -> Client:
        job = self.job(
            model, limits, owner=owner, key=key, prompt=prompt, kind=kind, terms=terms
        )
        client = Client(self.hub, job)
        await run_pending()
        return client

    async def join(
        self,
        name: str = "w",
        model: str = "m",
        slots: int = 1,
        features: frozenset[Feature] = NOTHING,
        accepts: frozenset[type] = EVERYTHING,
        kinds: frozenset[JobKind] = CHAT_ONLY,
        public_key: str = "",
        *,
        proven: bool = False,
        running: RunningJobNames | None = None,
    ) -> ScriptedWorker:
        member = ScriptedWorker(
            self.hub,
            name,
            model,
            slots,
            features,
            accepts,
            kinds,
            public_key,
            proven=proven,
            running=running,
        )
        await run_pending()
        return member

    async def history(self, job_id: JobId) -> list[Fact]:
        return [each.fact for each in await self.store.history(job_id)]


@asynccontextmanager
async def running_coordinator(
    store: SlowStore | None = None,
    queue_max: int = 1000,
    hedge_after: float | None = None,
    fee: int = 0,
    *,
    approve_nodes: bool = False,
    await_clients: float = 0.0,
) -> AsyncIterator[Coordinator]:
    """Run a hub within the block; then end it as ``kill -9`` does.

    A given ``store`` must be open, and stays open.
    """
    async with AsyncExitStack() as resources:
        if store is None:
            store = SlowStore()
            await store.open()
            resources.push_async_callback(store.close)
        yield await resources.enter_async_context(
            _run_hub(
                *(store, queue_max, hedge_after, fee, await_clients),
                approve_nodes=approve_nodes,
            )
        )


@asynccontextmanager
async def _run_hub(
    store: SlowStore,
    queue_max: int,
    hedge_after: float | None,
    fee: int,
    await_clients: float,
    *,
    approve_nodes: bool,
) -> AsyncIterator[Coordinator]:
    # Ids continue from one coordinator to the next on the same store.
    numbers = count(1 + len((await store.recent(JobFilter(), JOBS_MAX)).jobs))
    loop = asyncio.get_running_loop()
    clock = LoopClock(loop.time)
    hub = Hub(
        store,
        clock,
        lambda: JobId(f"job{next(numbers)}"),
        SIGNER,
        queue_max,
        hedge_after,
        fee,
        approve_nodes=approve_nodes,
    )
    await hub.restore(clients_return=await_clients > 0)
    clock.call_at(clock.now() + await_clients, hub.end_return)
    task = asyncio.create_task(hub.run())
    try:
        yield Coordinator(hub, store, task)
    finally:
        if task.done() and not task.cancelled():  # ended by another one
            task.result()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def run_script(
    script: Callable[[Coordinator], Awaitable[None]],
    store: SlowStore | None = None,
    queue_max: int = 1000,
    hedge_after: float | None = None,
) -> None:
    """Run a script against a coordinator, in virtual time."""

    async def scenario() -> None:
        async with running_coordinator(store, queue_max, hedge_after) as its:
            await script(its)

    virtual.run(scenario())


async def run_pending() -> None:
    """Run everything that is due now."""
    await asyncio.sleep(0.05)


def kinds(facts: Sequence[Fact]) -> list[type[Fact]]:
    """Return the types of facts."""
    return [type(fact) for fact in facts]
