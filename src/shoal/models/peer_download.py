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
from shoal.protocols.seam.peer_session import (
    PeerJoined,
    PeerLeft,
    PeerMessage,
    PeerSession,
    ToPeer,
)
from shoal.protocols.seam.session import Batch, CloseCode
from shoal.transports.clock import Clock
from shoal.transports.driver import ConnectionEnd, Driver
from shoal.transports.link import EncryptedLink, Link

HANDSHAKE_TIMEOUT = 20.0  # seconds for the handshake
NOT_SERVING = "this peer only copies a model"


async def download_model(
    session: PeerSession,
    link: Link,
    clock: Clock,
    request: DownloadRequest,
    progress: Callable[[int, int | None], None] = lambda received, size: None,
) -> DownloadedModel:
    """Download a model from the peer at the other end of a link, and disconnect.

    ``progress`` is as in ``ModelDownload``.

    Raises as ``ModelDownload.run`` does, and Unavailable if the peer does not admit
    this one, or disconnects.
    """
    connection = _DownloadConnection(session, link, clock, request, progress)
    outcome: DownloadedModel | ShoalError
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(connection.run())
        try:
            outcome = await connection.download()
        except ShoalError as error:
            outcome = error
        connection.leave()
    if isinstance(outcome, ShoalError):
        raise outcome
    return outcome


class _DownloadConnection:
    """One connection to one peer."""

    def __init__(
        self,
        session: PeerSession,
        link: Link,
        clock: Clock,
        request: DownloadRequest,
        progress: Callable[[int, int | None], None],
    ) -> None:
        self._download = ModelDownload(request, self._send, progress)
        link = _PacedLink(link, self._download)
        self._driver = Driver(session, link, clock, self._receive)
        self._peer = ""
        self._admitted = asyncio.Event()  # or ended before that
        self._ended: ConnectionEnd | None = None

    async def run(self) -> None:
        """Run the connection until it ends."""
        self._ended = await self._driver.run()
        self._admitted.set()
        self._download.on_disconnect(
            Unavailable(f"the connection ended: {self._ended.reason}")
        )

    async def download(self) -> DownloadedModel:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                await self._admitted.wait()
        except TimeoutError as error:
            raise TimedOut(
                f"no handshake within {HANDSHAKE_TIMEOUT:g} s: the peer speaks another "
                "protocol, or requires a passcode"
            ) from error
        if self._ended is not None and not self._peer:
            raise Unavailable(
                f"the peer did not admit this one: {_end_reason(self._ended)}"
            )
        return await self._download.run()

    def leave(self) -> None:
        self._driver.disconnect("done")

    def _receive(self, message: PeerMessage) -> None:
        match message.message:
            case PeerJoined(paces_models=paces):
                # On a link to several peers, the first is the one that was dialled.
                if not self._peer:
                    self._peer, self._download.foreign = message.peer, not paces
                self._admitted.set()
            case PeerLeft(reason) if message.peer == self._peer:
                self._download.on_disconnect(
                    Unavailable(f"the peer has left: {reason}")
                )
            case ModelQuery(model) | ModelRequest(model=model):
                self._driver.send(ToPeer(message.peer, ModelAnswer(model, False)))
            case ModelMessage() as model_message if message.peer == self._peer:
                self._download.receive(model_message)
            case RunJob(job_id, lease):
                self._driver.send(
                    ToPeer(message.peer, Rejected(job_id, lease, NOT_SERVING))
                )
            case _:
                pass  # offers and health reports

    def _send(self, model_message: ModelMessage) -> bool:
        return self._driver.send(ToPeer(self._peer, model_message))


def _end_reason(end: ConnectionEnd) -> str:
    """Return why a connection ended during the handshake, with advice."""
    if end.by_peer:
        # Other programs give no reason.
        return f"{end.reason}; the peer may require a passcode"
    if end.code == CloseCode.PROTOCOL_ERROR:
        return (
            f"{end.reason}; the port serves another protocol: give the URL of a "
            "coordinator, http://HOST:PORT, or the port of another peer"
        )
    return end.reason


class _PacedLink:
    """A link that is read no faster than its data is written to disk."""

    def __init__(self, link: Link, download: ModelDownload) -> None:
        self._link = link
        self._download = download
        self.peer = link.peer
        self.binding = link.binding if isinstance(link, EncryptedLink) else b""
        self.send = link.send
        self.close = link.close

    async def receive(self) -> Batch:
        await self._download.wait_for_room()
        return await self._link.receive()
