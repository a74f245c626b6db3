"""Serves connections to peers, and announces the pool's own offers to them."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import get_args

from shoal.coordinator.admission import WorkerAdmission
from shoal.coordinator.hub import Hub
from shoal.domain import facts
from shoal.domain import vocabulary as words
from shoal.domain.errors import NotAdmitted, StoreError
from shoal.peers import remote_peer
from shoal.peers.inbound_jobs import DEFAULT_POLICY, PeerJobPolicy
from shoal.peers.peer_directory import PeerDirectory
from shoal.peers.peer_models import NAME_MAX, OfferRateLimiter
from shoal.pool.own_offers import offering_peers, own_load, own_offers
from shoal.protocols.seam import peer_session
from shoal.protocols.seam.session import CloseCode, PeerProfile
from shoal.transports.clock import Clock, Timer
from shoal.transports.driver import ConnectionEnd, Driver
from shoal.transports.link import Link
from shoal.transports.local_link import LocalLink
from shoal.transports.loop_share import LoopShare

ANNOUNCE_INTERVAL = 1.0  # minimum seconds between announcements of the own state
OWN_STATE = frozenset({words.OffersChanged, words.LoadChanged, words.Draining})
PEERS_MAX = 4096  # peers per connection
REPLACED = "replaced by a newer connection"
_OF_APPROVALS = {facts.WorkerApproved, facts.WorkerDisapproved}
_OF_WORKERS = {*get_args(facts.WorkerFact)}
RENAME = f"{REPLACED} of this name: choose another --name"
INTERNAL_ERROR = ConnectionEnd(
    "internal error", CloseCode.INTERNAL_ERROR, "internal error"
)

log = logging.getLogger("shoal.peers")


class PeerConnections:
    """All connections to peers, and the peers on them.

    Announces to peers what this pool can run for them, and its load, on every change.
    ``sharing`` answers their messages about copies of models, ``directory`` lists the
    peers, and their large messages have a ``share`` of the loop.
    """

    def __init__(
        self,
        hub: Hub,
        clock: Clock,
        door: WorkerAdmission,
        policy: PeerJobPolicy = DEFAULT_POLICY,
        sharing: remote_peer.ModelSharing | None = None,
        directory: PeerDirectory | None = None,
        share: LoopShare | None = None,
    ) -> None:
        offer_limiter = OfferRateLimiter(clock)
        self.context = remote_peer.PeerContext(
            hub, sharing or remote_peer.NoModelSharing(), policy, offer_limiter
        )
        self.clock = clock
        self.admission = door
        self.directory = directory or PeerDirectory()
        self.share = share or LoopShare(clock)
        # With models that wait to rejoin.
        self.rejoining: set[remote_peer.RemotePeer] = set()
        self._connections: set[_PeerConnection] = set()
        self._subscribers: set[_PeerConnection] = set()  # that accept announcements
        self._peers: dict[str, remote_peer.RemotePeer] = {}  # by wire and name
        self._draining: words.Draining | None = None
        self._offering: frozenset[str] | None = None  # None: outdated
        # By the peers that are left out, as long as they are valid.
        self._offers: dict[frozenset[str], words.OffersChanged] = {}
        self._loads: dict[frozenset[str], words.LoadChanged] = {}
        self._announce_from = clock.now()
        self._timer: Timer | None = None
        hub.subscribe(self._on_facts)

    async def serve(
        self, wire: str, session: peer_session.PeerSession, link: Link
    ) -> ConnectionEnd:
        """Run a session until its connection ends; return the reason.

        Raises only CancelledError: a bug in the session, or here, ends the connection.
        """
        connection = _PeerConnection(self, wire, session, link)
        # A session that accepts nothing carries no peers, only a short exchange; a
        # local link is the coordinator's own.  Neither is worth an INFO line.
        notable = session.accepts and not isinstance(link, LocalLink)
        level = logging.INFO if notable else logging.DEBUG
        extra = connection.driver.log_extra
        log.log(level, "connected wire=%s peer=%s", wire, link.peer, extra=extra)
        end = ConnectionEnd("cut off")
        self._connections.add(connection)
        if not OWN_STATE.isdisjoint(session.accepts):
            self._subscribers.add(connection)
        try:
            end = await connection.run()
        except Exception:
            # A bug in one session must not end the other connections.
            end = INTERNAL_ERROR
            log.exception("broken wire=%s peer=%s", wire, link.peer)
            await link.close(end.code, end.text)
        finally:
            self._connections.discard(connection)
            self._subscribers.discard(connection)
            message = "disconnected wire=%s peer=%s reason=%r"
            extra = connection.driver.log_extra
            log.log(level, message, wire, link.peer, end.reason, extra=extra)
        return end

    def drain(self, reason: str) -> None:
        """Announce to all peers that new jobs are refused; the hub refuses them."""
        self._draining = words.Draining(reason)
        for connection in self._subscribers:
            connection.broadcast(self._draining)

    def disconnect_all(self, reason: str) -> None:
        """Close all connections; peers may reconnect."""
        for connection in self._connections:
            connection.driver.disconnect(reason, CloseCode.GOING_AWAY, reason)

    # For the connections.

    def admit(self, peer: remote_peer.RemotePeer) -> None:
        """Admit a peer; it replaces an older one of its name."""
        if (older := self._peers.get(peer.name)) is not None:
            reason = REPLACED if peer.identity.sole_worker else RENAME
            older.dismiss(reason, replaced=True)
        self._peers[peer.name] = peer
        if not peer.identity.sole_worker:
            self.directory.add(peer.name, peer.identity, peer.address)
        peer.admit()

    def on_left(self, peer: remote_peer.RemotePeer) -> None:
        """Remove a peer that left."""
        self.rejoining.discard(peer)
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            self.directory.remove(peer.name)

    def own_state(self, peers: Collection[str]) -> tuple[words.Event, ...]:
        """Return the events that describe this pool, without the models of ``peers``.

        Quadratic in the plain peers that offer models; fine below a few hundred.
        """
        pool = self.context.hub.pool
        if self._offering is None:
            self._offering = offering_peers(pool)
        without = self._offering.intersection(peers)
        if without not in self._offers:
            self._offers[without] = words.OffersChanged(own_offers(pool, without))
        if without not in self._loads:
            self._loads[without] = words.LoadChanged(own_load(pool, without))
        last = () if self._draining is None else (self._draining,)
        return (self._offers[without], self._loads[without], *last)

    # From the hub.

    def _on_facts(self, batch: Sequence[facts.Fact]) -> None:
        if self.rejoining:
            self.rejoining -= {each for each in self.rejoining if each.rejoin_models()}
        self._loads.clear()
        kinds = {*map(type, batch)}
        if kinds <= {facts.WorkerLoadChanged}:
            return
        if not kinds.isdisjoint(_OF_APPROVALS):
            for peer in self._peers.values():
                peer.update_approval()
        if not kinds.isdisjoint(_OF_WORKERS):
            self._offers.clear()
            self._offering = None
        if self._timer is None and self._subscribers:
            when = max(self.clock.now(), self._announce_from)
            self._timer = self.clock.call_at(when, self._announce)

    def _announce(self) -> None:
        self._timer = None
        self._announce_from = self.clock.now() + ANNOUNCE_INTERVAL
        for connection in self._subscribers:
            connection.announce()


class _PeerConnection:
    """One connection and its peers."""

    def __init__(
        self,
        connections: PeerConnections,
        wire: str,
        session: peer_session.PeerSession,
        link: Link,
    ) -> None:
        self.driver: Driver[peer_session.PeerMessage, peer_session.ToPeer] = Driver(
            session, link, connections.clock, self._on_message, connections.share
        )
        self._connections = connections
        self._wire = wire
        self._peers: dict[str, remote_peer.RemotePeer] = {}  # by the session's keys
        self._announced: tuple[words.Event, ...] = ()  # the pool's state
        self._refused: dict[str, str] = {}  # names, by the session's keys
        self._admitting: dict[remote_peer.RemotePeer, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> ConnectionEnd:
        """Serve the connection until it ends; return the reason."""
        reason = "cut off"
        async with self._tasks:
            # The task first runs when the session is open.
            if not OWN_STATE.isdisjoint(self.driver.accepts):
                self._tasks.create_task(self._send_own_state())
            try:
                end = await self.driver.run()
                reason = end.reason
            except Exception:
                reason = INTERNAL_ERROR.reason
                raise
            finally:
                for key in [*self._peers, *self._refused]:
                    self._remove(key, reason)
        return end

    def broadcast(self, event: words.Event) -> None:
        """Send an event to all peers, if the wire can encode it."""
        if type(event) in self.driver.accepts:
            self.driver.send(peer_session.ToPeer(peer_session.ALL_PEERS, event))

    def announce(self) -> None:
        """Send the state of this pool to all peers, as far as it has changed."""
        shown = {
            peer.name for peer in self._peers.values() if not peer.identity.exclusive
        }
        before, self._announced = self._announced, self._connections.own_state(shown)
        for event in self._announced:
            if event not in before:
                self.broadcast(event)

    async def _send_own_state(self) -> None:
        self.announce()

    def _on_message(self, received: peer_session.PeerMessage) -> None:
        key = received.peer
        match received.message:
            case words.AnswerChunk() as chunk:  # first: one per token
                if (peer := self._peers.get(key)) is not None:
                    peer.on_message(chunk)
            case peer_session.PeerJoined() as joined:
                self._on_joined(key, joined)
            case peer_session.PeerRefused(name, reason):
                self._refused[key] = f"{self._wire}:{name}"
                self._connections.directory.refuse(self._refused[key], reason)
            case peer_session.PeerDescribed(profile):
                self._on_described(key, profile)
            case peer_session.PeerLeft(reason):
                self._remove(key, reason)
            case message:
                if (peer := self._peers.get(key)) is not None:
                    peer.on_message(message)

    def _on_joined(self, key: str, joined: peer_session.PeerJoined) -> None:
        self._remove(key, "met anew")
        level = logging.WARNING
        if (reason := self._rejection_reason(joined)) is None:
            # Some peers come back for ever, so that is not worth a line each.
            reason, level = self._suspension_reason(joined), logging.DEBUG
        if reason is not None:
            message = "refused wire=%s peer=%r: %s"
            extra = self.driver.log_extra
            log.log(level, message, self._wire, key[:64], reason, extra=extra)
            self.driver.send(peer_session.ToPeer(key, words.Dismiss(reason)))
            return
        peer = self._peers[key] = remote_peer.RemotePeer(
            self._connections.context,
            self._wire,
            key,
            joined,
            self.driver,
            self._tasks.create_task,
            self._connections.rejoining.add,
            self._on_left,
            # A link that was dialled is named by its URL.
            joined.address or (self.driver.peer if "://" in self.driver.peer else ""),
        )
        level = logging.DEBUG if joined.sole_worker else logging.INFO
        log.log(level, "met peer=%r protection=%s", peer.name, joined.protection.value)
        if joined.grant.token_id:
            self._admitting[peer] = self._tasks.create_task(self._admit(peer))
        else:
            self._connections.admit(peer)

    def _on_described(self, key: str, profile: PeerProfile) -> None:
        peer = self._peers.get(key)
        name = self._refused.get(key, "") if peer is None else peer.name
        if name and self._connections.directory.describe(name, profile):
            extra = None if peer is not None else self.driver.log_extra
            log.info("described peer=%r %s", name, _shown(profile), extra=extra)

    def _rejection_reason(self, joined: peer_session.PeerJoined) -> str | None:
        if not joined.sole_worker and not 0 < len(joined.name) <= NAME_MAX:
            return f"a peer's name has 1 to {NAME_MAX} characters"
        if len(self._peers) >= PEERS_MAX:
            return f"this connection already has {PEERS_MAX} peers"
        return None

    def _suspension_reason(self, joined: peer_session.PeerJoined) -> str | None:
        """Return why an operator's order refuses a peer, or None."""
        pool = self._connections.context.hub.pool
        return pool.suspensions.refusal(remote_peer.peer_name(self._wire, joined))

    async def _admit(self, peer: remote_peer.RemotePeer) -> None:
        """Admit a peer after its token use is stored; track it until it leaves."""
        try:
            await self._connections.admission.record_use(peer.identity.grant)
            with self._connections.admission.track(peer.identity.grant, peer):
                self._connections.admit(peer)
                # Wait until the peer leaves, which cancels this task.
                await asyncio.get_running_loop().create_future()
        except (NotAdmitted, StoreError) as error:
            extra = self.driver.log_extra
            log.warning("refused peer=%r: %s", peer.name, error, extra=extra)
            await peer.close(CloseCode.POLICY_VIOLATION, str(error))

    def _remove(self, key: str, reason: str) -> None:
        if (refused := self._refused.pop(key, None)) is not None:
            self._connections.directory.remove_refused(refused)
        if (peer := self._peers.get(key)) is not None:
            peer.leave(reason)

    def _on_left(self, peer: remote_peer.RemotePeer, reason: str) -> None:
        level = logging.DEBUG if peer.identity.sole_worker else logging.INFO
        log.log(level, "left peer=%r reason=%r", peer.name, reason)
        if self._peers.get(peer.key) is peer:
            del self._peers[peer.key]
        self._connections.on_left(peer)
        if (admitting := self._admitting.pop(peer, None)) is not None:
            admitting.cancel()


def _shown(profile: PeerProfile) -> str:
    """Return the fields of a profile for a log line."""
    fields: dict[str, object] = {"name": profile.name}
    if (hardware := profile.hardware) is not None:
        fields |= {
            "chip": hardware.chip,
            "memory_gb": hardware.memory_gb,
            "gpu_memory_gb": hardware.gpu_memory_gb,
            "tier": hardware.tier,
        }
    fields |= {
        "owner": profile.owner,
        "organization": profile.organization,
        "version": profile.protocol_version,
    }
    return " ".join(f"{name}={value!r}" for name, value in fields.items() if value)
