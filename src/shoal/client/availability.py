"""Lists the functions of a coordinator's workers, and warns of calls that none can run.

By default such a call waits for an hour, since a worker may still join.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
from aiohttp import ClientSession

from shoal.client.connection import JsonRequest
from shoal.client.coordinator import CoordinatorAddress
from shoal.client.pending_calls import ClientCall
from shoal.domain.errors import ShoalError


class TaskAvailability(msgspec.Struct, frozen=True):
    """A function, with the number of its workers and of their slots."""

    name: str
    workers: int
    slots: int


class TaskList(msgspec.Struct, frozen=True):
    """All named functions.

    ``workers`` and ``slots`` count all workers that call functions, ``code`` those that
    run functions sent by clients, and ``unnamed`` those that do not list theirs.
    """

    tasks: tuple[TaskAvailability, ...]
    workers: int
    slots: int
    code: int
    unnamed: int = 0


TASKS = JsonRequest("/v1/tasks", TaskList)

STALL_TIMEOUT = 5.0  # seconds without a message until the monitor checks
CALLS_EXAMINED_MAX = 1024  # open ones, for each check
NAMES_MAX = 5  # functions in one warning
WARNED_MAX = 1024  # functions with a warning that is not repeated

log = logging.getLogger("shoal")


@dataclass(slots=True, eq=False)
class StalledCallMonitor:
    """Warns of calls that no worker can run, once for each function.

    Args:
        unstarted: returns the calls that were sent and have not started.
        event_count: returns the number of started, progressed and ended calls so far.
    """

    _session: ClientSession
    _address: CoordinatorAddress
    _unstarted: Callable[[], Iterable[ClientCall]]
    _event_count: Callable[[], int]
    _warned: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Check periodically, until cancelled."""
        while True:
            before = self._event_count()
            await asyncio.sleep(STALL_TIMEOUT)
            if self._event_count() != before:
                continue
            names = {each.name: each.sends_code for each in self._unstarted()}
            new = {name: names[name] for name in names.keys() - self._warned}
            if not new:
                continue
            try:
                available = await TASKS.send(self._session, self._address)
            except ShoalError:
                continue  # the calls report it
            if text := stall_warning(available, new):
                log.warning(text)
                if len(self._warned) >= WARNED_MAX:
                    self._warned.clear()
                self._warned |= new.keys()


def stall_warning(available: TaskList, names: dict[str, bool]) -> str:
    """Return which calls no worker can run; empty if all are only queued.

    ``names`` maps the functions to whether their code is sent along.
    """
    if not available.workers:
        return (
            f"no connected worker runs functions: waiting for {_join_names(names)}; "
            "start one with `shoal join … --tasks MODULE`"
        )
    if available.unnamed:
        return ""  # those may have them
    known = {each.name for each in available.tasks}
    missing = [
        name
        for name, sends_code in names.items()
        if not sends_code and name not in known
    ]
    if missing:
        return (
            f"no worker has {_join_names(missing)}: waiting; start one with its "
            "module, `shoal join … --tasks MODULE`"
        )
    if not available.code and any(names.values()):
        return (
            "waiting for a worker that runs functions sent by clients: start one with "
            "`shoal join … --trust-code`"
        )
    return ""


def _join_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - NAMES_MAX} more" if len(ordered) > NAMES_MAX else ""
    return ", ".join(ordered[:NAMES_MAX]) + more
