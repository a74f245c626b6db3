"""Orders about the models of servers, over one connection, in virtual time."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from engines.model_servers import GIB, KINDS, LmStudio, Ollama, SleepingVllm, StandIn
from shoal.domain.ids import JobId
from shoal.domain.vocabulary import Completed, Failed, Rejected
from shoal.domain.work import JobKind, ModelAction, ModelOrder, Work
from shoal.domain.worker import ModelLibrary, Offer, ServedModel
from shoal.engines.catalog import ListedModel, ServerQuery, ServerReply
from shoal.engines.engine import Item
from shoal.engines.server_control import ServerControl
from shoal.engines.server_kinds import LLAMA_SERVER, LM_STUDIO, OLLAMA, VLLM
from shoal.worker.jobs import EngineSlots
from shoal.worker.model_offers import (
    CHECK_INTERVAL,
    EngineMonitor,
    JointOffers,
    OfferedEngine,
)
from shoal.worker.model_orders import ModelOrders
from shoal.worker.server_orders import LOAD_MAX, PROGRESS_INTERVAL, ControlledServer
from simulation import virtual
from worker.test_model_orders import DONE, LOADS, ONE, Stage, chat, described
from worker.test_separate_offers import Shelf

SERVERS = {"library": OLLAMA, "organization_owner": LM_STUDIO}
SERVERS |= {"llamacpp": LLAMA_SERVER, "vllm": VLLM}


class Served(Shelf):
    """An engine in front of a stand-in; a load takes a minute of virtual time."""

    def __init__(self, server: StandIn) -> None:
        super().__init__()
        self.server = server
        self.control = ServerControl(self.query)
        self.seconds = LOADS

    async def query(self, query: ServerQuery) -> ServerReply:
        before = len(self.server.orders)
        reply = await self.server.query(query)
        ends = any(each in query.path for each in ("unload", "/sleep"))
        ends |= b"keep_alive" in (query.body or b"")
        if self.server.orders[before:] and not ends:
            await asyncio.sleep(self.seconds)
        return reply

    async def refresh(self) -> None:
        names = self.server.models
        listed = [ListedModel(ServedModel(each), each) for each in names]
        kind = SERVERS[self.server.owner]
        found = await self.control.refresh(kind, listed)
        self._found = [each.model for each in found]

    @property
    def models(self) -> Sequence[ServedModel]:
        found: Sequence[ServedModel] = getattr(self, "_found", ())
        return [each for each in found if not self.control.is_leaving(each.name)]

    @models.setter
    def models(self, models: Sequence[ServedModel]) -> None:
        """Its models are those of the server."""

    async def run(
        self, work: Work, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Item, None]:
        counted = self.control.begin(work.model)
        try:
            async for each in super().run(work, continues, thoughts):
                yield each
        finally:
            self.control.end(counted)


@dataclass
class ServerStage(Stage):
    """A worker in front of a server."""

    server: StandIn = field(default_factory=lambda: Ollama("a", "b"))
    memory: int = 0

    def __post_init__(self) -> None:
        self.engine = Served(self.server)

    def offers(self) -> JointOffers:
        control = self.engine.control
        offered = OfferedEngine(
            EngineMonitor(self.engine, lambda event: None),
            lambda models: models,
            EngineSlots(4, self.throttle),
        )
        self.orders = ModelOrders(
            lambda: ModelLibrary(
                tuple(control.library(lambda models: models)), self.memory
            ),
            self.scan,
            lambda library: Offer(frozenset({JobKind.MODEL}), slots=2, library=library),
            self.open_engine,
            lambda name, event: self.reports.append((event.kind, name, event.reason)),
            EngineSlots(2, self.throttle),
            servers=[ControlledServer(offered, control)],
        )
        self.slots = [offered.slots]
        return JointOffers(
            *([offered], described, self.enlist, self.on_event),
            orders=self.orders,
            slots=self.slots,
        )


Script = Callable[[ServerStage, JointOffers], Awaitable[None]]


def play(script: Script, stage: ServerStage) -> None:
    async def scenario() -> None:
        await stage.engine.refresh()
        offers = stage.offers()
        task = asyncio.create_task(offers.run())
        await asyncio.sleep(1.0)
        try:
            await script(stage, offers)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    virtual.run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_orders_are_carried_out_by_the_server(kind: type[StandIn]) -> None:
    async def script(its: ServerStage, _: JointOffers) -> None:
        its.load("a")
        await asyncio.sleep(LOADS + 5.0)
        assert its.end() == DONE
        assert its.offered == ["a"]
        assert its.progress()[0] == (None, "the server loads it")
        assert ("loading", "a", "on order") in its.reports

        its.unload("a")
        await asyncio.sleep(LOADS + 5.0)
        assert its.end("unload") is not None
        assert its.offered == []
        assert its.server.loaded == []

    play(script, ServerStage(server=kind("a")))


def test_many_orders_for_a_model_are_one_load() -> None:
    async def script(its: ServerStage, _: JointOffers) -> None:
        its.load("a", "one")
        its.load("a", "two")
        await asyncio.sleep(LOADS + 5.0)

        assert [type(its.end(each)) for each in ("one", "two")] == [Completed] * 2
        assert len(its.server.orders) == 1

    play(script, ServerStage())


def test_a_cancelled_order_leaves_the_load_to_the_server() -> None:
    async def script(its: ServerStage, _: JointOffers) -> None:
        its.load("a", "one")
        await asyncio.sleep(PROGRESS_INTERVAL)
        its.cancel("one")
        its.load("a", "two")
        await asyncio.sleep(LOADS)

        assert its.end("two") == Completed(JobId("two"), ONE)
        assert len(its.server.orders) == 1

    play(script, ServerStage())


def test_a_load_fails_with_the_servers_words() -> None:
    async def script(its: ServerStage, _: JointOffers) -> None:
        its.server.broken = "out of memory"
        its.load("a")
        await asyncio.sleep(LOADS + 5.0)

        failed = Failed(JobId("load"), ONE, "Ollama: out of memory")
        assert its.end() == failed
        assert ("failed", "a", "Ollama: out of memory") in its.reports

    play(script, ServerStage())


def test_a_stuck_load_is_given_up() -> None:
    async def script(its: ServerStage, _: JointOffers) -> None:
        its.engine.seconds = 10 * LOAD_MAX
        its.load("a")
        await asyncio.sleep(LOAD_MAX + 10.0)

        end = its.end()
        assert isinstance(end, Failed)
        assert end.error == "the server did not load it within 900 s"

    play(script, ServerStage())


def test_a_model_is_unloaded_when_its_jobs_have_ended() -> None:
    async def script(its: ServerStage, _: JointOffers) -> None:
        its.give("chat", chat("a", 30.0))
        its.give("other", chat("b", 500.0))  # not waited for
        await asyncio.sleep(1.0)
        its.unload("a")
        await asyncio.sleep(10.0)
        assert its.offered == ["b"]
        its.give("late", chat("a", 1.0))
        await asyncio.sleep(1.0)
        assert isinstance(its.end("late"), Rejected)
        assert its.server.loaded == ["a", "b"]

        await asyncio.sleep(30.0 + LOADS)
        assert its.end("chat") is not None
        assert isinstance(its.end("unload"), Completed)
        assert its.server.loaded == ["b"]

    play(script, ServerStage(server=Ollama("a", "b", loaded=("a", "b"))))


def test_a_cancelled_unload_offers_the_model_again() -> None:
    async def script(its: ServerStage, _: JointOffers) -> None:
        its.give("chat", chat("a", 30.0))
        await asyncio.sleep(1.0)
        its.unload("a")
        await asyncio.sleep(1.0)
        its.cancel("unload")
        await asyncio.sleep(1.0)

        assert its.offered == ["a"]
        assert its.server.orders == []

    play(script, ServerStage(server=LmStudio("a", loaded=("a",))))


def test_an_order_beyond_the_memory_fails_with_numbers() -> None:
    async def script(its: ServerStage, _: JointOffers) -> None:
        its.load("b")
        await asyncio.sleep(1.0)

        end = its.end()
        assert isinstance(end, Failed)
        assert end.error == (
            "b needs 3.2 GB of memory, and of the 4.3 GB that this machine lends to "
            "models, 3.2 GB are taken; unload another, or raise --memory there"
        )
        assert its.server.orders == []

    server = Ollama("a", "b", loaded=("a",))
    play(script, ServerStage(server=server, memory=4 * GIB))


def test_what_the_owner_does_by_hand_is_followed() -> None:
    async def script(its: ServerStage, _: JointOffers) -> None:
        assert its.offered == []
        its.server.loaded.append("b")
        await asyncio.sleep(2 * CHECK_INTERVAL)
        assert its.offered == ["b"]
        its.server.loaded.clear()
        await asyncio.sleep(2 * CHECK_INTERVAL)
        assert its.offered == []
        its.unload("b")
        await asyncio.sleep(1.0)
        assert isinstance(its.end("unload"), Completed)

    play(script, ServerStage())


@pytest.mark.parametrize("seed", range(8))
def test_any_orders_leave_what_the_server_says(seed: int) -> None:
    random = Random(seed)

    async def script(its: ServerStage, _: JointOffers) -> None:
        jobs = []
        for number in range(30):
            name, job = random.choice(its.server.models), f"job-{number}"
            action = random.choice([*ModelAction])
            its.give(job, ModelOrder(action, name, "me"))
            await asyncio.sleep(random.choice([0.0, 1.0, LOADS]))
            if random.random() < 0.3:
                its.cancel(job)
            else:
                jobs.append(job)
        await asyncio.sleep(60 * LOADS)

        assert all(its.end(each) is not None for each in jobs)
        assert its.offered == sorted(its.server.loaded)

    servers = [Ollama("a", "b"), LmStudio("a", "b"), SleepingVllm("a")]
    play(script, ServerStage(server=servers[seed % 3]))
