"""Keeps the offered models in step with the engines' models.

On a wire that carries many models, one agent offers all of them (``JointOffers``);
elsewhere each model has an agent of its own (``SeparateOffers``).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.domain.work import ANY_MODEL, JobKind, Task, Work
from shoal.domain.worker import Offer, ServedModel
from shoal.engines.text_tasks import TaskRunner
from shoal.worker.agent import STOPPED, Agent, WorkerEvent
from shoal.worker.engine_monitor import EngineMonitor
from shoal.worker.jobs import EngineSlots, FindModel, ModelBackend

AGENTS_MAX = 64  # offered models of one engine; each has a connection

NOT_OFFERED = "the engine no longer lists it"
CHANGED = "the engine changed its description"


@dataclass(slots=True)
class ModelMembership:
    """The agent of one model."""

    model: ServedModel
    agent: Agent
    task: asyncio.Task[str]
    told_to_leave: bool = False

    def leave(self, reason: str) -> None:
        self.told_to_leave = True
        self.agent.leave(reason)


class SeparateOffers:
    """Offers one engine's models to one coordinator, each by an agent of its own.

    The offers follow the engine's list of models, and are withdrawn while the engine
    does not answer.

    Args:
        choose: selects the models to offer, and their names.
        enlist: creates the agent for a model.
    """

    def __init__(
        self,
        watch: EngineMonitor,
        choose: Callable[[Sequence[ServedModel]], Sequence[ServedModel]],
        enlist: Callable[[ServedModel], Agent],
    ) -> None:
        self._watch = watch
        self._choose = choose
        self._enlist = enlist
        self._members: dict[str, ModelMembership] = {}
        self._over: set[str] = set()  # models that the coordinator refused for good
        self._leaving = asyncio.Event()

    async def run(self) -> None:
        """Offer models until ``leave`` or a final refusal."""
        async with asyncio.TaskGroup() as tasks:
            while self._synchronize(tasks):
                await self._watch.wait(self._leaving)
                if not self._leaving.is_set():
                    await self._watch.check()

    def leave(self) -> None:
        """Accept no more jobs, finish the running ones, and end ``run``."""
        self._leaving.set()
        self._watch.request_check()
        for member in self._members.values():
            member.leave(STOPPED)

    def _synchronize(self, tasks: asyncio.TaskGroup) -> bool:
        """Start and stop agents; return False once all models are refused."""
        self._remove_ended()
        if self._leaving.is_set():
            return False
        why_away = self._watch.unavailable_reason
        models = self._choose(self._watch.models)[:AGENTS_MAX]
        wanted = {each.name: each for each in models}
        for name, member in self._members.items():
            if name not in wanted:
                member.leave(why_away or NOT_OFFERED)
            elif member.model != wanted[name] and member.agent.idle:
                # A profile cannot change: the model leaves and joins again.
                member.leave(CHANGED)
        for name in wanted.keys() - self._members.keys() - self._over:
            agent = self._enlist(wanted[name])
            task = tasks.create_task(agent.run())
            task.add_done_callback(lambda _: self._watch.request_check())
            self._members[name] = ModelMembership(wanted[name], agent, task)
        sent_away = self._over and not self._members
        return not (sent_away and why_away is None)

    def _remove_ended(self) -> None:
        for name, member in list(self._members.items()):
            if member.task.done():
                del self._members[name]
                if not member.told_to_leave:
                    self._over.add(name)


MODELS_MAX = 256  # offered models of all engines


@dataclass(frozen=True, slots=True)
class OfferedEngine:
    """An engine, and the selection of its models."""

    monitor: EngineMonitor
    select: Callable[[Sequence[ServedModel]], Sequence[ServedModel]]
    slots: EngineSlots


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """An offered model, with its backends.

    If several engines have it, the offer is what all of them support.
    """

    model: ServedModel
    backends: tuple[ModelBackend, ...]

    @property
    def slots(self) -> int:
        """The number of concurrent jobs, if the engines have no others."""
        return sum(place.slots.size for place in self.backends)


class JointOffers:
    """Offers the models of engines to one coordinator, by one agent.

    The offers follow the engines' lists of models; those of an engine are withdrawn
    while it does not answer.

    Args:
        describe: returns the offer of a model with a number of slots.
        enlist: creates the agent from a finder of models, the first offers, and a
            receiver of events.
        tell: receives the events of a model, or of None if there is no model.
    """

    def __init__(
        self,
        shelves: Sequence[OfferedEngine],
        describe: Callable[[ServedModel, int], Offer],
        enlist: Callable[
            [FindModel, tuple[Offer, ...], Callable[[WorkerEvent], None]], Agent
        ],
        tell: Callable[[OfferedModel | None, WorkerEvent], None],
    ) -> None:
        self._shelves = shelves
        self._describe = describe
        self._tell = tell
        self._places: dict[tuple[int, ServedModel], ModelBackend] = {}
        self._stock: Mapping[str, OfferedModel] = self._current_models()
        self._there = False  # whether the agent has joined
        self._leaving = asyncio.Event()
        self._agent = enlist(self._find, self._offers(), self._report)

    async def run(self) -> None:
        """Offer models until ``leave`` or a final refusal."""
        async with asyncio.TaskGroup() as tasks:
            looking = [tasks.create_task(self._poll(each)) for each in self._shelves]
            await self._agent.run()
            for each in looking:
                each.cancel()

    def leave(self) -> None:
        """Accept no more jobs, finish the running ones, and end ``run``."""
        self._leaving.set()
        self._agent.leave(STOPPED)

    async def _poll(self, shelf: OfferedEngine) -> None:
        while not self._leaving.is_set():
            await shelf.monitor.wait(self._leaving)
            if not self._leaving.is_set():
                await shelf.monitor.check()
                self._synchronize()

    def _synchronize(self) -> None:
        """Report added and removed models to the coordinator and the user."""
        before, self._stock = self._stock, self._current_models()
        if _described(before) == _described(self._stock):
            return
        self._agent.update_offers(self._offers())
        if not self._there:
            return
        for name in before.keys() - self._stock.keys():
            self._tell(before[name], WorkerEvent("left", self._why_gone(before[name])))
        for name in self._stock.keys() - before.keys():
            self._tell(self._stock[name], WorkerEvent("joined"))

    def _why_gone(self, stock: OfferedModel) -> str:
        for shelf in self._shelves:
            if (
                shelf.slots is stock.backends[0].slots
                and shelf.monitor.unavailable_reason
            ):
                return shelf.monitor.unavailable_reason
        return NOT_OFFERED

    def _report(self, happening: WorkerEvent) -> None:
        """Report an event of the agent for each offered model."""
        self._there = happening.event == "joined"
        for stock in self._stock.values() or (None,):
            self._tell(stock, happening)

    def _offers(self) -> tuple[Offer, ...]:
        return tuple(
            self._describe(stock.model, stock.slots) for stock in self._stock.values()
        )

    def _current_models(self) -> Mapping[str, OfferedModel]:
        """Return the models of all engines by name, in the engines' order."""
        there = {
            (number, model): shelf
            for number, shelf in enumerate(self._shelves)
            for model in shelf.select(shelf.monitor.models)
        }
        self._places = {
            key: self._places.get(key) or _backend(shelf, key[1])
            for key, shelf in there.items()
        }
        found: dict[str, OfferedModel] = {}
        for (_, model), place in self._places.items():
            stock = found.get(model.name, OfferedModel(model, ()))
            # With other kinds of jobs, it is another model of the same name.
            if stock.model.kinds == model.kinds:
                both = _common(stock.model, model)
                found[model.name] = OfferedModel(both, (*stock.backends, place))
        return dict(list(found.items())[:MODELS_MAX])

    def _find(self, work: Work) -> ModelBackend | None:
        """Return the backend with the most free slots; None if no model fits.

        The first one wins a tie.
        """
        if isinstance(work, Task) or work.model == ANY_MODEL:
            chatting = (each for each in self._stock.values() if _chats(each.model))
            places = [place for stock in chatting for place in stock.backends]
        else:
            stock = self._stock.get(work.model)
            places = [] if stock is None else list(stock.backends)
        return max(places, key=lambda place: place.free_slots, default=None)


def _backend(shelf: OfferedEngine, model: ServedModel) -> ModelBackend:
    runner = TaskRunner(shelf.monitor.engine, model)
    return ModelBackend(runner, shelf.slots, shelf.monitor.request_check)


def _common(one: ServedModel, other: ServedModel) -> ServedModel:
    """Return what both of two engines support for a model."""
    contexts = [each.context for each in (one, other) if each.context]
    features = one.features & other.features
    return ServedModel(one.name, one.kinds, features, min(contexts, default=0))


def _chats(model: ServedModel) -> bool:
    return JobKind.CHAT in model.kinds


def _described(stocks: Mapping[str, OfferedModel]) -> list[tuple[ServedModel, int]]:
    return [(stock.model, stock.slots) for stock in stocks.values()]
