"""Keeps the models that are offered in step with what the engines can run.

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

AGENTS_MAX = 64  # models of one engine that are offered: each is a connection

NOT_OFFERED = "the engine does not offer it any more"
CHANGED = "the engine describes it anew"


@dataclass(slots=True)
class ModelMembership:
    """An agent at work for one model."""

    model: ServedModel
    agent: Agent
    task: asyncio.Task[str]
    told_to_leave: bool = False

    def leave(self, reason: str) -> None:
        self.told_to_leave = True
        self.agent.leave(reason)


class SeparateOffers:
    """One engine's models at one coordinator, each with an agent of its own.

    Models come and go as the engine's list does.  An engine that does not answer is
    withdrawn, and offered again when it does.

    Args:
        choose: which of the engine's models to offer, under which names.
        enlist: makes an agent for a model.
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
        self._over: set[str] = set()  # models that the coordinator sent away for good
        self._leaving = asyncio.Event()

    async def run(self) -> None:
        """Offer what there is until told to leave, or until nobody wants it."""
        async with asyncio.TaskGroup() as tasks:
            while self._put_in_step(tasks):
                await self._watch.wait(self._leaving)
                if not self._leaving.is_set():
                    await self._watch.check()

    def leave(self) -> None:
        """Finish what runs, take nothing new, and end ``run``."""
        self._leaving.set()
        self._watch.request_check()
        for member in self._members.values():
            member.leave(STOPPED)

    def _put_in_step(self, tasks: asyncio.TaskGroup) -> bool:
        """Let agents join and leave; return whether there is a point in going on."""
        self._forget_those_who_left()
        if self._leaving.is_set():
            return False
        why_away = self._watch.unavailable_reason
        models = self._choose(self._watch.models)[:AGENTS_MAX]
        wanted = {each.name: each for each in models}
        for name, member in self._members.items():
            if name not in wanted:
                member.leave(why_away or NOT_OFFERED)
            elif member.model != wanted[name] and member.agent.idle:
                # What it joined as cannot be changed.  It is back in a moment.
                member.leave(CHANGED)
        for name in wanted.keys() - self._members.keys() - self._over:
            agent = self._enlist(wanted[name])
            task = tasks.create_task(agent.run())
            task.add_done_callback(lambda _: self._watch.request_check())
            self._members[name] = ModelMembership(wanted[name], agent, task)
        sent_away = self._over and not self._members
        return not (sent_away and why_away is None)

    def _forget_those_who_left(self) -> None:
        for name, member in list(self._members.items()):
            if member.task.done():
                del self._members[name]
                if not member.told_to_leave:
                    self._over.add(name)


MODELS_MAX = 256  # offered in all: each is a worker to the coordinator


@dataclass(frozen=True, slots=True)
class OfferedEngine:
    """An engine, and which of its models to offer, under which names."""

    monitor: EngineMonitor
    select: Callable[[Sequence[ServedModel]], Sequence[ServedModel]]
    slots: EngineSlots


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model on offer: what can be done with it wherever it is, and where that is.

    Several engines may have it; it can do what all of them can.
    """

    model: ServedModel
    backends: tuple[ModelBackend, ...]

    @property
    def slots(self) -> int:
        """How many jobs run at a time, if the engines have no others."""
        return sum(place.slots.size for place in self.backends)


class JointOffers:
    """Engines' models at one coordinator, with one agent for all of them.

    Models come and go as the engines' lists do.  An engine that does not answer is
    withdrawn with its models, and offered again when it does.

    Args:
        describe: makes an offer of a model, for so many jobs at a time.
        enlist: makes the agent, of where jobs go, what is offered to begin with, and
            what is to be told of what happens to it.
        tell: told what happens to a model, for so many jobs at a time; or to None, if
            there is no model.
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
        self._stock: Mapping[str, OfferedModel] = self._take_stock()
        self._there = False  # whether the agent has joined
        self._leaving = asyncio.Event()
        self._agent = enlist(self._find, self._offers(), self._report)

    async def run(self) -> None:
        """Offer what there is until told to leave, or until nobody wants it."""
        async with asyncio.TaskGroup() as tasks:
            looking = [tasks.create_task(self._look_at(each)) for each in self._shelves]
            await self._agent.run()
            for each in looking:
                each.cancel()

    def leave(self) -> None:
        """Finish what runs, take nothing new, and end ``run``."""
        self._leaving.set()
        self._agent.leave(STOPPED)

    async def _look_at(self, shelf: OfferedEngine) -> None:
        while not self._leaving.is_set():
            await shelf.monitor.wait(self._leaving)
            if not self._leaving.is_set():
                await shelf.monitor.check()
                self._put_in_step()

    def _put_in_step(self) -> None:
        """Let the coordinator and the user know what has come and gone."""
        before, self._stock = self._stock, self._take_stock()
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
        """Tell what happened to the agent of each model that it offers."""
        self._there = happening.event == "joined"
        for stock in self._stock.values() or (None,):
            self._tell(stock, happening)

    def _offers(self) -> tuple[Offer, ...]:
        return tuple(
            self._describe(stock.model, stock.slots) for stock in self._stock.values()
        )

    def _take_stock(self) -> Mapping[str, OfferedModel]:
        """Return what the engines can run now, by name, in their order."""
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
            # A model of that name for something else is another model.
            if stock.model.kinds == model.kinds:
                both = _common(stock.model, model)
                found[model.name] = OfferedModel(both, (*stock.backends, place))
        return dict(list(found.items())[:MODELS_MAX])

    def _find(self, work: Work) -> ModelBackend | None:
        """Return where there is most room for the work, and None if it cannot be done.

        Of several models that would do, and of engines with as much room, the first.
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
    """Return what can be done with a model at both of two engines."""
    contexts = [each.context for each in (one, other) if each.context]
    features = one.features & other.features
    return ServedModel(one.name, one.kinds, features, min(contexts, default=0))


def _chats(model: ServedModel) -> bool:
    return JobKind.CHAT in model.kinds


def _described(stocks: Mapping[str, OfferedModel]) -> list[tuple[ServedModel, int]]:
    return [(stock.model, stock.slots) for stock in stocks.values()]
