"""The peers of a node: admission, main sessions, and messages to and from each."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from shoal.domain.vocabulary import (
    Command,
    Dismiss,
    Draining,
    Event,
    HealthReported,
    LoadChanged,
    OffersChanged,
    Rejected,
)
from shoal.protocols.seam.peer_session import PeerJoined, PeerMessage, PeerRefused
from shoal.protocols.seam.session import Bulk, Close, Notice, Output, Send
from shoal.protocols.tealenet.codec.relay_messages import (
    RelayClose,
    RelayData,
    RelayReady,
)
from shoal.protocols.tealenet.codec.signatures import HEX_KEY
from shoal.protocols.tealenet.membership.deadline_queue import DeadlineQueue
from shoal.protocols.tealenet.membership.node_directory import KnownNode, NodeDirectory
from shoal.protocols.tealenet.membership.relay_peer import RelayPeer
from shoal.protocols.tealenet.membership.relay_session import RelaySession
from shoal.protocols.tealenet.membership.relay_sessions import (
    UNADMITTED_MAX,
    HostRelay,
    RelaySessions,
)
from shoal.protocols.tealenet.peer import PeerSoftware
from shoal.protocols.tealenet.peer_session import FromPeer

LINGER = 60.0  # seconds to remember a peer without sessions
REDIAL_FIRST = 1.0  # seconds before a peer is dialled again, doubled for each failure
REDIAL_MAX = 60.0  # seconds
DISMISSED_PAUSE = 300.0  # seconds before a dismissed peer is dialled again
ID_SHOWN = 16  # characters of a peer's id in notices

NodeOutput: TypeAlias = PeerMessage | Output


class RelayPeers:
    """All peers of a node.  Outputs are for the relay, messages for the node's owner.

    ``deadlines`` has the deadlines of sessions, and of peers without sessions.
    ``pending``: messages that sending caused; the node returns them at its next tick.
    """

    def __init__(
        self,
        sessions: RelaySessions,
        directory: NodeDirectory,
        deadlines: DeadlineQueue[RelaySession | RelayPeer],
        relay: HostRelay,
    ) -> None:
        self._sessions = sessions
        self._relay = relay
        self._directory = directory
        self._deadlines = deadlines
        self._peers: dict[str, RelayPeer] = {}
        self.pending: list[PeerMessage] = []
        self.is_host = False  # whether the relay is this node's own

    def find(self, node_id: str) -> RelayPeer | None:
        """Return a peer that has sessions or is remembered."""
        return self._peers.get(node_id)

    def add_session(self, session: RelaySession) -> None:
        """Add a session that was opened."""
        peer = self._peers.get(session.peer_id)
        if peer is None:
            peer = RelayPeer(session.peer_id, self._relay.dismiss)
            self._peers[peer.id] = peer
        peer.sessions.add(session)
        self._deadlines.set(session, session.deadline)

    def forget(self, peer: RelayPeer) -> None:
        """Forget a peer that has left."""
        del self._peers[peer.id]

    def evict_unadmitted(self, now: float) -> list[NodeOutput]:
        """End the oldest session whose peer is not admitted, if there are too many.

        Any node can open sessions, and must not block others in that way.
        """
        session = self._sessions.excess
        if session is None:
            return []
        closing = self._sessions.close_message(session.peer_id, session.id)
        reason = f"more than {UNADMITTED_MAX} sessions wait for admission"
        return [closing, *self._close_session(session, reason, now)]

    def update_description(self, node: KnownNode, now: float) -> list[NodeOutput]:
        """Apply what the relay reports about a peer."""
        peer = self._peers.get(node.id)
        if peer is None:
            return []
        if peer.main is None and node.software is PeerSoftware.MAC:
            # It opened this session before the relay described it, and keeps to it.
            peer.main = peer.reporting
        if peer.main is None:
            session = peer.reporting or next(iter(peer.sessions), None)
            if session is None:
                return []
            described = session.describe(node.description.profile)
            return self._process(session, described, now)
        outputs = peer.main.update_description(node.description, now)
        return self._process(peer.main, outputs, now)

    def tick(self, session: RelaySession, now: float) -> list[NodeOutput]:
        """Handle a session's deadline if it has passed."""
        if session.deadline is None or session.deadline > now:
            self._deadlines.set(session, session.deadline)
            return []
        return self._process(session, session.tick(now), now)

    # Messages of the relay.

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

    def on_joined(self, node_id: str, now: float) -> list[NodeOutput]:
        """Probe the sessions of a peer that has registered again.

        It may be another connection, which does not have them: many relays report no
        departure of the one that it displaces.
        """
        peer = self._peers.get(node_id)
        outputs: list[NodeOutput] = []
        for session in () if peer is None else [*peer.sessions]:
            outputs += self._process(session, session.probe(now), now)
        return outputs

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
            case OffersChanged() | LoadChanged() | Draining() | HealthReported():
                self._sessions.local_state[type(message)] = message
            case _:
                raise AssertionError("only a node's state is sent to all peers")
        outputs: list[Output] = []
        for session in self._sessions.all():
            outputs += self._send(session, message, now)
        return outputs

    # Private parts, in the order in which they are called.

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
                    translated += self._join(session, each, now)
                case message:
                    translated += self._receive(session, message, now)
        if not session.closed:
            self._deadlines.set(session, session.deadline)
        return translated

    def _join(
        self, session: RelaySession, event: PeerJoined, now: float
    ) -> list[NodeOutput]:
        peer = self._peers[session.peer_id]
        self._sessions.mark_admitted(session)
        assert session.peer_session is not None, "the event is its own"
        if not session.peer_session.is_anonymous:
            self._relay.admit(peer.id)
        if session.noise_key is not None:
            self._directory.pin_key(peer.id, session.noise_key)
        main = self._may_be_main(peer, session)
        outputs: list[NodeOutput] = []
        if main and (older := peer.main) is not None:
            outputs.append(self._sessions.close_message(peer.id, older.id))
            peer.sessions.discard(session)  # it does not end with the older one
            outputs += self._close_session(older, "the peer opened a new session", now)
            peer.sessions.add(session)
        # On other relays Shoal's workers serve every node.
        event = replace(event, exclusive=event.exclusive and self.is_host)
        return [*outputs, *peer.join(session, event, main=main)]

    def _may_be_main(self, peer: RelayPeer, session: RelaySession) -> bool:
        node = self._directory.get(peer.id)
        if (
            session.initiates
            or session.noise_key is not None
            or node.software is PeerSoftware.SHOAL
        ):
            return True  # a Shoal peer opens a second one after losing the first
        # Gateways open a session for each request; a Mac keeps its session.
        return peer.main is None and node.software is PeerSoftware.MAC

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
        self._deadlines.discard(session)
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
            self._deadlines.set(peer, min(peer.forget_at, max(now, peer.dial_at)))
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
