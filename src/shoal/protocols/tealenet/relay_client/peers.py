"""The peers of a node: which it dials, main sessions, and messages to and from each."""

from collections.abc import Sequence
from typing import TypeAlias

from shoal.domain.vocabulary import (
    Command,
    Dismiss,
    Draining,
    Event,
    LoadChanged,
    OffersChanged,
    Rejected,
)
from shoal.protocols.seam.deadlines import DeadlineQueue
from shoal.protocols.seam.peer_session import PeerJoined, PeerMessage, PeerRefused
from shoal.protocols.seam.session import Bulk, Close, Notice, Output, Send
from shoal.protocols.tealenet.codec.relay_messages import (
    RelayClose,
    RelayData,
    RelayOffer,
    RelayOpen,
    RelayReady,
)
from shoal.protocols.tealenet.codec.scalars import HEX_KEY
from shoal.protocols.tealenet.peer import PeerSoftware
from shoal.protocols.tealenet.peer_session import FromPeer
from shoal.protocols.tealenet.relay_client.peer import RelayPeer
from shoal.protocols.tealenet.relay_client.registration import KnownNode, NodeDirectory
from shoal.protocols.tealenet.relay_client.session import (
    SESSIONS_MAX,
    UNADMITTED_MAX,
    RelaySession,
    RelaySessions,
)

LINGER = 60.0  # seconds to remember a peer without sessions
REDIAL_FIRST = 1.0  # seconds before a peer is dialled again, doubled for each failure
REDIAL_MAX = 60.0  # seconds
DISMISSED_PAUSE = 300.0  # seconds before a dismissed peer is dialled again
SESSIONS_OF_PEER_MAX = 256
DIALS_MAX = 50  # peers that are dialled at once
DIAL_INTERVAL = 1.0  # seconds between two such batches
ID_SHOWN = 16  # characters of a peer's id in notices

NodeOutput: TypeAlias = PeerMessage | Output


