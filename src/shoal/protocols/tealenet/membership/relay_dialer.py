"""Which other nodes to open sessions with, when, and whose sessions to accept.

A coordinator dials each node that has models for it.  A worker dials the coordinator
that a relay of Shoal belongs to, and serves no other node there.  On any other relay it
waits to be dialled, like any node.  A node that does not answer is dialled again, with
increasing delays.
"""

from shoal.protocols.seam.session import Notice, Send
from shoal.protocols.tealenet.codec.relay_messages import RelayOffer, RelayOpen
from shoal.protocols.tealenet.local_node import TealeLocalNode, TealeRole
from shoal.protocols.tealenet.membership.deadline_queue import DeadlineQueue
from shoal.protocols.tealenet.membership.node_directory import KnownNode, NodeDirectory
from shoal.protocols.tealenet.membership.relay_peers import (
    NodeOutput,
    RelayPeer,
    RelayPeers,
)
from shoal.protocols.tealenet.membership.relay_sessions import (
    SESSIONS_MAX,
    RelaySession,
    RelaySessions,
)
from shoal.protocols.tealenet.peer import PeerSoftware

SESSIONS_OF_PEER_MAX = 256
DIALS_MAX = 50  # peers that are called on at once
DIAL_INTERVAL = 1.0  # seconds from one such lot to the next


class RelayDialer:
    """Who is called on.  ``host`` is the coordinator of the relay, once it is known.

    Guests come up in ``deadlines`` when they are to be called on or forgotten.
    """

    def __init__(
        self,
        own: TealeLocalNode,
        sessions: RelaySessions,
        directory: NodeDirectory,
        peers: RelayPeers,
        deadlines: DeadlineQueue[RelaySession | RelayPeer],
    ) -> None:
        self._own = own
        self._sessions = sessions
        self._directory = directory
        self._peers = peers
        self._deadlines = deadlines
        self._host: str | None = None
        self.dial_due_at: float | None = None

    @property
    def needs_directory(self) -> bool:
        """Whether it matters to us who is on the relay."""
        return self._own.role is TealeRole.COORDINATOR or self._host is None

    def on_host(self, node_id: str, now: float) -> list[NodeOutput]:
        """Take note of whose relay this is."""
        self._host = node_id
        return self.dial_due(now)

    def dial_due(self, now: float) -> list[NodeOutput]:
        """Look at who is there, and call on those who are worth it."""
        self.dial_due_at = None
        nodes = {node.id: node for node in self._directory.all()}
        if self._host is not None:
            nodes[self._host] = self._directory.get(self._host)
        outputs: list[NodeOutput] = []
        calls = 0
        for node in nodes.values():
            outputs += self._peers.update_description(node, now)
            if not self._is_due(node, now):
                continue
            if calls < DIALS_MAX and len(self._sessions) < SESSIONS_MAX:
                outputs.append(self._dial(node, now))
                calls += 1
            else:
                self.dial_due_at = now + DIAL_INTERVAL
        return outputs

    def on_deadline(self, guest: RelayPeer, now: float) -> list[NodeOutput]:
        """Call on a peer again that has no session with us, or forget it."""
        if self._peers.find(guest.id) is not guest or guest.sessions:
            return []
        outputs: list[NodeOutput] = []
        if now >= guest.forget_at:
            outputs += guest.leave("it has no session with us any more")
        node = self._directory.get(guest.id)
        if self._is_due(node, now) and len(self._sessions) < SESSIONS_MAX:
            outputs.append(self._dial(node, now))
        elif guest.dial_at > now:
            self._deadlines.set(guest, guest.dial_at)
        elif guest.joined:
            self._deadlines.set(guest, guest.forget_at)
        elif not self._should_dial(node):
            self._peers.forget(guest)
        else:
            self.dial_due_at = now + DIAL_INTERVAL
        return outputs

    def on_open(self, message: RelayOpen, now: float) -> list[NodeOutput]:
        """Take a session that a peer opens; one that is open already is still ready."""
        peer_id, session_id = message.from_node_id, message.session_id
        talk = self._sessions.find(session_id)
        if talk is not None and talk.peer_id != peer_id:
            return [Notice("a session was opened under the id of another's")]
        ready = self._sessions.ready_message(peer_id, session_id)
        if talk is not None:
            return [ready]
        if not self._accepts(peer_id, session_id):
            return [self._sessions.close_message(peer_id, session_id)]
        node = self._directory.get(peer_id)
        self._peers.add_session(self._sessions.accept(node, session_id, now))
        return [ready, *self._peers.evict_unadmitted(now)]

    def on_offer(self, message: RelayOffer) -> list[NodeOutput]:
        """Answer a peer that would rather connect directly."""
        if not self._accepts(message.from_node_id, message.session_id):
            return []
        return [self._sessions.answer_message(message)]

    # Private parts, in the order in which they are called.

    def _is_due(self, node: KnownNode, now: float) -> bool:
        if node.id == self._sessions.id or not self._should_dial(node):
            return False
        guest = self._peers.find(node.id)
        return guest is None or (not guest.is_dialled and guest.dial_at <= now)

    def _should_dial(self, node: KnownNode) -> bool:
        """Say whether a node is one to call on."""
        if self._own.role is TealeRole.WORKER:
            return node.id == self._host
        if node.software is not PeerSoftware.SHOAL:
            return node.description.available and bool(node.description.models)
        if node.role == TealeRole.WORKER.value:
            return self._host is None  # else it calls on its coordinator
        # Of two coordinators one calls, and not who would show its passcode to anybody.
        return (
            node.role == TealeRole.COORDINATOR.value
            and self._sessions.id > node.id
            and self._own.passcode is None
        )

    def _dial(self, node: KnownNode, now: float) -> Send:
        talk, opening = self._sessions.open_outbound(node, now)
        self._peers.add_session(talk)
        return opening

    def _accepts(self, peer_id: str, session_id: str) -> bool:
        if not self.needs_directory and peer_id != self._host:
            return False
        guest = self._peers.find(peer_id)
        few = guest is None or len(guest.sessions) < SESSIONS_OF_PEER_MAX
        return few and self._sessions.can_accept(peer_id, session_id)
