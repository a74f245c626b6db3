"""Downloads one model over one connection: a session, a driver and a download."""

import asyncio
from collections.abc import Callable

from shoal.domain.errors import ShoalError, TimedOut, Unavailable
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelMessage,
    ModelQuery,
    ModelRequest,
)
from shoal.domain.vocabulary import Rejected, RunJob
from shoal.models.download import DownloadedModel, DownloadRequest, ModelDownload
from shoal.protocols.seam.multi_peer import (
    MultiPeerSession,
    PeerJoined,
    PeerLeft,
    PeerMessage,
    ToPeer,
)
from shoal.protocols.seam.session import PROTOCOL_ERROR, Batch
from shoal.transports.clock import Clock
from shoal.transports.driver import ConnectionEnd, Driver
from shoal.transports.link import Link

GREETING_TIMEOUT = 20.0  # seconds until a peer has let us in, or not
NOT_SERVING = "this peer is here to copy a model, and does not stay"


async def download_model(
    session: MultiPeerSession,
    link: Link,
    clock: Clock,
    wanted: DownloadRequest,
    progress: Callable[[int, int | None], None] = lambda received, size: None,
) -> DownloadedModel:
    """Get a model from the peer at the other end of a link, and hang up.

    ``progress`` is as in ``ModelDownload``.

    Raises what ``ModelDownload.run`` does, and Unavailable if the peer does not let us
    in or
    goes away.
    """
    visit = _DownloadConnection(session, link, clock, wanted, progress)
    outcome: DownloadedModel | ShoalError
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


class _DownloadConnection:
    """One connection to one peer."""

    def __init__(
        self,
        session: MultiPeerSession,
        link: Link,
        clock: Clock,
        wanted: DownloadRequest,
        progress: Callable[[int, int | None], None],
    ) -> None:
        self._fetch = ModelDownload(wanted, self._say, progress)
        self._driver = Driver(session, _PacedLink(link, self._fetch), clock, self._told)
        self._peer = ""
        self._met = asyncio.Event()  # or it has ended before
        self._ended: ConnectionEnd | None = None

    async def stay(self) -> None:
        """Run the connection until it ends."""
        self._ended = await self._driver.run()
        self._met.set()
        self._fetch.on_disconnect(
            Unavailable(f"the connection ended: {self._ended.reason}")
        )

    async def get(self) -> DownloadedModel:
        try:
            async with asyncio.timeout(GREETING_TIMEOUT):
                await self._met.wait()
        except TimeoutError as error:
            raise TimedOut(
                f"the peer did not greet us within {GREETING_TIMEOUT:g} s: it speaks "
                "something else, or has a passcode"
            ) from error
        if self._ended is not None and not self._peer:
            raise Unavailable(f"the peer did not let us in: {_why(self._ended)}")
        return await self._fetch.run()

    def leave(self) -> None:
        self._driver.disconnect("done")

    def _told(self, message: PeerMessage) -> None:
        match message.message:
            case PeerJoined():
                # Over a link to many, the first: who dialled knows whom it dialled.
                self._peer = self._peer or message.peer
                self._met.set()
            case PeerLeft(reason) if message.peer == self._peer:
                self._fetch.on_disconnect(Unavailable(f"the peer has left: {reason}"))
            case ModelQuery(model) | ModelRequest(model=model):
                self._driver.send(ToPeer(message.peer, ModelAnswer(model, False)))
            case ModelMessage() as word if message.peer == self._peer:
                self._fetch.receive(word)
            case RunJob(job_id, lease):
                self._driver.send(
                    ToPeer(message.peer, Rejected(job_id, lease, NOT_SERVING))
                )
            case _:
                pass  # what it offers, and how it is

    def _say(self, word: ModelMessage) -> bool:
        return self._driver.send(ToPeer(self._peer, word))


def _why(end: ConnectionEnd) -> str:
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


class _PacedLink:
    """A link that is read no faster than what came from it is written to the disk."""

    def __init__(self, link: Link, fetch: ModelDownload) -> None:
        self._link = link
        self._fetch = fetch
        self.peer = link.peer
        self.send = link.send
        self.close = link.close

    async def receive(self) -> Batch:
        await self._fetch.wait_for_room()
        return await self._link.receive()