class RelayPeers:
    """All peers of a node.  Outputs are for the relay, messages for the node's owner.

    A coordinator dials each node that has models for it; one that ``serves_only`` waits
    to be dialled.  A node that does not answer is dialled again, with increasing
    delays: ``dial_due_at`` is when the next ones are due.
    ``deadlines`` has the deadlines of sessions, and of peers without sessions, to dial
    again or to forget.
    ``pending``: messages that sending caused, until the node takes and returns them.
    """

    def __init__(
        self, sessions: RelaySessions, directory: NodeDirectory, *, serves_only: bool
    ) -> None:
        self._sessions = sessions
        self._directory = directory
        self._serves_only = serves_only
        self.deadlines: DeadlineQueue[RelaySession | RelayPeer] = DeadlineQueue()
        self._peers: dict[str, RelayPeer] = {}
        self.pending: list[PeerMessage] = []
        self.dial_due_at: float | None = None

    # Dialling, and deadlines.

    def dial_due(self, now: float) -> list[NodeOutput]:
        """Dial the nodes of the directory that are due, ``DIALS_MAX`` at most."""
        self.dial_due_at = None
        outputs: list[NodeOutput] = []
        dials = 0
        for node in self._directory.all():
            outputs += self._update_description(node, now)
            if not self._is_due(node, now):
                continue
            if dials < DIALS_MAX and len(self._sessions) < SESSIONS_MAX:
                outputs.append(self._dial(node, now))
                dials += 1
            else:
                self.dial_due_at = now + DIAL_INTERVAL
        return outputs

    def tick(self, now: float) -> list[NodeOutput]:
        """Handle the deadlines that have passed."""
        outputs: list[NodeOutput] = []
        for each in self.deadlines.pop_due(now):
            if isinstance(each, RelayPeer):
                outputs += self._dial_again(each, now)
            elif each.deadline is None or each.deadline > now:
                self.deadlines.set(each, each.deadline)
            else:
                outputs += self._process(each, each.tick(now), now)
        if self.dial_due_at is not None and now >= self.dial_due_at:
            outputs += self.dial_due(now)
        return outputs

    # Messages of the relay.

    def on_open(self, message: RelayOpen, now: float) -> list[NodeOutput]:
        """Accept a session that a peer opens; confirm one that is open already."""
        peer_id, session_id = message.from_node_id, message.session_id
        session = self._sessions.find(session_id)
        if session is not None and session.peer_id != peer_id:
            return [Notice("relayOpen ignored: its sessionID belongs to another node")]
        ready = self._sessions.ready_message(peer_id, session_id)
        if session is not None:
            return [ready]
        if not self._accepts(peer_id, session_id):
            return [self._sessions.close_message(peer_id, session_id)]
        node = self._directory.get(peer_id)
        self._add_session(self._sessions.accept(node, session_id, now))
        return [ready, *self._evict_unadmitted(now)]

    def on_offer(self, message: RelayOffer) -> list[NodeOutput]:
        """Answer a peer that offers a direct connection."""
        if not self._accepts(message.from_node_id, message.session_id):
            return []
        return [self._sessions.answer_message(message)]

    def on_ready(self, message: RelayReady, now: float) -> list[NodeOutput]:
        """Start a session that the peer has accepted."""
        session = self._session(message.from_node_id, message.session_id)
        return (
            []
            if session is None
            else self._process(session, session.on_ready(now), now)
        )

    def on_data(self, batch: Sequence[RelayData], now: float) -> list[NodeOutput]:
        """Process the data of one session; drop data with another sender's id.

        A peer that sends in a session that this node does not have, such as the one of
        its last connection, learns it from a relayClose.
        """
        peer_id, session_id = batch[0].from_node_id, batch[0].session_id
        session = self._session(peer_id, session_id)
        if session is None:
            return [*self._sessions.refuse(peer_id, session_id)]
        data = [each.data for each in batch if each.from_node_id == session.peer_id]
        return self._process(session, session.receive(data, now), now)

    def on_close(self, message: RelayClose, now: float) -> list[NodeOutput]:
        """Remove a session that the peer closed."""
        session = self._session(message.from_node_id, message.session_id)
        if session is None:
            return []
        return self._close_session(session, "the peer closed the session", now)

    def on_left(self, node_id: str, reason: str, now: float) -> list[NodeOutput]:
        """Remove a peer that has left the relay."""
        peer = self._peers.get(node_id)
        if peer is None:
            return []
        outputs: list[NodeOutput] = [*peer.leave(reason)]
        for session in [*peer.sessions]:
            outputs += self._close_session(session, reason, now)
        return outputs

    def on_not_found(self, text: str, now: float) -> list[NodeOutput]:
        """Remove a peer that the relay does not know; ``text`` contains its id."""
        node_id = HEX_KEY.search(text)
        if node_id is None:
            return []
        return self.on_left(node_id[0], "the relay no longer knows it", now)

    def on_session_not_found(self, text: str, now: float) -> list[NodeOutput]:
        """Remove a session that the relay does not have: its data goes nowhere.

        ``text`` contains its id, at Shoal's relay.
        """
        reason = "the relay no longer has the session"
        found = [each for each in self._sessions.all() if each.id in text]
        return [
            output
            for session in found
            for output in self._close_session(session, reason, now)
        ]

    # Sending.

    def send(self, peer_id: str, message: Event | Command, now: float) -> list[Output]:
        """Send a message to one peer; drop it if the peer has left."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return []
        if isinstance(message, Dismiss):
            return self._dismiss(peer, message, now)
        session = peer.session_for(message)
        return [] if session is None else self._send(session, message, now)

    def send_to_all(self, message: Event | Command, now: float) -> list[Output]:
        """Send this node's state to all peers, and to each peer that joins later."""
        match message:
            case OffersChanged() | LoadChanged() | Draining():
                self._sessions.local_state[type(message)] = message
            case _:
                raise AssertionError("only a node's state is sent to all peers")
        outputs: list[Output] = []
        for session in self._sessions.all():
            outputs += self._send(session, message, now)
        return outputs

    def take_pending(self) -> list[PeerMessage]:
        """Return the messages that sending caused, once."""
        pending, self.pending = self.pending, []
        return pending

    # Private parts, in the order in which they are called.

    def _update_description(self, node: KnownNode, now: float) -> list[NodeOutput]:
        """Apply what the relay reports about a peer."""
        peer = self._peers.get(node.id)
        if peer is None:
            return []
        if peer.main is None and node.software is PeerSoftware.MAC and peer.reporting:
            # It opened this session before the relay described it, and keeps to it.
            peer.main = peer.reporting
            peer.main.learn_software(node.software)
        if peer.main is None:
            session = peer.reporting or next(iter(peer.sessions), None)
            if session is None:
                return []
            described = session.describe(node.description.profile)
            return self._process(session, described, now)
        outputs = peer.main.update_description(node.description, now)
        return self._process(peer.main, outputs, now)

    def _is_due(self, node: KnownNode, now: float) -> bool:
        if not self._should_dial(node):
            return False
        peer = self._peers.get(node.id)
        return peer is None or (not peer.is_dialled and peer.dial_at <= now)

    def _should_dial(self, node: KnownNode) -> bool:
        """Return whether this node dials the other one, which has models for it."""
        described = node.description
        return not self._serves_only and described.available and bool(described.models)

    def _dial(self, node: KnownNode, now: float) -> Send:
        session, opening = self._sessions.open_outbound(node, now)
        self._add_session(session)
        return opening

    def _add_session(self, session: RelaySession) -> None:
        peer = self._peers.get(session.peer_id)
        if peer is None:
            peer = self._peers[session.peer_id] = RelayPeer(session.peer_id)
        peer.sessions.add(session)
        self.deadlines.set(session, session.deadline)

    def _dial_again(self, peer: RelayPeer, now: float) -> list[NodeOutput]:
        """Dial a peer again that has no session, or forget it."""
        if self._peers.get(peer.id) is not peer or peer.sessions:
            return []
        outputs: list[NodeOutput] = []
        if now >= peer.forget_at:
            outputs += peer.leave("its last session ended")
        node = self._directory.get(peer.id)
        if self._is_due(node, now) and len(self._sessions) < SESSIONS_MAX:
            outputs.append(self._dial(node, now))
        elif peer.dial_at > now:
            self.deadlines.set(peer, peer.dial_at)
        elif peer.joined:
            self.deadlines.set(peer, peer.forget_at)
        elif not self._should_dial(node):
            outputs += peer.leave("it is no longer dialled")
            del self._peers[peer.id]
        else:
            self.dial_due_at = now + DIAL_INTERVAL
        return outputs

    def _accepts(self, peer_id: str, session_id: str) -> bool:
        peer = self._peers.get(peer_id)
        few = peer is None or len(peer.sessions) < SESSIONS_OF_PEER_MAX
        return few and self._sessions.can_accept(peer_id, session_id)

    def _evict_unadmitted(self, now: float) -> list[NodeOutput]:
        """End the oldest session whose peer is not admitted, if there are too many.

        Any node can open sessions, and must not block others in that way.
        """
        session = self._sessions.excess
        if session is None:
            return []
        closing = self._sessions.close_message(session.peer_id, session.id)
        reason = f"more than {UNADMITTED_MAX} sessions wait for admission"
        return [closing, *self._close_session(session, reason, now)]

    def _session(self, peer_id: str, session_id: str) -> RelaySession | None:
        session = self._sessions.find(session_id)
        return session if session is not None and session.peer_id == peer_id else None

    def _process(
        self, session: RelaySession, outputs: Sequence[FromPeer | Output], now: float
    ) -> list[NodeOutput]:
        """Translate the outputs of a session into those of the node."""
        translated: list[NodeOutput] = []
        for each in outputs:
            match each:
                case Send(data):
                    translated.append(self._sessions.data_message(session, data))
                case Close(reason):
                    translated.append(
                        self._sessions.close_message(session.peer_id, session.id)
                    )
                    translated += self._close_session(session, reason, now)
                case Bulk():
                    raise AssertionError("a relay carries messages only, no streams")
                case Notice(text):
                    translated.append(
                        Notice(f"node {session.peer_id[:ID_SHOWN]}: {text}")
                    )
                case PeerRefused():
                    translated += self._peers[session.peer_id].refuse(each)
                case PeerJoined():
                    translated += self._join(session, each)
                case message:
                    translated += self._receive(session, message, now)
        if not session.closed:
            self.deadlines.set(session, session.deadline)
        return translated

    def _join(self, session: RelaySession, event: PeerJoined) -> Sequence[PeerMessage]:
        peer = self._peers[session.peer_id]
        self._sessions.mark_admitted(session)
        # Gateways open a session for each request; a Mac keeps its session.
        is_mac = self._directory.get(peer.id).software is PeerSoftware.MAC
        main = peer.main is None and (session.initiates or is_mac)
        return peer.join(session, event, main=main)

    def _receive(
        self, session: RelaySession, message: FromPeer, now: float
    ) -> Sequence[NodeOutput]:
        received = self._peers[session.peer_id].receive(session, message)
        if isinstance(received, Rejected):
            return self._process(session, session.send(received, now), now)
        return received

    def _close_session(
        self, session: RelaySession, reason: str, now: float
    ) -> list[NodeOutput]:
        """Remove a session whose end the peer knows; the main one ends all others."""
        session.close(reason)
        self._sessions.remove(session)
        self.deadlines.discard(session)
        peer = self._peers[session.peer_id]
        was_main = session is peer.main
        outputs: list[NodeOutput] = [*peer.close_session(session, reason)]
        if was_main:
            for other in [*peer.sessions]:
                outputs.append(self._sessions.close_message(peer.id, other.id))
                outputs += self._close_session(other, reason, now)
        if session.initiates or was_main:
            peer.dial_at = max(peer.dial_at, now + _redial_delay(peer.failures))
            peer.failures += 1
        if not peer.sessions:
            peer.forget_at = now + LINGER
            self.deadlines.set(peer, min(peer.forget_at, max(now, peer.dial_at)))
        return outputs

    def _dismiss(self, peer: RelayPeer, command: Dismiss, now: float) -> list[Output]:
        peer.dial_at = now + DISMISSED_PAUSE
        outputs: list[Output] = []
        for session in [*peer.sessions]:
            outputs += self._send(session, command, now)
            if not session.closed:
                outputs.append(self._sessions.close_message(peer.id, session.id))
                self._hold_received(self._close_session(session, command.reason, now))
        self._hold_received(peer.leave(command.reason))
        return outputs

    def _send(
        self, session: RelaySession, message: Event | Command, now: float
    ) -> list[Output]:
        return self._hold_received(
            self._process(session, session.send(message, now), now)
        )

    def _hold_received(self, outputs: Sequence[NodeOutput]) -> list[Output]:
        """Return the outputs for the relay; keep the messages for the next tick."""
        to_relay: list[Output] = []
        for each in outputs:
            if isinstance(each, PeerMessage):
                self.pending.append(each)
            else:
                to_relay.append(each)
        return to_relay


def _redial_delay(failures: int) -> float:
    """Return the delay before a peer is dialled again, in seconds."""
    return min(REDIAL_MAX, REDIAL_FIRST * 2.0 ** min(failures, 10))
