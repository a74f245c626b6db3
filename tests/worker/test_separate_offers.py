"""Separate offers follow the models of an engine, in virtual time."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from msgspec.structs import replace

from shoal.domain.errors import Unavailable
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import Completed, Draining, RunJob
from shoal.domain.work import Chat, Work
from shoal.domain.worker import PAUSED, ServedModel
from shoal.engines.engine import Finished, Item
from shoal.transports.clock import LoopClock
from shoal.worker.agent import Agent, WorkerEvent
from shoal.worker.jobs import EngineSlots, only_model
from shoal.worker.model_offers import (
    AGENTS_MAX,
    CHANGED,
    CHECK_INTERVAL,
    CHECK_SOON,
    CHECK_TIMEOUT,
    NOT_OFFERED,
    EngineMonitor,
    SeparateOffers,
)
from shoal.worker.owner_throttle import OwnerThrottle
from simulation import virtual
from worker.test_agent import Network

SOON = CHECK_INTERVAL + 2.0  # seconds in which a change is noticed
ONE = LeaseNumber(1)


class Shelf:
    """An engine whose models a test removes and restores."""

    slots = 4

    def __init__(self, *names: str) -> None:
        self.models: Sequence[ServedModel] = [ServedModel(name) for name in names]
        self.trouble: str | None = None
        self.hangs = False
        self.checks = 0
        self.loads = 0.0  # seconds

    async def start(self) -> None:
        await asyncio.sleep(self.loads)

    async def refresh(self) -> None:
        self.checks += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.trouble is not None:
            raise Unavailable(self.trouble)

    async def run(
        self, work: Work, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Item, None]:
        if self.trouble is not None:
            raise Unavailable(self.trouble)
        await asyncio.sleep(float(work.text))
        yield "done"
        yield Finished()

    async def close(self) -> None:
        pass


@dataclass
class Stage:
    """Running separate offers, with a network for each agent."""

    engine: Shelf
    names: Callable[[Sequence[ServedModel]], Sequence[ServedModel]] = lambda models: (
        models
    )
    reports: list[WorkerEvent] = field(default_factory=list)
    agents: list[tuple[str, Agent, Network, list[WorkerEvent]]] = field(
        default_factory=list
    )
    farewell: str | None = None
    watch: EngineMonitor = field(init=False)

    throttle: OwnerThrottle = field(default_factory=OwnerThrottle)
    slots: EngineSlots = field(init=False)
    sizes: list[int] = field(default_factory=list)  # slots that agents offered
    admits: bool = True
    asked: list[str] = field(default_factory=list)  # about models to load

    def __post_init__(self) -> None:
        self.slots = EngineSlots(self.engine.slots, self.throttle)
        load = self.engine.start if self.engine.loads else None
        self.watch = EngineMonitor(self.engine, self.reports.append, load)

    def enlist(self, model: ServedModel) -> Agent:
        network, told = Network(farewell=self.farewell), list[WorkerEvent]()
        self.sizes.append(self.slots.size)
        agent = Agent(
            network,
            network.dial,
            only_model(self.engine, self.slots, self.watch.request_check),
            LoopClock(),
            Random(1),
            told.append,
        )
        self.agents.append((model.name, agent, network, told))
        return agent

    async def is_admitted(self, model: ServedModel) -> bool:
        self.asked.append(model.name)
        return self.admits

    @property
    def offered(self) -> list[str]:
        """The models that are offered."""
        return sorted(
            name
            for name, _, _, told in self.agents
            if not told or told[-1].kind != "left"
        )

    def network(self, name: str) -> Network:
        return next(net for n, _, net, _ in reversed(self.agents) if n == name)

    def left(self, name: str) -> str:
        """Why the last agent of that name left."""
        told = next(told for n, _, _, told in reversed(self.agents) if n == name)
        assert told[-1].kind == "left"
        return told[-1].reason

    def submit(self, name: str, seconds: float) -> None:
        message = {"role": "user", "content": str(seconds)}
        self.network(name).receive(RunJob(JobId("j"), ONE, Chat(name, (message,))))


Script = Callable[[Stage, SeparateOffers, "asyncio.Task[None]"], Awaitable[None]]


def play(stage: Stage, script: Script) -> None:
    async def scenario() -> None:
        offering = SeparateOffers(
            stage.watch,
            stage.names,
            stage.enlist,
            stage.is_admitted,
            stage.slots,
            stage.throttle,
        )
        task = asyncio.create_task(offering.run())
        await asyncio.sleep(1.0)
        try:
            await script(stage, offering, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    virtual.run(scenario())


def test_offers_follow_the_list_of_models() -> None:
    async def script(its: Stage, _: SeparateOffers, __: "asyncio.Task[None]") -> None:
        assert its.offered == ["a", "b"]

        its.engine.models = [ServedModel("b"), ServedModel("c")]
        await asyncio.sleep(SOON)

        assert its.offered == ["b", "c"]
        assert its.left("a") == NOT_OFFERED
        assert its.reports == []

    play(Stage(Shelf("a", "b")), script)


def test_only_selected_models_are_offered() -> None:
    async def script(its: Stage, _: SeparateOffers, __: "asyncio.Task[None]") -> None:
        assert its.offered == ["short"]

    def choose(models: Sequence[ServedModel]) -> Sequence[ServedModel]:
        return [replace(m, name="short") for m in models if m.name == "a:latest"]

    play(Stage(Shelf("a:latest", "b"), choose), script)


def test_offered_models_are_limited() -> None:
    async def script(its: Stage, _: SeparateOffers, __: "asyncio.Task[None]") -> None:
        assert len(its.offered) == AGENTS_MAX

    play(Stage(Shelf(*map(str, range(AGENTS_MAX + 9)))), script)


def test_failed_engine_is_withdrawn_until_it_recovers() -> None:
    async def script(its: Stage, _: SeparateOffers, __: "asyncio.Task[None]") -> None:
        its.engine.trouble = "connection refused"
        await asyncio.sleep(5 * SOON)
        assert its.offered == []
        assert its.left("a") == "the engine is unavailable: connection refused"

        its.engine.trouble = None
        await asyncio.sleep(SOON)

        assert its.offered == ["a", "b"]
        assert its.reports == [
            WorkerEvent("unavailable", "connection refused"),
            WorkerEvent("available"),
        ]

    play(Stage(Shelf("a", "b")), script)


def test_hanging_engine_is_withdrawn_after_two_checks() -> None:
    async def script(its: Stage, _: SeparateOffers, __: "asyncio.Task[None]") -> None:
        its.engine.hangs = True
        await asyncio.sleep(CHECK_INTERVAL + CHECK_TIMEOUT + 1.0)
        assert its.offered == ["a"], "it may only be busy"

        await asyncio.sleep(CHECK_INTERVAL + CHECK_TIMEOUT + 1.0)
        assert its.offered == []
        assert its.reports == [
            WorkerEvent("unavailable", f"no answer within {CHECK_TIMEOUT:g} s")
        ]

        its.engine.hangs = False
        await asyncio.sleep(CHECK_TIMEOUT + SOON)
        assert its.offered == ["a"]

    play(Stage(Shelf("a")), script)


def test_a_paused_worker_offers_no_model_until_it_resumes() -> None:
    async def script(its: Stage, _: SeparateOffers, task: "asyncio.Task[None]") -> None:
        its.submit("a", 30.0)
        network = its.network("a")

        its.throttle.set(0)
        await asyncio.sleep(CHECK_SOON + 1.0)
        assert its.offered == ["a"], "its job is running"
        assert its.left("b") == PAUSED
        assert Draining(PAUSED) in network.sent

        await asyncio.sleep(30.0)
        assert [type(each) for each in network.sent][-1] is Completed
        assert its.offered == []
        assert its.left("a") == PAUSED
        await asyncio.sleep(10 * SOON)
        assert its.offered == []
        assert not task.done()

        its.throttle.set(50)
        await asyncio.sleep(CHECK_SOON + 1.0)
        assert its.offered == ["a", "b"]
        assert its.sizes == [4, 4, 2, 2]

    play(Stage(Shelf("a", "b")), script)


def test_other_slots_are_offered_anew_once_no_job_runs() -> None:
    async def script(its: Stage, _: SeparateOffers, __: "asyncio.Task[None]") -> None:
        its.submit("a", 30.0)
        its.throttle.set(50)
        await asyncio.sleep(SOON)
        assert its.sizes == [4]

        await asyncio.sleep(30.0 + 2 * SOON)
        assert its.offered == ["a"]
        assert its.sizes == [4, 2]

    play(Stage(Shelf("a")), script)


def test_slots_follow_an_engine_that_is_restarted_with_others() -> None:
    async def script(its: Stage, _: SeparateOffers, __: "asyncio.Task[None]") -> None:
        its.engine.slots = 8
        await asyncio.sleep(2 * SOON)
        assert its.offered == ["a"]
        assert its.sizes == [4, 8]

    play(Stage(Shelf("a")), script)


def test_refused_job_triggers_a_check() -> None:
    async def script(its: Stage, _: SeparateOffers, __: "asyncio.Task[None]") -> None:
        its.engine.trouble = "out of order"
        its.submit("a", 1.0)
        await asyncio.sleep(2.5)

        assert its.offered == []

    play(Stage(Shelf("a")), script)


def test_many_refusals_trigger_few_checks() -> None:
    async def script(its: Stage, _: SeparateOffers, __: "asyncio.Task[None]") -> None:
        its.engine.checks = 0
        for _number in range(100):
            its.watch.request_check()
            await asyncio.sleep(0.1)

        assert its.engine.checks <= 11

    play(Stage(Shelf("a")), script)


def test_running_job_finishes_before_its_model_is_withdrawn() -> None:
    async def script(its: Stage, _: SeparateOffers, __: "asyncio.Task[None]") -> None:
        its.submit("a", 30.0)
        await asyncio.sleep(1.0)
        its.engine.models = []
        await asyncio.sleep(SOON)
        assert its.offered == ["a"]
        assert its.network("a").sent == [Draining(NOT_OFFERED)]

        its.engine.models = [ServedModel("a")]
        await asyncio.sleep(30.0)

        assert isinstance(its.agents[0][2].sent[-1], Completed)
        assert len(its.agents) == 2, "it is back as a new one"
        assert its.offered == ["a"]

    play(Stage(Shelf("a")), script)


def test_changed_model_rejoins_once_it_is_idle() -> None:
    async def script(its: Stage, _: SeparateOffers, __: "asyncio.Task[None]") -> None:
        its.submit("a", 30.0)
        await asyncio.sleep(1.0)
        its.engine.models = [ServedModel("a", context=9)]
        await asyncio.sleep(SOON)
        assert len(its.agents) == 1

        await asyncio.sleep(2 * SOON + 10.0)

        assert its.agents[0][3][-1] == WorkerEvent("left", CHANGED)
        assert len(its.agents) == 2
        assert its.offered == ["a"]

    play(Stage(Shelf("a")), script)


def test_leave_waits_for_running_jobs() -> None:
    async def script(
        its: Stage, offering: SeparateOffers, task: "asyncio.Task[None]"
    ) -> None:
        its.submit("a", 30.0)
        await asyncio.sleep(1.0)

        offering.leave()
        await asyncio.sleep(5.0)
        assert its.offered == ["a"]
        await task

        assert its.offered == []
        assert isinstance(its.network("a").sent[-1], Completed)

    play(Stage(Shelf("a", "b")), script)


def test_leave_is_immediate_without_an_engine() -> None:
    async def script(
        its: Stage, offering: SeparateOffers, task: "asyncio.Task[None]"
    ) -> None:
        its.engine.trouble = "away"
        await asyncio.sleep(SOON)

        offering.leave()
        async with asyncio.timeout(1.0):
            await task

    play(Stage(Shelf("a")), script)


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_offers_end_when_all_models_are_refused(names: list[str]) -> None:
    async def script(its: Stage, _: SeparateOffers, task: "asyncio.Task[None]") -> None:
        for name in names:
            its.network(name).links[-1].deliver("go away")

        async with asyncio.timeout(SOON):
            await task
        assert {its.left(name) for name in names} == {"choose another --name"}

    play(Stage(Shelf(*names), farewell="choose another --name"), script)


def test_refused_model_stays_withdrawn_and_others_stay() -> None:
    async def script(its: Stage, _: SeparateOffers, task: "asyncio.Task[None]") -> None:
        its.network("a").links[-1].deliver("go away")
        await asyncio.sleep(5 * SOON)

        assert its.offered == ["b"]
        assert len(its.agents) == 2
        assert not task.done()

    play(Stage(Shelf("a", "b"), farewell="choose another --name"), script)


def large(*names: str) -> Shelf:
    """Return an engine that has to be loaded."""
    shelf = Shelf(*names)
    shelf.loads = 60.0
    return shelf


def test_a_model_is_loaded_once_the_coordinator_admits_it() -> None:
    async def script(its: Stage, _: SeparateOffers, __: "asyncio.Task[None]") -> None:
        assert its.asked == ["a"]
        assert its.offered == []

        await asyncio.sleep(61.0)
        assert its.offered == ["a"]

    play(Stage(large("a")), script)


def test_a_model_that_the_coordinator_refuses_is_not_loaded() -> None:
    async def script(its: Stage, _: SeparateOffers, task: "asyncio.Task[None]") -> None:
        assert task.done()
        assert its.watch.expected_models

    play(Stage(large("a"), admits=False), script)


def test_loading_ends_when_the_worker_leaves() -> None:
    async def script(
        its: Stage, offering: SeparateOffers, task: "asyncio.Task[None]"
    ) -> None:
        offering.leave()
        async with asyncio.timeout(1.0):
            await task
        assert its.offered == []

    play(Stage(large("a")), script)
