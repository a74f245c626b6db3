"""Serves connections that carry several peers, and announces our own offers to them."""

import asyncio
import logging

from shoal.coordinator.admission import WorkerAdmission
from shoal.coordinator.hub import Hub
from shoal.domain.errors import NotAdmitted, StoreError
from shoal.domain.facts import Fact, WorkerFact, WorkerLoadChanged
from shoal.domain.vocabulary import (
    AnswerChunk,
    Dismiss,
    Draining,
    Event,
    LoadChanged,
    OffersChanged,
)
from shoal.peers.inbound_jobs import DEFAULT_POLICY, PeerJobPolicy
from shoal.peers.offer_rate_limit import OfferRateLimiter
from shoal.peers.peer_models import NAME_MAX
from shoal.peers.remote_peer import (
    ModelSharing,
    NoModelSharing,
    PeerContext,
    RemotePeer,
)
from shoal.pool.own_offers import own_load, own_offers
from shoal.protocols.seam.multi_peer import (
    ALL_PEERS,
    MultiPeerSession,
    PeerJoined,
    PeerLeft,
    PeerMessage,
    ToPeer,
)
from shoal.protocols.seam.session import CloseCode
from shoal.transports.clock import Clock, Timer
from shoal.transports.driver import ConnectionEnd, Driver
from shoal.transports.link import Link
from shoal.transports.local_link import LocalLink

ANNOUNCE_INTERVAL = 1.0  # seconds from one word about ourselves to the next
OWN_STATE = frozenset({OffersChanged, LoadChanged, Draining})
PEERS_MAX = 4096  # peers of one connection
REPLACED = "replaced by a newer connection"
RENAME = f"{REPLACED} of this name: choose another --name"
INTERNAL_ERROR = ConnectionEnd(
    "internal error", CloseCode.INTERNAL_ERROR, "internal error"
)

log = logging.getLogger("shoal.crowd")


class PeerConnections:
    """All connections with several peers each, and who is met on them.

    Peers are told what we can run for them, and how busy we are, when that changes.
    ``share`` answers what they say about models to be copied.
    """

    def __init__(
        self,
        hub: Hub,
        clock: Clock,
        door: WorkerAdmission,
        house: PeerJobPolicy = DEFAULT_POLICY,
        share: ModelSharing | None = None,
    ) -> None:
        restocking = OfferRateLimiter(clock)
        self.context = PeerContext(hub, share or NoModelSharing(), house, restocking)
        self.clock = clock
        self.admission = door
        self.rejoining: set[RemotePeer] = set()  # with models that are to join anew
        self._connections: set[_PeerConnection] = set()
        self._audience: set[_PeerConnection] = set()  # that can be told about us
        self._peers: dict[str, RemotePeer] = {}  # by wire and name
        self._draining: Draining | None = None
        self._offered: OffersChanged | None = None  # None: has to be found out
        self._announced: tuple[Event, ...] = ()
        self._announce_from = clock.now()
        self._timer: Timer | None = None
        hub.subscribe(self._on_fact)

    async def serve(
        self, wire: str, session: MultiPeerSession, link: Link
    ) -> ConnectionEnd:
        """Run a session until its connection ends; return why it did.

        Raises nothing but CancelledError: a bug in the session, or here, ends the
        connection.
        """
        crowd = _PeerConnection(self, wire, session, link)
        # Where nothing can be said, nobody is met: it is over before one has looked.
        # And what the coordinator says to itself is no news.
        news = session.accepts and not isinstance(link, LocalLink)
        level = logging.INFO if news else logging.DEBUG
        log.log(level, "connected wire=%s peer=%s", wire, link.peer)
        end = ConnectionEnd("cut off")
        self._connections.add(crowd)
        if not OWN_STATE.isdisjoint(session.accepts):
            self._audience.add(crowd)
        try:
            end = await crowd.run()
        except Exception:
            # It must not take the other connections with it.
            end = INTERNAL_ERROR
            log.exception("broken wire=%s peer=%s", wire, link.peer)
            await link.close(end.code, end.text)
        finally:
            self._connections.discard(crowd)
            self._audience.discard(crowd)
            reason = end.reason
            parted = "disconnected wire=%s peer=%s reason=%r"
            log.log(level, parted, wire, link.peer, reason)
        return end

    def drain(self, reason: str) -> None:
        """Tell all peers that nothing new is taken; the hub refuses it in any case."""
        self._draining = Draining(reason)
        for crowd in self._audience:
            crowd.broadcast(self._draining)

    def disconnect_all(self, reason: str) -> None:
        """End all connections; whoever is at the other end may come back."""
        for crowd in self._connections:
            crowd.driver.disconnect(reason, CloseCode.GOING_AWAY, reason)

    # For the connections.

    def admit(self, guest: RemotePeer) -> None:
        """Let a peer in, in the place of an older one of its name."""
        if (older := self._peers.get(guest.name)) is not None:
            older.dismiss(REPLACED if guest.identity.sole_worker else RENAME)
        self._peers[guest.name] = guest
        guest.admit()

    def on_left(self, guest: RemotePeer) -> None:
        """Forget a peer that has gone."""
        self.rejoining.discard(guest)
        if self._peers.get(guest.name) is guest:
            del self._peers[guest.name]

    def own_state(self) -> tuple[Event, ...]:
        """Return what a peer has to know of us."""
        pool = self.context.hub.pool
        if self._offered is None:
            self._offered = OffersChanged(own_offers(pool))
        last = () if self._draining is None else (self._draining,)
        return (self._offered, LoadChanged(own_load(pool)), *last)

    # From the hub.

    def _on_fact(self, fact: Fact) -> None:
        for guest in [guest for guest in self.rejoining if guest.rejoin_models()]:
            self.rejoining.discard(guest)
        if isinstance(fact, WorkerLoadChanged):
            return
        if isinstance(fact, WorkerFact):
            self._offered = None
        if self._timer is None and self._audience:
            # Later than the facts of the same batch, at any rate.
            when = max(self.clock.now(), self._announce_from)
            self._timer = self.clock.call_at(when, self._announce)

    def _announce(self) -> None:
        self._timer = None
        self._announce_from = self.clock.now() + ANNOUNCE_INTERVAL
        before, self._announced = self._announced, self.own_state()
        for word in self._announced:
            if word not in before:
                for crowd in self._audience:
                    crowd.broadcast(word)


