"""Which functions the workers of a coordinator have, and why calls wait.

A call that no worker can make waits for an hour by default, since workers may
come later; a user who forgot to start one is warned after seconds.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec
from aiohttp import ClientError, ClientSession

from shoal.client.blobs import raise_for_status
from shoal.client.coordinator import CoordinatorAddress, unreachable_error
from shoal.client.pending_calls import ClientCall
from shoal.domain.errors import PeerError, ShoalError
from shoal.transports.http_client import read_body

ANSWER_MAX = 16 << 20  # bytes


class TaskAvailability(msgspec.Struct, frozen=True):
    """A function, how many workers have it, and how many calls they make at a time."""

    name: str
    workers: int
    slots: int


class TaskList(msgspec.Struct, frozen=True):
    """All functions that have names.

    ``workers`` and ``slots`` are of all that call functions, ``code`` says how many of
    these workers run functions that are sent along, and ``unnamed`` how many do not say
    which functions they have.
    """

    tasks: tuple[TaskAvailability, ...]
    workers: int
    slots: int
    code: int
    unnamed: int = 0


async def fetch_tasks(session: ClientSession, place: CoordinatorAddress) -> TaskList:
    """Return what the workers of a coordinator have.

    Raises ShoalError if it does not say, ConnectionLost if it cannot be reached.
    """
    url = f"{place.url}/v1/tasks"
    try:
        async with session.get(url, allow_redirects=False) as response:
            await raise_for_status(response)
            body = await read_body(response, ANSWER_MAX, f"{url}: a list of tasks")
    except (ClientError, OSError) as error:
        raise unreachable_error(place, error) from None  # the rest is of libraries
    try:
        return msgspec.json.decode(body, type=TaskList)
    except msgspec.MsgspecError as error:
        raise PeerError(f"{url} says nothing about tasks: {error}") from error


STALL_TIMEOUT = 5.0  # seconds in which nothing comes, until somebody looks why
EXAMINED_MAX = 1024  # open calls whose names are looked at
NAMES_MAX = 5  # functions in one warning
WARNED_MAX = 1024  # functions that are remembered to have been warned of

log = logging.getLogger("shoal")


class StalledCallMonitor:
    """Warns of calls that no worker can make, once of each function.

    Args:
        waiting: returns the calls that are out and that no worker is known to have.
        heard: returns how many times the coordinator has said that a worker has a call,
            or what became of one.
    """

    def __init__(
        self,
        session: ClientSession,
        place: CoordinatorAddress,
        waiting: Callable[[], Iterable[ClientCall]],
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
            await asyncio.sleep(STALL_TIMEOUT)
            if self._heard() != before:
                continue
            names = {each.name: each.sends_code for each in self._waiting()}
            new = {name: names[name] for name in names.keys() - self._warned}
            if not new:
                continue
            try:
                there = await fetch_tasks(self._session, self._place)
            except ShoalError:
                continue  # the calls will tell
            if text := why_waiting(there, new):
                log.warning(text)
                if len(self._warned) >= WARNED_MAX:
                    self._warned.clear()
                self._warned |= new.keys()


def why_waiting(there: TaskList, names: dict[str, bool]) -> str:
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
