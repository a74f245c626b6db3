"""Keeps functions offered while the cluster that calls them is connected."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from shoal.domain.errors import ConfigError, Unavailable
from shoal.tasks.function_caller import FunctionCaller
from shoal.worker.agent import Agent, WorkerEvent

RECONNECT_DELAY = 5.0  # seconds between tries to reach what is away

log = logging.getLogger("shoal.worker")


class RemoteFunctionCaller(FunctionCaller, Protocol):
    """A caller that may be lost; another is made then."""

    async def wait_lost(self) -> str:
        """Wait until it is of no use any more; return why."""
        ...


class FunctionOffers:
    """An offer of functions that is withdrawn while nobody can call them.

    What runs when that happens is given to others by the coordinator, as if this worker
    were lost: its connection is closed.

    Args:
        caller: what calls them to begin with, started.
        connect: makes another, started; raises ConfigError or Unavailable.
        enlist: makes the agent that offers them.
        report: told when they are withdrawn, and when they are back.
    """

    def __init__(
        self,
        caller: RemoteFunctionCaller,
        connect: Callable[[], Awaitable[RemoteFunctionCaller]],
        enlist: Callable[[RemoteFunctionCaller], Agent],
        report: Callable[[WorkerEvent], None],
    ) -> None:
        self._caller = caller
        self._connect = connect
        self._enlist = enlist
        self._report = report
        self._agent = enlist(caller)
        self._leaving = asyncio.Event()

    async def run(self) -> None:
        """Offer them until told to leave, or until nobody wants them."""
        while (why := await self._until_gone()) is not None:
            self._report(WorkerEvent("unavailable", why))
            await self._caller.close()
            if not await self._come_back():
                return
            self._report(WorkerEvent("available"))
            self._agent = self._enlist(self._caller)

    def leave(self) -> None:
        """Finish what runs, take nothing new, and end ``run``."""
        self._leaving.set()
        self._agent.leave()

    async def close(self) -> None:
        """Stop whatever runs."""
        await self._caller.close()

    async def _until_gone(self) -> str | None:
        """Serve; return why that cannot go on, or None if it is over."""
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self._agent.run())
            gone = tasks.create_task(self._caller.wait_lost())
            await asyncio.wait((serving, gone), return_when=asyncio.FIRST_COMPLETED)
            why = None if serving.done() else gone.result()
            serving.cancel()
            gone.cancel()
        return why

    async def _come_back(self) -> bool:
        """Try again and again; return False if told to leave meanwhile."""
        last = ""
        while not self._leaving.is_set():
            try:
                self._caller = await self._connect()
            except (ConfigError, Unavailable) as error:
                if str(error) != last:
                    log.warning("no functions can be called: %s", error)
                last = str(error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(RECONNECT_DELAY):
                        await self._leaving.wait()
            else:
                return True
        return False
