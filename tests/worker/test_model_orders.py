"""Orders to load and unload models, over one connection, in virtual time."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from shoal.domain.errors import ConfigError, UnknownModel
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    CallProgress,
    CancelJob,
    Completed,
    Event,
    Failed,
    OffersChanged,
    Rejected,
    RunJob,
)
from shoal.domain.work import Chat, JobKind, ModelAction, ModelOrder, Shard, Work
from shoal.domain.worker import (
    LoadableModel,
    MemoryLoan,
    ModelLibrary,
    Offer,
    ServedModel,
)
from shoal.engines.engine import Activity
from shoal.protocols.seam.context import Dialer
from shoal.transports.clock import LoopClock
from shoal.transports.link import OpenLink
from shoal.worker.agent import AWAY_MAX, Agent, WorkerEvent
from shoal.worker.jobs import EngineSlots, FindModel
from shoal.worker.lending import Lender
from shoal.worker.listening_worker import ListeningWorker
from shoal.worker.model_offers import (
    CHECK_INTERVAL,
    EngineMonitor,
    JointOffers,
    OfferedEngine,
    OfferedModel,
)
from shoal.worker.model_orders import LoadableEngine, ModelOrders
from shoal.worker.owner_throttle import OwnerThrottle
from shoal.worker.server_orders import LEAVING, PROGRESS_INTERVAL, UNLOADED
from shoal.worker.shard_port import LentProcess
from simulation import virtual
from transports.memory_links import MemoryLink
from worker.test_agent import ALL, Network
from worker.test_listening_worker import Connection, CoordinatorSession
from worker.test_separate_offers import Shelf

ONE = LeaseNumber(1)
LOADS = 60.0  # seconds that a model takes
SIZE = 1000  # bytes
NEED = 1500  # with its contexts
MAPPED = 1000  # of it, from the file
WIRE = ALL | {OffersChanged, Rejected, CallProgress}


class File(Shelf):
    """An engine of one model, whose process works while it loads."""

    damage = ""
    stuck = False
    seconds = LOADS

    def __init__(self, model: str, context: int, slots: int) -> None:
        super().__init__(model)
        self.context, self.slots = context, slots
        self.begun: float | None = None
        self.open = False
        self.closed = False

    async def start(self) -> None:
        self.begun = asyncio.get_running_loop().time()
        self.open = True
        if self.stuck:
            await asyncio.Event().wait()
        await asyncio.sleep(self.seconds)
        if self.damage:
            raise ConfigError(self.damage)

    async def close(self) -> None:
        self.closed, self.open = True, False

    def activity(self) -> Activity | None:
        if self.begun is None or self.closed:
            return None
        worked = min(LOADS, asyncio.get_running_loop().time() - self.begun)
        memory = int(NEED * worked / LOADS)
        return Activity(
            0.0 if self.stuck else worked, 0, memory, memory * MAPPED // NEED
        )


LIBRARY = ModelLibrary(
    (LoadableModel("a", SIZE, context=100), LoadableModel("b", SIZE)),
    memory=4000,
    context=200,
    slots=2,
)


@dataclass
class Stage:
    """A worker with a library, and its environment."""

    library: ModelLibrary = LIBRARY
    network: Network = field(
        default_factory=lambda: Network(accepts=WIRE, welcomes=True)
    )
    throttle: OwnerThrottle = field(default_factory=OwnerThrottle)
    found: ModelLibrary | None = None
    """What the next scan finds."""

    opened: list[File] = field(default_factory=list)
    started: list[File] = field(default_factory=list)
    """Those that are loaded from the start."""

    reports: list[tuple[str, str, str]] = field(default_factory=list)
    kind: type[File] = File
    free: Callable[[int], int] | None = None
    lender: Lender | None = None
    lost: "asyncio.Future[str] | None" = None  # of the group that was opened last
    hashing: int = 0  # times that the other machine says that it hashes the model

    def enlist(
        self,
        find: FindModel,
        offers: tuple[Offer, ...],
        report: Callable[[WorkerEvent], None],
        on_admitted: Callable[[], None],
    ) -> Agent:
        return Agent(
            *(self.network, self.network.dial, find, LoopClock(), Random(1), report),
            offers=offers,
            slots=self.slots,
            on_admitted=on_admitted,
            throttle=self.throttle,
        )

    def offers(self) -> JointOffers:
        self.orders = ModelOrders(
            lambda: self.library,
            self.scan,
            lambda library: Offer(frozenset({JobKind.MODEL}), slots=2, library=library),
            self.open_engine,
            lambda name, event: self.reports.append((event.kind, name, event.reason)),
            EngineSlots(2, self.throttle),
            self.fetch if self.library.fetches else None,
            free=self.free,
            lender=self.lender,
            open_group=None if self.lender is None else self.open_group,
        )
        engines = [
            OfferedEngine(
                EngineMonitor(each, lambda event: None, each.start),
                lambda models: models,
                EngineSlots(each.slots, self.throttle),
            )
            for each in self.started
        ]
        for each, engine in zip(self.started, engines, strict=True):
            name = each.models[0].name
            held = LoadableEngine(engine, each.activity)
            self.orders.hold(name, held, NEED)
        self.slots = [each.slots for each in engines]
        return JointOffers(
            *(engines, described, self.enlist, self.on_event),
            orders=self.orders,
            slots=self.slots,
        )

    async def scan(self) -> None:
        self.library = self.found or self.library

    async def fetch(
        self, order: ModelOrder, on_copied: Callable[[int, int | None], None]
    ) -> None:
        name = order.name
        if name == "missing":
            raise UnknownModel("no machine has it")
        for _ in range(self.hashing):
            await asyncio.sleep(30.0)
            on_copied(0, None)
        for arrived in range(0, SIZE + 1, SIZE // 4):
            await asyncio.sleep(10.0)
            on_copied(arrived, SIZE)
        copied = LoadableModel(name, SIZE, context=100)
        self.found = replace(self.library, models=(*self.library.models, copied))

    async def open_group(
        self, model: LoadableModel, order: ModelOrder
    ) -> LoadableEngine:
        opened = await self.open_engine(model, order.context, order.slots)
        self.lost = asyncio.get_running_loop().create_future()
        return dataclasses.replace(opened, lost=self.lost)

    async def open_engine(
        self, model: LoadableModel, context: int, slots: int
    ) -> LoadableEngine:
        engine = self.kind(model.name, context, slots)
        self.opened.append(engine)
        offered = OfferedEngine(
            EngineMonitor(engine, lambda event: None, engine.start),
            lambda models: models,
            EngineSlots(slots, self.throttle),
        )
        return LoadableEngine(offered, engine.activity)

    def on_event(self, item: OfferedModel | None, event: WorkerEvent) -> None:
        name = "" if item is None else item.model.name
        self.reports.append((event.kind, name, event.reason))

    @property
    def sent(self) -> list[Event]:
        return self.network.sent

    @property
    def offered(self) -> list[str]:
        """The models that were offered last."""
        *_, last = (each for each in self.sent if isinstance(each, OffersChanged))
        return sorted(name for each in last.offers for name in each.models)

    def load(
        self, name: str, job: str = "load", context: int = 0, slots: int = 0
    ) -> None:
        order = ModelOrder(ModelAction.LOAD, name, "me", context, slots)
        self.give(job, order)

    def unload(self, name: str, job: str = "unload") -> None:
        self.give(job, ModelOrder(ModelAction.UNLOAD, name, "me"))

    def give(self, job: str, work: Work) -> None:
        self.network.receive(RunJob(JobId(job), ONE, work, returnable=True))

    def cancel(self, job: str) -> None:
        self.network.receive(CancelJob(JobId(job), ONE))

    def end(self, job: str = "load") -> Event | None:
        """Return how a job ended; None: it has not."""
        ends = [
            each
            for each in self.sent
            if isinstance(each, Completed | Rejected | Failed) and each.job_id == job
        ]
        assert len(ends) <= 1
        return ends[0] if ends else None

    def progress(self) -> list[tuple[float | None, str]]:
        return [
            (each.share, each.remark)
            for each in self.sent
            if isinstance(each, CallProgress)
        ]


def described(model: ServedModel, slots: int) -> Offer:
    return Offer(model.kinds, frozenset({model.name}), slots)


def chat(model: str, seconds: float) -> Chat:
    return Chat(model, ({"role": "user", "content": str(seconds)},))


Script = Callable[[Stage, JointOffers, "asyncio.Task[None]"], Awaitable[None]]


def play(script: Script, stage: Stage | None = None) -> None:
    its = stage or Stage()

    async def scenario() -> None:
        offers = its.offers()
        task = asyncio.create_task(offers.run())
        await asyncio.sleep(1.0)
        try:
            await script(its, offers, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert not any(each.open for each in its.opened), "an engine is left"
        assert not its.orders.memory

    virtual.run(scenario())


DONE = Completed(JobId("load"), ONE, "stop")


def test_library_is_offered() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        (offer,) = its.sent[0].offers  # type: ignore[union-attr]

        assert offer.kinds == {JobKind.MODEL}
        assert offer.library == its.library
        assert its.offered == []
        assert its.reports == [("joined", "", "")]

    play(script)


def test_without_models_no_library_is_offered() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        assert its.sent == [OffersChanged(())]

        its.found = ModelLibrary((LoadableModel("new"),))
        await asyncio.sleep(CHECK_INTERVAL + 1.0)

        offers = its.sent[-1].offers  # type: ignore[union-attr]
        assert [each.library for each in offers] == [its.found]

    play(script, Stage(ModelLibrary()))


def test_model_is_loaded_and_offered_before_the_order_is_done() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a")
        await asyncio.sleep(LOADS - 1.0)
        assert its.offered == []
        assert its.end() is None

        await asyncio.sleep(2.0)
        told, done = its.sent[-2:]
        assert its.offered == ["a"]
        assert isinstance(told, OffersChanged)
        assert done == DONE
        assert [(each.context, each.slots) for each in its.opened] == [(100, 2)]

        its.give("j", chat("a", 1.0))
        await asyncio.sleep(2.0)
        assert isinstance(its.end("j"), Completed)
        assert its.reports[-1] == ("joined", "a", "")

    play(script)


def test_order_chooses_context_and_slots() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("b", context=8000, slots=3)
        its.load("a", "other", context=-1, slots=-1)
        await asyncio.sleep(LOADS + 1.0)

        assert [(each.context, each.slots) for each in its.opened] == [
            (8000, 3),
            (100, 2),
        ]

    play(script)


def test_progress_is_reported_while_the_process_works() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a")
        await asyncio.sleep(LOADS + 1.0)

        shares = [share for share, _ in its.progress()]
        assert len(shares) == LOADS // PROGRESS_INTERVAL - 1
        assert shares[0] == pytest.approx(5 / 60, abs=0.01)
        assert shares == sorted(shares, key=lambda share: share or 0)
        lines = [each for each in its.reports if each[0] == "loading"]
        assert lines[0] == ("loading", "a", "on order")
        assert lines[1] == ("loading", "a", "on order: 17%")
        assert len(lines) == 6

    play(script)


def test_stuck_process_reports_nothing() -> None:
    class Stuck(File):
        stuck = True

        def activity(self) -> Activity | None:
            return Activity(1.0, 2, 3)

    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a")
        await asyncio.sleep(10 * LOADS)

        assert len(its.progress()) == 1, "it was started"
        assert its.end() is None

    play(script, Stage(kind=Stuck))


def test_many_orders_for_a_model_cause_one_load() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a", "first")
        its.load("a", "second")
        await asyncio.sleep(LOADS + 1.0)
        its.load("a", "third")
        await asyncio.sleep(1.0)

        assert len(its.opened) == 1
        for job in ("first", "second", "third"):
            assert isinstance(its.end(job), Completed)

    play(script)


def test_cancelled_order_stops_the_load() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a", "first")
        its.load("a", "second")
        await asyncio.sleep(10.0)
        its.cancel("first")
        await asyncio.sleep(1.0)
        (engine,) = its.opened
        assert not engine.closed, "the second order waits for it"

        its.cancel("second")
        await asyncio.sleep(1.0)
        assert engine.closed
        assert its.orders.memory == 0
        assert its.end("first") is its.end("second") is None
        assert its.reports[-1] == ("failed", "a", "stopped")

        its.load("a")
        await asyncio.sleep(LOADS + 1.0)
        assert its.end() == DONE

    play(script)


def test_unload_at_the_very_end_of_a_load_ends() -> None:
    its = Stage()

    async def unload() -> None:
        async for _ in its.orders.run(ModelOrder(ModelAction.UNLOAD, "a", "me")):
            pass

    class Hasty(File):
        """Is to be unloaded before its load has been reported."""

        async def start(self) -> None:
            await super().start()
            self.unloading = asyncio.create_task(unload())

    its.kind = Hasty

    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a")
        await asyncio.sleep(LOADS + 10.0)
        assert its.opened[0].closed
        assert its.orders.memory == 0

    play(script, its)


def test_order_cancelled_at_once_leaves_nothing() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a")
        its.cancel("load")
        await asyncio.sleep(1.0)
        assert its.orders.memory == 0

        its.load("a", "again")
        await asyncio.sleep(0.0)
        its.cancel("again")
        its.load("a", "third")
        await asyncio.sleep(LOADS + 1.0)
        assert isinstance(its.end("third"), Completed)
        assert its.offered == ["a"]

    play(script)


def test_damaged_model_fails_its_order() -> None:
    class Damaged(File):
        damage = "a.gguf cannot be loaded: it is damaged"

    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a")
        await asyncio.sleep(LOADS + 1.0)

        assert its.end() == Failed(JobId("load"), ONE, Damaged.damage)
        assert its.offered == []
        assert its.orders.memory == 0
        assert all(each.closed for each in its.opened)
        assert its.reports[-1] == ("failed", "a", Damaged.damage)

    play(script, Stage(kind=Damaged))


def test_order_for_an_unknown_model_fails() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("../c")
        await asyncio.sleep(1.0)

        reason = "this machine has no model '../c' to load"
        assert its.end() == Failed(JobId("load"), ONE, reason)
        assert its.opened == []

    play(script)


def test_order_beyond_the_memory_fails_with_numbers() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a", "first")
        its.load("b")
        await asyncio.sleep(LOADS + 1.0)

        assert isinstance(its.end("first"), Completed)
        reason = (
            "b needs 3.0 GB of memory (for 2 slots of 200 tokens), and of the 4.0 GB "
            "that this machine lends to models, 3.0 GB are taken; unload another, or "
            "raise --memory there"
        )
        assert its.end() == Failed(JobId("load"), ONE, reason)

        its.unload("a")
        await asyncio.sleep(1.0)
        its.load("b", "again")
        await asyncio.sleep(LOADS + 1.0)
        assert its.offered == ["b"]

    models = [LoadableModel(name, 2_000_000_000) for name in ("a", "b")]
    library = ModelLibrary((*models,), 4_000_000_000, context=200, slots=2)
    play(script, Stage(library))


def test_order_for_more_than_is_free_now_fails_with_numbers() -> None:
    free = [10 * NEED]
    asked: list[int] = []

    def free_now(mapped: int) -> int:
        asked.append(mapped)
        return free[0]

    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a")
        await asyncio.sleep(LOADS + 2.0)
        free[0] = NEED - 1  # other programs use the rest
        its.load("b", "early")
        await asyncio.sleep(1.0)
        assert its.end("early") == Failed(
            JobId("early"),
            ONE,
            "b needs 0 MB of memory (for 2 slots of 200 tokens), and only 0 MB of "
            "this machine's are free now, less a tenth: end other programs there, or "
            "set --memory",
        )

        free[0] = NEED
        its.load("b", "late")
        await asyncio.sleep(LOADS + 2.0)
        assert its.end("late") == Completed(JobId("late"), ONE)
        assert asked == [0, MAPPED, MAPPED], "what is loaded is only kept of files"

    play(script, Stage(free=free_now))


def test_two_orders_do_not_count_on_the_same_free_memory() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a", "one")
        its.load("b", "two")
        await asyncio.sleep(LOADS + 2.0)

        assert its.end("one") == Completed(JobId("one"), ONE)
        assert isinstance(its.end("two"), Failed)

    play(script, Stage(free=lambda mapped: 2 * NEED - 1))


def test_model_is_unloaded_when_its_jobs_have_ended() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a")
        await asyncio.sleep(LOADS + 1.0)
        its.give("j", chat("a", 20.0))
        await asyncio.sleep(1.0)
        its.unload("a")
        await asyncio.sleep(1.0)
        (engine,) = its.opened
        assert its.offered == []
        assert its.reports[-1] == ("left", "a", UNLOADED)
        assert its.end("unload") is None
        assert not engine.closed

        await asyncio.sleep(20.0)
        assert isinstance(its.end("j"), Completed)
        assert isinstance(its.end("unload"), Completed)
        assert engine.closed
        assert its.orders.memory == 0

    play(script)


def test_cancelled_unload_offers_the_model_again() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a")
        await asyncio.sleep(LOADS + 1.0)
        its.give("j", chat("a", 20.0))
        its.unload("a")
        await asyncio.sleep(1.0)
        assert its.offered == []

        its.cancel("unload")
        await asyncio.sleep(30.0)
        assert its.offered == ["a"]
        assert not its.opened[0].closed
        its.give("k", chat("a", 1.0))
        await asyncio.sleep(2.0)
        assert isinstance(its.end("k"), Completed)

    play(script)


def test_unload_of_a_loading_model_stops_the_load() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a")
        await asyncio.sleep(10.0)
        its.unload("a")
        await asyncio.sleep(1.0)

        assert its.end() == Rejected(JobId("load"), ONE, UNLOADED)
        assert isinstance(its.end("unload"), Completed)
        assert its.orders.memory == 0

    play(script)


def test_unload_of_what_is_not_loaded_is_done() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.unload("a")
        await asyncio.sleep(1.0)

        assert isinstance(its.end("unload"), Completed)

    play(script)


class SharedStage(Stage):
    """A machine that two coordinators have dialled."""

    def enlist(  # type: ignore[override]  # it has more agents than one
        self,
        find: FindModel,
        offers: tuple[Offer, ...],
        report: Callable[[WorkerEvent], None],
        on_admitted: Callable[[], None],
    ) -> ListeningWorker:
        def create_agent(
            dialer: Dialer, open_link: OpenLink, report: Callable[[WorkerEvent], None]
        ) -> Agent:
            return Agent(
                *(dialer, open_link, find, LoopClock(), Random(1), report),
                offers=offers,
                slots=self.slots,
                redials=False,
            )

        self.listening = ListeningWorker(
            no_ports, create_agent, LoopClock(), lambda details, event: None
        )
        return self.listening

    def dial(self, name: str) -> Connection:
        link, session = MemoryLink(), CoordinatorSession(name, WIRE)
        serving = asyncio.create_task(self.listening.serve("wire", session, link))
        return Connection(session, link, serving)


@asynccontextmanager
async def no_ports(serve: object) -> AsyncIterator[Mapping[str, int]]:
    yield {}


def test_two_coordinators_order_the_same_machine() -> None:
    stage = SharedStage(replace(LIBRARY, memory=2 * NEED))

    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        one, other = stage.dial("one"), stage.dial("other")
        await asyncio.sleep(1.0)

        def order(place: Connection, job: str, action: ModelAction, name: str) -> None:
            work = ModelOrder(action, name, "me")
            place.give(RunJob(JobId(job), ONE, work))

        # Each model is ordered by both.
        order(one, "a", ModelAction.LOAD, "a")
        order(other, "a", ModelAction.LOAD, "a")
        await asyncio.sleep(1.0)
        order(other, "b", ModelAction.LOAD, "b")
        await asyncio.sleep(1.0)
        order(one, "b", ModelAction.LOAD, "b")
        await asyncio.sleep(2 * LOADS)

        assert [each.models[0].name for each in stage.opened] == ["a", "b"]
        assert one.completed == other.completed == ["a", "b"]

        order(other, "gone", ModelAction.UNLOAD, "a")
        order(one, "again", ModelAction.LOAD, "a")
        await asyncio.sleep(2 * LOADS)

        assert other.completed[2:] == ["gone"]
        assert one.completed[2:] == ["again"]
        assert [each.open for each in stage.opened] == [False, True, True]
        one.link.cut()
        other.link.cut()

    play(script, stage)


def test_load_waits_for_the_unload_of_the_same_model() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a", "first")
        await asyncio.sleep(LOADS + 1.0)
        its.give("j", chat("a", 20.0))
        its.unload("a")
        its.load("a")
        await asyncio.sleep(20.0 + LOADS + 2.0)

        assert isinstance(its.end("unload"), Completed)
        assert its.end() == DONE
        assert [each.closed for each in its.opened] == [True, False]
        assert its.offered == ["a"]

    play(script)


def test_model_of_the_start_counts_and_is_unloaded() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        assert its.orders.memory == NEED
        its.load("a")
        await asyncio.sleep(LOADS / 2)
        assert its.end() is None, "it is loading"
        await asyncio.sleep(LOADS)
        assert its.end() == DONE
        assert its.opened == []

        its.unload("a")
        await asyncio.sleep(1.0)
        assert isinstance(its.end("unload"), Completed)
        assert its.started[0].closed
        assert its.offered == []
        assert its.slots == []

    play(script, Stage(started=[File("a", 100, 2)]))


@pytest.mark.parametrize("loads", [LOADS, 3 * AWAY_MAX])
def test_load_goes_on_without_the_coordinator(loads: float) -> None:
    class Slow(File):
        seconds = loads

    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a")
        await asyncio.sleep(10.0)
        its.network.down = True
        its.network.links[-1].cut()
        await asyncio.sleep(AWAY_MAX + loads)
        its.sent.clear()
        its.network.down = False
        await asyncio.sleep(60.0)

        assert its.offered == ["a"], "it was loaded meanwhile"
        its.load("a", "again")
        await asyncio.sleep(1.0)
        assert isinstance(its.end("again"), Completed)
        assert len(its.opened) == 1

    play(script, Stage(kind=Slow))


def test_load_that_was_left_alone_ends_with_its_next_order() -> None:
    class Slow(File):
        seconds = 5 * AWAY_MAX

    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a")
        await asyncio.sleep(10.0)
        its.network.down = True
        its.network.links[-1].cut()
        await asyncio.sleep(2 * AWAY_MAX)
        its.network.down = False
        await asyncio.sleep(60.0)
        its.load("a", "again")
        await asyncio.sleep(1.0)
        assert len(its.opened) == 1

        its.cancel("again")
        await asyncio.sleep(1.0)
        assert its.opened[0].closed
        assert its.orders.memory == 0

    play(script, Stage(kind=Slow))


def test_leaving_stops_a_load() -> None:
    async def script(
        its: Stage, offers: JointOffers, task: "asyncio.Task[None]"
    ) -> None:
        its.load("a")
        await asyncio.sleep(10.0)
        offers.leave()
        await asyncio.sleep(2.0)

        assert its.end() == Rejected(JobId("load"), ONE, LEAVING)
        assert task.done()
        assert its.opened[0].closed

    play(script)


def test_pause_by_the_owners_rules_stops_a_load() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a")
        await asyncio.sleep(10.0)
        its.throttle.pause("on battery")
        await asyncio.sleep(1.0)

        end = its.end()
        assert isinstance(end, Rejected)
        assert "on battery" in end.reason
        assert its.opened[0].closed
        its.load("a", "again")
        await asyncio.sleep(1.0)
        assert its.end("again") == Rejected(JobId("again"), ONE, "paused: on battery")

    play(script)


def test_model_of_a_server_is_not_unloaded() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("a")
        its.unload("a")
        await asyncio.sleep(1.0)

        assert its.end() == DONE
        assert its.end("unload") == Failed(
            JobId("unload"), ONE, "a stays loaded: its owner or its server decides"
        )

    class Served(Stage):
        def offers(self) -> JointOffers:
            offers = super().offers()
            offers._engines.append(
                OfferedEngine(
                    EngineMonitor(Shelf("a"), lambda event: None),
                    lambda models: models,
                    EngineSlots(4),
                )
            )
            offers._synchronize()
            return offers

    play(script, Served())


def test_library_follows_the_files() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        before = len(its.sent)
        its.found = replace(its.library, models=(LoadableModel("c", SIZE),))
        await asyncio.sleep(3 * CHECK_INTERVAL)

        (changed,) = its.sent[before:]
        (offer,) = changed.offers  # type: ignore[union-attr]
        assert offer.library == its.found

    play(script)


PULLS = replace(LIBRARY, fetches=True)


def test_model_of_another_machine_is_copied_and_loaded() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("far")
        await asyncio.sleep(50.0 + LOADS + 2.0)

        assert its.end() == DONE
        assert its.offered == ["far"]
        assert its.orders.memory == NEED
        progress = its.progress()
        assert progress[0] == (None, "0 MB of 0 MB copied")
        assert progress[1][0] == pytest.approx(0.225)
        assert progress[3][0] == pytest.approx(0.675)
        assert progress[5][1] == "0 MB in memory"
        assert progress == sorted(progress, key=lambda each: each[0] or 0.0)

    play(script, Stage(PULLS))


def test_model_that_is_hashed_elsewhere_makes_progress() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("far")
        await asyncio.sleep(20 * 30.0 + 50.0 + LOADS + 2.0)

        assert its.end() == DONE
        hashed = [each for each in its.progress() if "hashes" in each[1]]
        assert hashed == [(None, "another machine hashes it, to send it")] * 20

    play(script, Stage(PULLS, hashing=20))


def test_model_that_cannot_be_copied_fails_its_order() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("missing")
        await asyncio.sleep(1.0)

        assert its.end() == Failed(JobId("load"), ONE, "no machine has it")
        assert its.opened == []

    play(script, Stage(PULLS))


def test_copied_model_beyond_the_memory_fails_its_order() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("far")
        await asyncio.sleep(60.0)

        end = its.end()
        assert isinstance(end, Failed)
        assert end.error.startswith("far needs 0 MB of memory")
        assert its.orders.memory == 0

    play(script, Stage(replace(PULLS, memory=NEED - 1)))


def test_cancelled_order_stops_the_copy() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.load("far")
        await asyncio.sleep(20.0)
        its.cancel("load")
        await asyncio.sleep(100.0)

        assert its.found is None
        assert its.opened == []

    play(script, Stage(PULLS))


class Moody(File):
    """A file whose load may fail."""

    async def start(self) -> None:
        if len(self.models[0].name) > 1:
            self.damage = "damaged"
        await super().start()


@pytest.mark.parametrize("seed", range(20))
def test_any_orders_leave_the_machine_in_order(seed: int) -> None:
    """Whatever is ordered, cancelled and cut: the memory holds, and all orders end."""
    random = Random(seed)
    names = ("a", "b", "c", "bad", "none")
    library = ModelLibrary(
        tuple(LoadableModel(name, SIZE) for name in names[:-1]), int(2.5 * NEED)
    )

    def check(its: Stage) -> None:
        used = [each for each in its.opened if each.open]
        assert NEED * len(used) <= its.library.memory
        assert len({each.models[0].name for each in used}) == len(used)

    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        jobs: list[str] = []
        cancelled: set[str] = set()
        for number in range(60):
            await asyncio.sleep(random.choice([0.0, 0.1, 5.0, 40.0]))
            check(its)
            match random.choices(range(5), [6, 4, 3, 4, 1])[0]:
                case 0:
                    jobs.append(f"load {number}")
                    its.load(random.choice(names), jobs[-1])
                case 1:
                    jobs.append(f"unload {number}")
                    its.unload(random.choice(names), jobs[-1])
                case 2 if jobs:
                    cancelled.add(random.choice(jobs))
                    its.cancel([*cancelled][-1])
                case 3:
                    its.give(f"chat {number}", chat(random.choice(names), 20.0))
                case _:
                    its.network.links[-1].cut()
                    await asyncio.sleep(10.0)
        await asyncio.sleep(20 * LOADS)

        check(its)
        ends = {job: its.end(job) for job in jobs}
        assert all(end or job in cancelled for job, end in ends.items()), ends
        loaded = sorted(each.models[0].name for each in its.opened if each.open)
        assert its.offered == loaded
        assert its.orders.memory == NEED * len(loaded)

    play(script, Stage(library, kind=Moody))


GROUP = ModelOrder(
    *(ModelAction.LOAD, "a", "me", 100, 1),
    group="a@1",
    shards=(Shard("anna", 20, 9000), Shard("me", 10, 3500)),
)
TERMS = MemoryLoan("ggml-rpc 8.0.0", "own key")


def lender(throttle: OwnerThrottle) -> Lender:
    """Return the lender of a machine that lends nothing."""

    async def start(folder: Path, cache: Path | None, memory: int) -> LentProcess:
        raise AssertionError("it lends nothing")

    nowhere = Path("nowhere")
    return Lender(TERMS, start, nowhere, "", throttle, lambda model, what: None)


def test_model_is_run_with_others_until_one_of_them_is_lost() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.give("load", GROUP)
        await asyncio.sleep(LOADS + 1.0)

        assert its.end() == DONE
        assert its.offered == ["a"]
        assert its.orders.memory == 3500
        offer = its.orders.offer
        assert offer is not None
        assert offer.library is not None
        assert offer.library.loan == replace(TERMS, groups=(GROUP,))
        its.load("b", "too much")
        await asyncio.sleep(1.0)
        assert isinstance(its.end("too much"), Failed)

        assert its.lost is not None
        its.lost.set_result("anna: silent for 5 s")
        await asyncio.sleep(1.0)

        assert its.offered == []
        assert its.opened[0].closed
        assert its.orders.memory == 0
        assert its.reports[-1] == ("failed", "a", "anna: silent for 5 s")
        offer = its.orders.offer
        assert offer is not None
        assert offer.library is not None
        assert offer.library.loan == TERMS

    throttle = OwnerThrottle()
    play(script, Stage(throttle=throttle, lender=lender(throttle)))


def test_machine_that_runs_nothing_with_others_says_so() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.give("load", GROUP)
        its.give("lend", replace(GROUP, action=ModelAction.LEND))
        await asyncio.sleep(1.0)

        for job in ("load", "lend"):
            reason = "this machine runs no models together with others"
            assert its.end(job) == Failed(JobId(job), ONE, reason)

    play(script)
