"""Says why calls wait, if they wait for long: there may be no worker for them at all.

A call that nobody can make is waited with for an hour by default, since workers may
come later; whoever forgot to start one should not have to wait that long to hear of it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from aiohttp import ClientSession

from shoal.client.asked import Asked
from shoal.client.place import Place
from shoal.client.tasks import Tasks, ask_tasks
from shoal.domain.errors import ShoalError

AFTER = 5.0  # seconds in which nothing comes, until somebody looks why
LOOKED_AT_MAX = 1024  # open calls whose names are looked at
NAMES_MAX = 5  # functions in one warning
WARNED_MAX = 1024  # functions that are remembered to have been warned of

log = logging.getLogger("shoal")


class Lookout:
    """Warns of calls that no worker can make, once of each function.

    Args:
        waiting: returns the calls that are out and that no worker is known to have.
        heard: returns how many times the coordinator has said that a worker has a call,
            or what became of one.
    """

    def __init__(
        self,
        session: ClientSession,
        place: Place,
        waiting: Callable[[], Iterable[Asked]],
        heard: Callable[[], int],
    ) -> None:
        self._session = session
        self._place = place
        self._waiting = waiting
        self._heard = heard
        self._warned: set[str] = set()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            before = self._heard()
            await asyncio.sleep(AFTER)
            if self._heard() != before:
                continue
            names = {each.name: each.coded for each in self._waiting()}
            new = {name: names[name] for name in names.keys() - self._warned}
            if not new:
                continue
            try:
                there = await ask_tasks(self._session, self._place)
            except ShoalError:
                continue  # the calls will tell
            if text := why_waiting(there, new):
                log.warning(text)
                if len(self._warned) >= WARNED_MAX:
                    self._warned.clear()
                self._warned |= new.keys()


def why_waiting(there: Tasks, names: dict[str, bool]) -> str:
    """Say which calls no worker can make; empty: all have one, and are queued.

    ``names`` are those of the functions that are waited for, each with whether it is
    sent along.
    """
    if not there.workers:
        return (
            f"no worker that calls functions is connected: {_listed(names)} is waited "
            "for; start one with `shoal join … --tasks MODULE`"
        )
    if there.unnamed:
        return ""  # perhaps those have them
    known = {each.name for each in there.tasks}
    missing = [name for name, coded in names.items() if not coded and name not in known]
    if missing:
        return (
            f"no worker has {_listed(missing)} now: start one with its module, `shoal "
            "join … --tasks MODULE`; the call waits"
        )
    if not there.code and any(names.values()):
        return (
            "no worker runs functions that are sent along now: start one with `shoal "
            "join … --trust-code`; the call waits"
        )
    return ""


def _listed(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - NAMES_MAX} more" if len(every) > NAMES_MAX else ""
    return ", ".join(every[:NAMES_MAX]) + more
