"""All models of all engines, over one connection."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.domain.work import ANY_MODEL, Kind, Task, Work
from shoal.domain.worker import Model, Offer
from shoal.engines.tasks import WithTasks
from shoal.worker.agent import STOPPED, Agent, Happening
from shoal.worker.offering import GONE
from shoal.worker.places import Find, Place
from shoal.worker.slots import Slots
from shoal.worker.watching import Watch

MODELS_MAX = 256  # offered in all: each is a worker to the coordinator


@dataclass(frozen=True, slots=True)
class Shelf:
    """An engine, and which of its models to offer, under which names."""

    watch: Watch
    choose: Callable[[Sequence[Model]], Sequence[Model]]
    slots: Slots


@dataclass(frozen=True, slots=True)
class Stock:
    """A model on offer: what can be done with it wherever it is, and where that is.

    Several engines may have it; it can do what all of them can.
    """

    model: Model
    places: tuple[Place, ...]

    @property
    def slots(self) -> int:
        """How many jobs run at a time, if the engines have no others."""
        return sum(place.slots.size for place in self.places)


class Assortment:
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
        shelves: Sequence[Shelf],
        describe: Callable[[Model, int], Offer],
        enlist: Callable[[Find, tuple[Offer, ...], Callable[[Happening], None]], Agent],
        tell: Callable[[Stock | None, Happening], None],
    ) -> None:
        self._shelves = shelves
        self._describe = describe
        self._tell = tell
        self._places: dict[tuple[int, Model], Place] = {}
        self._stock: Mapping[str, Stock] = self._take_stock()
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

    async def _look_at(self, shelf: Shelf) -> None:
        while not self._leaving.is_set():
            await shelf.watch.pause(self._leaving)
            if not self._leaving.is_set():
                await shelf.watch.look()
                self._put_in_step()

    def _put_in_step(self) -> None:
        """Let the coordinator and the user know what has come and gone."""
        before, self._stock = self._stock, self._take_stock()
        if _described(before) == _described(self._stock):
            return
        self._agent.offer(self._offers())
        if not self._there:
            return
        for name in before.keys() - self._stock.keys():
            self._tell(before[name], Happening("left", self._why_gone(before[name])))
        for name in self._stock.keys() - before.keys():
            self._tell(self._stock[name], Happening("joined"))

    def _why_gone(self, stock: Stock) -> str:
        for shelf in self._shelves:
            if shelf.slots is stock.places[0].slots and shelf.watch.why_away:
                return shelf.watch.why_away
        return GONE

    def _report(self, happening: Happening) -> None:
        """Tell what happened to the agent of each model that it offers."""
        self._there = happening.event == "joined"
        for stock in self._stock.values() or (None,):
            self._tell(stock, happening)

    def _offers(self) -> tuple[Offer, ...]:
        return tuple(
            self._describe(stock.model, stock.slots) for stock in self._stock.values()
        )

    def _take_stock(self) -> Mapping[str, Stock]:
        """Return what the engines can run now, by name, in their order."""
        there = {
            (number, model): shelf
            for number, shelf in enumerate(self._shelves)
            for model in shelf.choose(shelf.watch.models)
        }
        self._places = {
            key: self._places.get(key) or _place(shelf, key[1])
            for key, shelf in there.items()
        }
        found: dict[str, Stock] = {}
        for (_, model), place in self._places.items():
            stock = found.get(model.name, Stock(model, ()))
            # A model of that name for something else is another model.
            if stock.model.kinds == model.kinds:
                both = _common(stock.model, model)
                found[model.name] = Stock(both, (*stock.places, place))
        return dict(list(found.items())[:MODELS_MAX])

    def _find(self, work: Work) -> Place | None:
        """Return where there is most room for the work, and None if it cannot be done.

        Of several models that would do, and of engines with as much room, the first.
        """
        if isinstance(work, Task) or work.model == ANY_MODEL:
            chatting = (each for each in self._stock.values() if _chats(each.model))
            places = [place for stock in chatting for place in stock.places]
        else:
            stock = self._stock.get(work.model)
            places = [] if stock is None else list(stock.places)
        return max(places, key=lambda place: place.free, default=None)


def _place(shelf: Shelf, model: Model) -> Place:
    runner = WithTasks(shelf.watch.engine, model)
    return Place(runner, shelf.slots, shelf.watch.stir)


def _common(one: Model, other: Model) -> Model:
    """Return what can be done with a model at both of two engines."""
    contexts = [each.context for each in (one, other) if each.context]
    features = one.features & other.features
    return Model(one.name, one.kinds, features, min(contexts, default=0))


def _chats(model: Model) -> bool:
    return Kind.CHAT in model.kinds


def _described(stocks: Mapping[str, Stock]) -> list[tuple[Model, int]]:
    return [(stock.model, stock.slots) for stock in stocks.values()]
