"""Keeps what is offered of an engine in step with what it can run."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from shoal.domain.errors import Unavailable
from shoal.domain.worker import Model
from shoal.engines.port import Engine
from shoal.worker.agent import STOPPED, Agent, Happening

LOOK_EVERY = 10.0  # seconds between looks at an engine
LOOK_SOON = 1.0  # seconds before it is looked at because something happened
LOOK_LIMIT = 10.0  # seconds for it to answer
SILENT_MAX = 2  # looks in a row that a busy engine may leave without an answer
AGENTS_MAX = 64  # models of one engine that are offered: each is a connection

GONE = "the engine does not offer it any more"
CHANGED = "the engine describes it anew"


@dataclass(slots=True)
class Membership:
    """An agent at work for one model."""

    model: Model
    agent: Agent
    task: asyncio.Task[str]
    told_to_leave: bool = False

    def leave(self, reason: str) -> None:
        self.told_to_leave = True
        self.agent.leave(reason)


class Offering:
    """One engine's models at one coordinator, each with an agent of its own.

    Models come and go as the engine's list does.  An engine that does not answer is
    withdrawn, and offered again when it does.

    Args:
        engine: started; whoever started it closes it.
        choose: which of its models to offer, under which names.
        enlist: makes an agent; the function is for it to tell of jobs not taken.
        report: told when the engine is withdrawn, and when it is back.
    """

    def __init__(
        self,
        engine: Engine,
        choose: Callable[[Sequence[Model]], Sequence[Model]],
        enlist: Callable[[Model, Callable[[], None]], Agent],
        report: Callable[[Happening], None],
    ) -> None:
        self._engine = engine
        self._choose = choose
        self._enlist = enlist
        self._report = report
        self._members: dict[str, Membership] = {}
        self._over: set[str] = set()  # models that the coordinator sent away for good
        self._leaving = asyncio.Event()
        self._news = asyncio.Event()
        self._silent = 0  # looks in a row without an answer
        self._why_away: str | None = None

    async def run(self) -> None:
        """Offer what there is until told to leave, or until nobody wants it."""
        models: Sequence[Model] = self._engine.models
        async with asyncio.TaskGroup() as tasks:
            while self._put_in_step(models, tasks):
                await self._pause()
                if not self._leaving.is_set():
                    models = await self._look()

    def leave(self) -> None:
        """Finish what runs, take nothing new, and end ``run``."""
        self._leaving.set()
        self._news.set()
        for member in self._members.values():
            member.leave(STOPPED)

    def _put_in_step(self, models: Sequence[Model], tasks: asyncio.TaskGroup) -> bool:
        """Let agents join and leave; return whether there is a point in going on."""
        self._forget_those_who_left()
        if self._leaving.is_set():
            return False
        wanted = {each.name: each for each in self._choose(models)[:AGENTS_MAX]}
        for name, member in self._members.items():
            if name not in wanted:
                member.leave(self._why_away or GONE)
            elif member.model != wanted[name] and member.agent.idle:
                # What it joined as cannot be changed.  It is back in a moment.
                member.leave(CHANGED)
        for name in wanted.keys() - self._members.keys() - self._over:
            agent = self._enlist(wanted[name], self._news.set)
            task = tasks.create_task(agent.run())
            task.add_done_callback(lambda _: self._news.set())
            self._members[name] = Membership(wanted[name], agent, task)
        sent_away = self._over and not self._members
        return not (sent_away and self._why_away is None)

    def _forget_those_who_left(self) -> None:
        for name, member in list(self._members.items()):
            if member.task.done():
                del self._members[name]
                if not member.told_to_leave:
                    self._over.add(name)

    async def _pause(self) -> None:
        """Wait until the next look: not for long, if something happened."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY - LOOK_SOON):
                await self._news.wait()
        # A busy engine may refuse a thousand jobs meanwhile: one look is enough.
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SOON):
                await self._leaving.wait()

    async def _look(self) -> Sequence[Model]:
        """Return what the engine can run now: nothing, if it does not answer."""
        self._news.clear()
        try:
            async with asyncio.timeout(LOOK_LIMIT):
                await self._engine.refresh()
        except TimeoutError:
            self._silent += 1
            if self._silent >= SILENT_MAX:
                self._withdraw(f"no answer within {LOOK_LIMIT:g} s")
        except Unavailable as error:
            self._withdraw(str(error))
        else:
            self._silent = 0
            if self._why_away is not None:
                self._why_away = None
                self._report(Happening("available"))
        return self._engine.models if self._why_away is None else ()

    def _withdraw(self, reason: str) -> None:
        if self._why_away is None:
            self._why_away = f"the engine is unavailable: {reason}"
            self._report(Happening("unavailable", reason))