class _PeerConnection:
    """One connection and its peers."""

    def __init__(
        self, crowds: PeerConnections, wire: str, session: MultiPeerSession, link: Link
    ) -> None:
        self.driver: Driver[PeerMessage, ToPeer] = Driver(
            session, link, crowds.clock, self._on_message
        )
        self._connections = crowds
        self._wire = wire
        self._peers: dict[str, RemotePeer] = {}  # by what the session calls them
        self._admitting: dict[RemotePeer, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> ConnectionEnd:
        """Serve until the connection ends; return why it did."""
        reason = "cut off"
        async with self._tasks:
            # Its first turn comes when the session has opened.
            if not OWN_STATE.isdisjoint(self.driver.accepts):
                self._tasks.create_task(self._introduce())
            try:
                end = await self.driver.run()
                reason = end.reason
            except Exception:
                reason = INTERNAL_ERROR.reason
                raise
            finally:
                for key in list(self._peers):
                    self._remove(key, reason)
        return end

    def broadcast(self, word: Event) -> None:
        """Tell all peers something, if the wire can express it."""
        if type(word) in self.driver.accepts:
            self.driver.send(ToPeer(ALL_PEERS, word))

    async def _introduce(self) -> None:
        for word in self._connections.own_state():
            self.broadcast(word)

    def _on_message(self, said: PeerMessage) -> None:
        match said.message:
            case AnswerChunk() as chunk:  # first: there is one for each token
                if (guest := self._peers.get(said.peer)) is not None:
                    guest.on_message(chunk)
            case PeerJoined():
                self._on_joined(said.peer, said.message)
            case PeerLeft(reason):
                self._remove(said.peer, reason)
            case word:
                if (guest := self._peers.get(said.peer)) is not None:
                    guest.on_message(word)

    def _on_joined(self, key: str, met: PeerJoined) -> None:
        self._remove(key, "met anew")
        if (reason := self._why_refused(met)) is not None:
            log.warning("refused wire=%s peer=%r: %s", self._wire, key[:64], reason)
            self.driver.send(ToPeer(key, Dismiss(reason)))
            return
        guest = self._peers[key] = RemotePeer(
            self._connections.context,
            self._wire,
            key,
            met,
            self.driver,
            self._tasks.create_task,
            self._connections.rejoining.add,
            self._on_left,
        )
        level = logging.DEBUG if met.sole_worker else logging.INFO
        log.log(level, "met peer=%r protection=%s", guest.name, met.protection.value)
        if met.grant.token_id:
            self._admitting[guest] = self._tasks.create_task(self._admit(guest))
        else:
            self._connections.admit(guest)

    def _why_refused(self, met: PeerJoined) -> str | None:
        if not met.sole_worker and not 0 < len(met.name) <= NAME_MAX:
            return f"a peer's name has 1 to {NAME_MAX} characters"
        if len(self._peers) >= PEERS_MAX:
            return f"{PEERS_MAX} peers are on this connection already"
        return None

    async def _admit(self, guest: RemotePeer) -> None:
        """Let a peer in once that is stored, for as long as its token holds."""
        try:
            await self._connections.admission.record_use(guest.identity.grant)
            with self._connections.admission.track(guest.identity.grant, guest):
                self._connections.admit(guest)
                # Until it leaves, which cancels this.
                await asyncio.get_running_loop().create_future()
        except (NotAdmitted, StoreError) as error:
            log.warning("refused peer=%r: %s", guest.name, error)
            await guest.close(CloseCode.POLICY_VIOLATION, str(error))

    def _remove(self, key: str, reason: str) -> None:
        if (guest := self._peers.get(key)) is not None:
            guest.leave(reason)

    def _on_left(self, guest: RemotePeer, reason: str) -> None:
        level = logging.DEBUG if guest.identity.sole_worker else logging.INFO
        log.log(level, "left peer=%r reason=%r", guest.name, reason)
        if self._peers.get(guest.key) is guest:
            del self._peers[guest.key]
        self._connections.on_left(guest)
        if (admitting := self._admitting.pop(guest, None)) is not None:
            admitting.cancel()
