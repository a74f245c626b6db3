"""Calls on a peer for one model: a session, a driver and a fetch, on one connection."""

import asyncio
from collections.abc import Callable

from shoal.domain.errors import ShoalError, TimedOut, Unavailable
from shoal.domain.sharing import ModelAnswer, ModelQuery, ModelRequest, ModelWord
from shoal.domain.vocabulary import Rejected, RunJob
from shoal.models.fetching import Fetch, Got, Wanted
from shoal.protocols.crowd import CrowdSession, From, Gone, Met, To
from shoal.protocols.session import PROTOCOL_ERROR, Batch
from shoal.runtime.clock import Clock
from shoal.runtime.driver import Driver, End
from shoal.runtime.link import Link

MEET_TIMEOUT = 20.0  # seconds until a peer has let us in, or not
GUEST = "this peer is here to copy a model, and does not stay"


async def fetch(
    session: CrowdSession,
    link: Link,
    clock: Clock,
    wanted: Wanted,
    progress: Callable[[int, int | None], None] = lambda received, size: None,
) -> Got:
    """Get a model from the peer at the other end of a link, and hang up.

    ``progress`` is as in ``Fetch``.

    Raises what ``Fetch.run`` does, and Unavailable if the peer does not let us in or
    goes away.
    """
    visit = _Visit(session, link, clock, wanted, progress)
    outcome: Got | ShoalError
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(visit.stay())
        try:
            outcome = await visit.get()
        except ShoalError as error:
            outcome = error
        visit.leave()
    if isinstance(outcome, ShoalError):
        raise outcome
    return outcome


class _Visit:
    """One connection to one peer."""

    def __init__(
        self,
        session: CrowdSession,
        link: Link,
        clock: Clock,
        wanted: Wanted,
        progress: Callable[[int, int | None], None],
    ) -> None:
        self._fetch = Fetch(wanted, self._say, progress)
        self._driver = Driver(session, _Paced(link, self._fetch), clock, self._told)
        self._peer = ""
        self._met = asyncio.Event()  # or it has ended before
        self._ended: End | None = None

    async def stay(self) -> None:
        """Run the connection until it ends."""
        self._ended = await self._driver.run()
        self._met.set()
        self._fetch.lost(Unavailable(f"the connection ended: {self._ended.reason}"))

    async def get(self) -> Got:
        try:
            async with asyncio.timeout(MEET_TIMEOUT):
                await self._met.wait()
        except TimeoutError as error:
            raise TimedOut(
                f"the peer did not greet us within {MEET_TIMEOUT:g} s: it speaks "
                "something else, or has a passcode"
            ) from error
        if self._ended is not None and not self._peer:
            raise Unavailable(f"the peer did not let us in: {_why(self._ended)}")
        return await self._fetch.run()

    def leave(self) -> None:
        self._driver.hang_up("done")

    def _told(self, message: From) -> None:
        match message.word:
            case Met():
                # Over a link to many, the first: who dialled knows whom it dialled.
                self._peer = self._peer or message.peer
                self._met.set()
            case Gone(reason) if message.peer == self._peer:
                self._fetch.lost(Unavailable(f"the peer has left: {reason}"))
            case ModelQuery(model) | ModelRequest(model=model):
                self._driver.issue(To(message.peer, ModelAnswer(model, False)))
            case ModelWord() as word if message.peer == self._peer:
                self._fetch.heard(word)
            case RunJob(job_id, lease):
                self._driver.issue(To(message.peer, Rejected(job_id, lease, GUEST)))
            case _:
                pass  # what it offers, and how it is

    def _say(self, word: ModelWord) -> bool:
        return self._driver.issue(To(self._peer, word))


def _why(end: End) -> str:
    """Return why a connection ended at once, and what that mostly means."""
    if end.by_peer:
        # Peers of other makers say no more than that.
        return f"{end.reason}; a peer that has a passcode wants it from us"
    if end.code == PROTOCOL_ERROR:
        return (
            f"{end.reason}; something else answers there: a coordinator has a port for "
            "this beside that of HTTP, and tells it as direct at /healthz"
        )
    return end.reason


class _Paced:
    """A link that is read no faster than what came from it is written to the disk."""

    def __init__(self, link: Link, fetch: Fetch) -> None:
        self._link = link
        self._fetch = fetch
        self.peer = link.peer
        self.send = link.send
        self.close = link.close

    async def receive(self) -> Batch:
        await self._fetch.room()
        return await self._link.receive()
