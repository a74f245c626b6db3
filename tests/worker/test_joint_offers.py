"""All models of several engines over one connection, in virtual time."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from shoal.domain.errors import ConfigError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    Completed,
    Draining,
    LoadChanged,
    OffersChanged,
    Rejected,
    RunJob,
)
from shoal.domain.work import ANY_MODEL, Chat, Embedding, Feature, JobKind, Task, Work
from shoal.domain.worker import Offer, ServedModel, WorkerLoad
from shoal.engines.engine import Finished, Item
from shoal.transports.clock import LoopClock
from shoal.worker.agent import Agent, WorkerEvent
from shoal.worker.jobs import EngineSlots, FindModel
from shoal.worker.model_offers import (
    CHECK_INTERVAL,
    MODELS_MAX,
    NOT_OFFERED,
    EngineMonitor,
    JointOffers,
    OfferedEngine,
    OfferedModel,
)
from simulation import virtual
from worker.test_agent import ALL, Network
from worker.test_separate_offers import Shelf as Engine

SOON = CHECK_INTERVAL + 2.0  # seconds in which a change is noticed
ONE = LeaseNumber(1)
EMBEDS = frozenset({JobKind.EMBEDDING})


class Large(Engine):
    """An engine whose model takes a minute to load."""

    loads = 0  # that began
    damage = ""

    async def start(self) -> None:
        self.loads += 1
        await asyncio.sleep(60.0)
        if self.damage:
            raise ConfigError(self.damage)


class Patient(Engine):
    """An engine that takes five seconds for any job."""

    async def run(
        self, work: Work, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Item, None]:
        await asyncio.sleep(5.0)
        yield "done"
        yield Finished()


@dataclass
class Stage:
    """Running joint offers and their environment."""

    engines: Sequence[Engine]
    network: Network = field(
        default_factory=lambda: Network(
            accepts=ALL | {OffersChanged, Rejected}, welcomes=True
        )
    )
    size: int = 2  # slots of each engine
    reports: list[tuple[str, str]] = field(default_factory=list)
    """Events and the names of the models that they are about."""

    reasons: dict[str, str] = field(default_factory=dict)
    """Why models left, by name."""

    unloaded: Sequence[Engine] = ()
    """Those of the engines that have to be loaded."""

    slots: list[EngineSlots] = field(default_factory=list)
    began_with: tuple[Offer, ...] = ()

    def enlist(
        self,
        find: FindModel,
        offers: tuple[Offer, ...],
        report: Callable[[WorkerEvent], None],
        on_admitted: Callable[[], None],
    ) -> Agent:
        self.began_with = offers
        return Agent(
            self.network,
            self.network.dial,
            find,
            LoopClock(),
            Random(1),
            report,
            offers=offers,
            slots=self.slots,
            on_admitted=on_admitted,
        )

    def on_event(self, item: OfferedModel | None, event: WorkerEvent) -> None:
        name = "" if item is None else item.model.name
        self.reports.append((event.kind, name))
        if event.kind == "left":
            self.reasons[name] = event.reason

    def assortment(self) -> JointOffers:
        for each in self.engines:
            each.slots = self.size
        self.slots = [
            EngineSlots(each.slots, engine=f"e{number}")
            for number, each in enumerate(self.engines)
        ]
        offered_engines = [
            OfferedEngine(
                EngineMonitor(
                    engine,
                    self._on_engine_event,
                    engine.start if engine in self.unloaded else None,
                ),
                lambda models: models,
                slots,
            )
            for engine, slots in zip(self.engines, self.slots, strict=True)
        ]
        return JointOffers(offered_engines, described, self.enlist, self.on_event)

    def _on_engine_event(self, event: WorkerEvent) -> None:
        self.reports.append((event.kind, "an engine"))

    @property
    def offered(self) -> dict[str, int]:
        """The offers sent last: slots by model."""
        last = [each for each in self.network.sent if isinstance(each, OffersChanged)][
            -1
        ]
        return {name: offer.slots for offer in last.offers for name in offer.models}

    def submit(self, name: str, work: Work) -> None:
        self.network.receive(RunJob(JobId(name), ONE, work))

    def answers(self, kind: type[Completed] | type[Rejected]) -> list[str]:
        return [each.job_id for each in self.network.sent if isinstance(each, kind)]


def described(model: ServedModel, slots: int) -> Offer:
    return Offer(model.kinds, frozenset({model.name}), slots, model.features)


def chat(model: str, seconds: float = 1.0) -> Chat:
    return Chat(model, ({"role": "user", "content": str(seconds)},))


Script = Callable[[Stage, JointOffers, "asyncio.Task[None]"], Awaitable[None]]


def play(stage: Stage, script: Script) -> None:
    async def scenario() -> None:
        assortment = stage.assortment()
        task = asyncio.create_task(assortment.run())
        await asyncio.sleep(1.0)
        try:
            await script(stage, assortment, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert all(each.jobs == 0 for each in stage.slots)

    virtual.run(scenario())


def test_all_models_of_all_offered_enginesare_offered_over_one_connection() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        assert len(its.network.links) == 1
        assert [next(iter(each.models)) for each in its.began_with] == ["a", "b", "c"]
        assert its.offered == {"a": 2, "b": 2, "c": 2}
        assert its.reports == [("joined", "a"), ("joined", "b"), ("joined", "c")]

    play(Stage([Engine("a", "b"), Engine("c")]), script)


def test_offers_follow_the_lists_of_models() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.reports.clear()
        its.engines[0].models = [ServedModel("b"), ServedModel("c")]
        await asyncio.sleep(SOON)

        assert its.offered == {"b": 2, "c": 2, "z": 2}
        assert its.reports == [("left", "a"), ("joined", "c")]
        assert its.reasons == {"a": NOT_OFFERED}
        assert len(its.network.links) == 1

    play(Stage([Engine("a", "b"), Engine("z")]), script)


def test_failed_engine_withdraws_only_its_models() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.reports.clear()
        its.engines[0].trouble = "connection refused"
        await asyncio.sleep(SOON)
        assert its.offered == {"b": 2}
        assert its.reports == [("unavailable", "an engine"), ("left", "a")]
        assert its.reasons == {"a": "the engine is unavailable: connection refused"}

        its.engines[0].trouble = None
        await asyncio.sleep(SOON)
        assert its.offered == {"a": 2, "b": 2}
        assert its.reports[2:] == [("available", "an engine"), ("joined", "a")]

    play(Stage([Engine("a"), Engine("b")]), script)


def test_worker_without_offered_enginesstays_connected() -> None:
    async def script(its: Stage, _: JointOffers, task: "asyncio.Task[None]") -> None:
        its.engines[0].trouble = "away"
        await asyncio.sleep(SOON)
        its.network.links[-1].cut()
        await asyncio.sleep(5.0)

        assert its.offered == {}
        assert its.reports[-2:] == [("lost", ""), ("joined", "")]
        assert not task.done()

    play(Stage([Engine("a")]), script)


def test_changes_between_connections_are_sent_on_the_next() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.network.down = True
        its.network.links[-1].cut()
        its.engines[0].models = [ServedModel("b")]
        await asyncio.sleep(SOON)
        assert its.offered == {"a": 2}
        its.reports.clear()

        its.network.down = False
        await asyncio.sleep(60.0)
        assert its.offered == {"b": 2}
        assert its.reports == [("joined", "b")]

    play(Stage([Engine("a")]), script)


def test_model_of_two_offered_enginesis_offered_once_with_all_slots() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        assert its.offered == {"a": 4}
        (offer,) = its.began_with
        assert offer.features == {Feature.STOP}
        assert offer.engine == "", "its slots are those of two engines"

        for number in range(4):
            its.submit(f"j{number}", chat("a", 5.0))
        await asyncio.sleep(1.0)
        assert [slots.jobs for slots in its.slots] == [2, 2]
        await asyncio.sleep(5.0)
        assert len(its.answers(Completed)) == 4

    both, one = Engine(), Engine()
    both.models = [ServedModel("a", features=frozenset({Feature.STOP, Feature.TOOLS}))]
    one.models = [ServedModel("a", features=frozenset({Feature.STOP}))]
    play(Stage([both, one]), script)


def test_model_with_other_kinds_of_the_same_name_is_omitted() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        (offer,) = its.began_with
        assert offer.kinds == {JobKind.CHAT}
        assert offer.slots == 2

    other = Engine()
    other.models = [ServedModel("a", EMBEDS)]
    play(Stage([Engine("a"), other]), script)


def test_work_goes_to_the_engine_that_has_the_model() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.submit("j", chat("b", 5.0))
        its.submit("k", Embedding("e", ("5.0",)))
        await asyncio.sleep(1.0)
        assert [slots.jobs for slots in its.slots] == [0, 1, 1]

        await asyncio.sleep(5.0)
        assert sorted(its.answers(Completed)) == ["j", "k"]

    embeds = Engine()
    embeds.models = [ServedModel("e", EMBEDS)]
    play(Stage([Engine("a"), Engine("b"), embeds]), script)


def test_work_for_any_model_goes_to_a_chat_model() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.submit("j", chat(ANY_MODEL, 5.0))
        its.submit("k", Task("summarize", {"input": "word"}))
        await asyncio.sleep(0.5)
        assert [slots.jobs for slots in its.slots] == [0, 2]

    embeds = Engine()
    embeds.models = [ServedModel("e", EMBEDS)]
    play(Stage([embeds, Patient("a")]), script)


def test_unoffered_model_is_rejected() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.submit("j", chat("b"))
        await asyncio.sleep(0.5)

        refused = Rejected(JobId("j"), ONE, "this worker does not offer b")
        assert refused in its.network.sent

    play(Stage([Engine("a")]), script)


def test_slots_follow_an_engine_that_is_restarted_with_others() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.engines[0].slots = 5
        await asyncio.sleep(SOON)
        assert its.offered == {"a": 5, "b": 5}

        its.engines[0].slots = 1
        await asyncio.sleep(SOON)
        assert its.offered == {"a": 1, "b": 1}
        for name in ("one", "two"):
            its.submit(name, chat("a"))
        await asyncio.sleep(1.5)
        assert its.answers(Completed) == ["one"]

    play(Stage([Engine("a", "b")]), script)


def test_model_is_rejected_while_others_hold_all_slots() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.submit("j", chat("a", 5.0))
        its.submit("k", chat("a", 5.0))
        its.submit("l", chat("b", 5.0))
        its.submit("m", chat("c", 5.0))
        await asyncio.sleep(0.5)

        assert its.answers(Rejected) == ["l"]

    play(Stage([Engine("a", "b"), Engine("c")]), script)


def test_refused_job_triggers_a_check_of_its_engine() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.engines[1].trouble = "out of order"
        its.engines[0].checks = 0
        its.submit("j", chat("b"))
        await asyncio.sleep(2.5)

        assert its.offered == {"a": 2}
        assert its.engines[0].checks == 0

    play(Stage([Engine("a"), Engine("b")]), script)


def test_running_job_finishes_after_its_model_is_withdrawn() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.submit("j", chat("a", 30.0))
        await asyncio.sleep(1.0)
        its.engines[0].models = []
        await asyncio.sleep(SOON)
        assert its.offered == {}

        await asyncio.sleep(30.0)
        assert its.answers(Completed) == ["j"]

    play(Stage([Engine("a")]), script)


def test_offered_models_are_limited() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        assert len(its.offered) == MODELS_MAX

    play(Stage([Engine(*map(str, range(MODELS_MAX + 9)))]), script)


def test_leave_waits_for_running_jobs() -> None:
    async def script(
        its: Stage, assortment: JointOffers, task: "asyncio.Task[None]"
    ) -> None:
        its.submit("j", chat("a", 30.0))
        await asyncio.sleep(1.0)

        assortment.leave()
        await asyncio.sleep(5.0)
        assert Draining("the worker is leaving") in its.network.sent
        assert not task.done()
        await task

        assert its.answers(Completed) == ["j"]
        assert its.reports[-2:] == [("left", "a"), ("left", "b")]

    play(Stage([Engine("a", "b")]), script)


def test_refused_worker_ends() -> None:
    async def script(its: Stage, _: JointOffers, task: "asyncio.Task[None]") -> None:
        its.network.links[-1].deliver("go away")

        async with asyncio.timeout(SOON):
            await task
        assert its.reasons == dict.fromkeys("ab", "choose another --name")

    network = Network(
        accepts=ALL | {OffersChanged}, farewell="choose another --name", welcomes=True
    )
    play(Stage([Engine("a", "b")], network), script)


def test_the_load_says_whether_a_slot_is_free_and_how_many_jobs_wait() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        for number, model in enumerate(["a", "b", "a"]):
            its.submit(f"j{number}", chat(model))
            await asyncio.sleep(1.0)
        await asyncio.sleep(20.0)

        assert [e.load for e in its.network.sent if isinstance(e, LoadChanged)] == [
            WorkerLoad(full=True),  # two slots for both models
            WorkerLoad(full=True, waiting=1),
            WorkerLoad(full=True),
            WorkerLoad(),
        ]

    accepts = (ALL - {Rejected}) | {OffersChanged, LoadChanged}
    play(Stage([Patient("a", "b")], Network(accepts=accepts, welcomes=True)), script)


def loading(*engines: Engine, network: Network | None = None) -> Stage:
    """Return a stage whose large engines have to be loaded."""
    unloaded = [each for each in engines if isinstance(each, Large)]
    stage = Stage(engines, unloaded=unloaded)
    stage.network = network or stage.network
    return stage


def test_a_model_is_loaded_once_the_worker_is_admitted() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        assert its.offered == {"b": 2}
        assert its.reports == [("joined", "b")]
        its.submit("early", chat("a"))
        await asyncio.sleep(1.0)
        assert its.answers(Rejected) == ["early"]

        await asyncio.sleep(58.25)
        assert its.offered == {"a": 2, "b": 2}
        assert its.reports == [("joined", "b")]  # the coordinator may not know it yet
        await asyncio.sleep(1.0)
        assert its.reports == [("joined", "b"), ("joined", "a")]
        its.submit("late", chat("a"))
        await asyncio.sleep(5.0)
        assert its.answers(Completed) == ["late"]

    play(loading(Large("a"), Engine("b")), script)


def test_a_refused_worker_loads_nothing() -> None:
    large = Large("a")

    async def script(its: Stage, _: JointOffers, task: "asyncio.Task[None]") -> None:
        its.network.links[-1].deliver("go away")
        async with asyncio.timeout(SOON):
            await task

        assert its.reports == [("refused", "")]
        assert large.loads == 0

    network = Network(accepts=ALL | {OffersChanged}, farewell="check --token")
    play(loading(large, network=network), script)


def test_a_worker_that_is_stopped_while_it_loads_has_not_joined() -> None:
    async def script(
        its: Stage, offering: JointOffers, task: "asyncio.Task[None]"
    ) -> None:
        offering.leave()
        async with asyncio.timeout(1.0):
            await task

        assert its.reports == []

    play(loading(Large("a")), script)


def test_a_worker_that_is_stopped_before_it_is_reported_has_not_joined() -> None:
    async def script(
        its: Stage, offering: JointOffers, task: "asyncio.Task[None]"
    ) -> None:
        await asyncio.sleep(59.25)
        assert its.offered == {"a": 2}
        offering.leave()
        await task

        assert its.reports == []

    play(loading(Large("a")), script)


def test_a_model_that_cannot_be_loaded_ends_the_worker() -> None:
    large = Large("a")
    large.damage = "a.gguf cannot be loaded"

    async def script(its: Stage, _: JointOffers, task: "asyncio.Task[None]") -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await task
        assert caught.group_contains(ConfigError, match="cannot be loaded")
        assert its.reports == []

    play(loading(large), script)


def test_a_connection_that_is_lost_while_a_model_loads_is_reported() -> None:
    async def script(its: Stage, _: JointOffers, __: "asyncio.Task[None]") -> None:
        its.network.links[-1].cut()
        await asyncio.sleep(5.0)
        assert its.reports == [("lost", "")]

        await asyncio.sleep(60.0)
        assert its.reports == [("lost", ""), ("joined", "a")]
        assert its.offered == {"a": 2}

    play(loading(Large("a")), script)
