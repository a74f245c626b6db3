"""A worker that coordinators dial: it serves any number of them at once."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.domain.worker import Offer
from shoal.peers.relay import ServeSession
from shoal.protocols.seam import worker_session
from shoal.protocols.seam.context import Dialer
from shoal.protocols.seam.peer_session import PeerMessage, PeerSession, ToPeer
from shoal.protocols.seam.session import CloseCode, WorkerEnd
from shoal.transports.clock import Clock
from shoal.transports.driver import ConnectionEnd, Driver
from shoal.transports.link import Link, OpenLink
from shoal.worker.agent import LEAVING, STOPPED, Agent, WorkerEvent

INTERNAL_ERROR = "internal error"

OpenPorts: TypeAlias = Callable[
    [ServeSession], AbstractAsyncContextManager[Mapping[str, int]]
]
"""Opens the worker's ports for the length of a block; yields them by label.

Takes what serves a connection, whichever end dialled.
"""

CreateAgent: TypeAlias = Callable[
    [Dialer, OpenLink, Callable[[WorkerEvent], None]], Agent
]
"""Creates the agent of one connection, which does not redial."""

log = logging.getLogger("shoal.worker")


class OpenConnection:
    """The ``Dialer`` of a connection that is open already, and of no other.

    ``restriction`` is as in ``WorkerProfile``.
    """

    message_max = 0  # nothing is dialled
    headers: Mapping[str, str] = {}

    def __init__(self, session: PeerSession, link: Link, restriction: str) -> None:
        self.url = link.peer
        self._session = session
        self._link = link
        self._membership = worker_session.MembershipState(restriction=restriction)

    @property
    def coordinator(self) -> str:
        """The name of the other end, or its address until the name is known."""
        return self._membership.peer_name or self._link.peer

    @asynccontextmanager
    async def open(
        self, url: str, headers: Mapping[str, str], message_max: int
    ) -> AsyncIterator[tuple[Link, Mapping[str, str]]]:
        """Return the connection, as ``OpenLink`` does."""
        yield self._link, {}

    def start_session(self, headers: Mapping[str, str]) -> WorkerEnd:
        session = self._session
        worker = worker_session.WorkerSession(
            lambda now: session, session.accepts, self._membership
        )
        if isinstance(session, worker_session.FramedPeerSession):
            return worker_session.FramedWorkerSession(worker, session)
        return worker

    def final_reason(self, code: int, text: str) -> str | None:
        return text or "disconnected"


@dataclass(slots=True, eq=False)
class ListeningWorker:
    """Serves every coordinator that connects, each by an agent of its own.

    Their jobs share what runs them, and so wait for each other.

    Args:
        open_ports: opens the ports.
        create_agent: creates the agent of a connection.
        report: receives events of the worker with their details: ``ports`` once it
            listens, and then the ``coordinator`` that an event is about.
        restriction: as in ``WorkerProfile``; coordinators that cannot respect it are
            disconnected.
    """

    _open_ports: OpenPorts
    _create_agent: CreateAgent
    _clock: Clock
    _report: Callable[[Mapping[str, object], WorkerEvent], None]
    _restriction: str = ""
    _agents: set[Agent] = field(default_factory=set)
    _offers: tuple[Offer, ...] | None = None  # None: those that agents begin with
    _lent: int = 0
    _leaving: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)  # without agents

    def __post_init__(self) -> None:
        self._idle.set()

    async def run(self) -> None:
        """Serve until ``leave``; then wait for the running jobs.

        Raises ConfigError if a port cannot be opened.
        """
        async with self._open_ports(self.serve) as ports:
            shown = ", ".join(f"{label} {port}" for label, port in ports.items())
            self._report({"ports": dict(ports)}, WorkerEvent("listening", shown))
            await self._leaving.wait()
            await self._idle.wait()
        self._report({}, WorkerEvent("left", STOPPED))

    def leave(self, reason: str = STOPPED) -> None:
        """Accept no more jobs, finish the running ones, and end ``run``."""
        self._leaving.set()
        for agent in self._agents:
            agent.leave(reason)

    def update_offers(self, offers: tuple[Offer, ...]) -> None:
        """Replace the offers at all coordinators."""
        self._offers = offers
        for agent in self._agents:
            agent.update_offers(offers)

    def update_lent_slots(self, lent: int) -> None:
        """Report how many slots are lent beyond those of the offer."""
        self._lent = lent
        for agent in self._agents:
            agent.update_lent_slots(lent)

    async def serve(self, wire: str, session: PeerSession, link: Link) -> ConnectionEnd:
        """Run a session until its connection ends; return the reason.

        Raises only CancelledError: a bug in the session, or here, ends the connection.
        """
        try:
            if not session.accepts:  # a short exchange without a peer
                driver = Driver[PeerMessage, ToPeer](
                    session, link, self._clock, _expect_no_peer
                )
                return await driver.run()
            if self._leaving.is_set():
                return ConnectionEnd(LEAVING, CloseCode.GOING_AWAY)
            log.info("connected wire=%s peer=%s", wire, link.peer)
            connection = OpenConnection(session, link, self._restriction)
            reason = await self._serve_coordinator(connection)
        except Exception:
            # A bug in one session must not end the other connections.
            log.exception("broken wire=%s peer=%s", wire, link.peer)
            reason = INTERNAL_ERROR
        log.info("disconnected wire=%s peer=%s reason=%r", wire, link.peer, reason)
        return ConnectionEnd(reason)

    async def _serve_coordinator(self, connection: OpenConnection) -> str:
        joined = False

        def report(event: WorkerEvent) -> None:
            nonlocal joined
            name = connection.coordinator
            match event.kind:
                case "joined":
                    joined = True
                    event = WorkerEvent("joined", name)
                case "left" if joined and not self._leaving.is_set():
                    event = WorkerEvent("lost", f"{name}: {event.reason}")
                case "leaving":
                    event = WorkerEvent("leaving", f"{name}: {event.reason}")
                case _:
                    return  # a peer that was not admitted is only logged
            self._report({"coordinator": name}, event)

        agent = self._create_agent(connection, connection.open, report)
        agent.update_lent_slots(self._lent)
        if self._offers is not None:
            agent.update_offers(self._offers)
        self._agents.add(agent)
        self._idle.clear()
        try:
            return await agent.run()
        finally:
            self._agents.discard(agent)
            if not self._agents:
                self._idle.set()


def _expect_no_peer(message: PeerMessage) -> None:
    """Fail: such a session has no peer."""
    raise AssertionError(f"an exchange without a peer reported one: {message}")
