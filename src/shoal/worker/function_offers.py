"""Offers functions while they can be run: by a connected cluster, a worker at work."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from shoal.domain.errors import ConfigError, Unavailable
from shoal.tasks.function_caller import FunctionCaller
from shoal.worker.agent import Agent, WorkerEvent
from shoal.worker.model_offers import CHANGED
from shoal.worker.owner_throttle import OwnerThrottle

RECONNECT_DELAY = 5.0  # seconds between attempts to reconnect

log = logging.getLogger("shoal.worker")


class RemoteFunctionCaller(FunctionCaller, Protocol):
    """A caller whose connection may be lost; a new one replaces it."""

    async def wait_lost(self) -> str:
        """Wait until the connection is lost; return why."""


class FunctionMembership(Protocol):
    """Offers functions to one coordinator, or to all that connect."""

    async def run(self) -> object:
        """Serve until ``leave`` or a final refusal."""

    def leave(self) -> None:
        """Accept no more calls, finish the running ones, and end ``run``."""


@dataclass(slots=True, eq=False)
class SeparateFunctionOffer:
    """Offers functions on a wire whose workers cannot change their offer.

    The worker leaves while its owner has paused it, because it cannot say so, and joins
    again when its owner lends more or fewer slots.

    Args:
        create_agent: creates the agent that offers the functions in a number of slots.
        slots: the number of slots at full speed.
        throttle: the owner's.
    """

    _create_agent: Callable[[int], Agent]
    _slots: int
    _throttle: OwnerThrottle
    _offered: int = 0  # slots
    _agent: Agent | None = None
    _leaving: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Offer the functions until ``leave`` or a final refusal."""
        with self._throttle.observed(self._on_throttle):
            while not self._leaving:
                self._changed.clear()
                if self._throttle.paused:
                    await self._changed.wait()
                    continue
                self._offered = self._throttle.lent(self._slots)
                self._agent = self._create_agent(self._offered)
                await self._agent.run()
                self._agent = None
                if not self._changed.is_set():
                    return  # refused for good

    def leave(self) -> None:
        """Accept no more calls, finish the running ones, and end ``run``."""
        self._leaving = True
        self._changed.set()
        if self._agent is not None:
            self._agent.leave()

    def _on_throttle(self) -> None:
        paused = self._throttle.paused
        if self._agent is None:
            self._changed.set()
        elif paused or self._throttle.lent(self._slots) != self._offered:
            self._changed.set()
            self._agent.leave(self._throttle.why_paused or CHANGED)


@dataclass(slots=True, eq=False)
class FunctionOffers:
    """An offer of functions, withdrawn while the cluster is disconnected.

    Withdrawing closes the connection to the coordinator, which requeues the calls.

    Args:
        caller: the first caller, started.
        connect: starts another caller; raises ConfigError or Unavailable.
        create_member: creates the member that offers a caller's functions.
        report: receives the events unavailable and available.
    """

    _caller: RemoteFunctionCaller
    _connect: Callable[[], Awaitable[RemoteFunctionCaller]]
    _create_member: Callable[[RemoteFunctionCaller], FunctionMembership]
    _report: Callable[[WorkerEvent], None]
    _member: FunctionMembership = field(init=False)
    _leaving: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._member = self._create_member(self._caller)

    async def run(self) -> None:
        """Offer the functions until ``leave`` or a final refusal."""
        while (reason := await self._serve_until_lost()) is not None:
            self._report(WorkerEvent("unavailable", reason))
            await self._caller.close()
            if not await self._reconnect():
                return
            self._report(WorkerEvent("available"))
            self._member = self._create_member(self._caller)

    def leave(self) -> None:
        """Accept no more calls, finish the running ones, and end ``run``."""
        self._leaving.set()
        self._member.leave()

    async def close(self) -> None:
        """Abort all calls."""
        await self._caller.close()

    async def _serve_until_lost(self) -> str | None:
        """Serve; return why the caller was lost, or None if the member ended."""
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self._member.run())
            lost = tasks.create_task(self._caller.wait_lost())
            await asyncio.wait((serving, lost), return_when=asyncio.FIRST_COMPLETED)
            reason = None if serving.done() else lost.result()
            serving.cancel()
            lost.cancel()
        return reason

    async def _reconnect(self) -> bool:
        """Reconnect with retries; return False after ``leave``."""
        last_error = ""
        while not self._leaving.is_set():
            try:
                self._caller = await self._connect()
            except (ConfigError, Unavailable) as error:
                if str(error) != last_error:
                    log.warning("functions unavailable: %s", error)
                last_error = str(error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(RECONNECT_DELAY):
                        await self._leaving.wait()
            else:
                return True
        return False
