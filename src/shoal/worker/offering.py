"""Keeps what is offered of an engine in step with what it can run."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.domain.worker import Model
from shoal.worker.agent import STOPPED, Agent
from shoal.worker.watching import Watch

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
        choose: which of the engine's models to offer, under which names.
        enlist: makes an agent for a model.
    """

    def __init__(
        self,
        watch: Watch,
        choose: Callable[[Sequence[Model]], Sequence[Model]],
        enlist: Callable[[Model], Agent],
    ) -> None:
        self._watch = watch
        self._choose = choose
        self._enlist = enlist
        self._members: dict[str, Membership] = {}
        self._over: set[str] = set()  # models that the coordinator sent away for good
        self._leaving = asyncio.Event()

    async def run(self) -> None:
        """Offer what there is until told to leave, or until nobody wants it."""
        async with asyncio.TaskGroup() as tasks:
            while self._put_in_step(tasks):
                await self._watch.pause(self._leaving)
                if not self._leaving.is_set():
                    await self._watch.look()

    def leave(self) -> None:
        """Finish what runs, take nothing new, and end ``run``."""
        self._leaving.set()
        self._watch.stir()
        for member in self._members.values():
            member.leave(STOPPED)

    def _put_in_step(self, tasks: asyncio.TaskGroup) -> bool:
        """Let agents join and leave; return whether there is a point in going on."""
        self._forget_those_who_left()
        if self._leaving.is_set():
            return False
        why_away = self._watch.why_away
        models = self._choose(self._watch.models)[:AGENTS_MAX]
        wanted = {each.name: each for each in models}
        for name, member in self._members.items():
            if name not in wanted:
                member.leave(why_away or GONE)
            elif member.model != wanted[name] and member.agent.idle:
                # What it joined as cannot be changed.  It is back in a moment.
                member.leave(CHANGED)
        for name in wanted.keys() - self._members.keys() - self._over:
            agent = self._enlist(wanted[name])
            task = tasks.create_task(agent.run())
            task.add_done_callback(lambda _: self._watch.stir())
            self._members[name] = Membership(wanted[name], agent, task)
        sent_away = self._over and not self._members
        return not (sent_away and why_away is None)

    def _forget_those_who_left(self) -> None:
        for name, member in list(self._members.items()):
            if member.task.done():
                del self._members[name]
                if not member.told_to_leave:
                    self._over.add(name)
