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
from shoal.protocols.tealenet.membership.relay_peer import RelayPeer
from shoal.protocols.tealenet.membership.relay_peers import NodeOutput, RelayPeers
from shoal.protocols.tealenet.membership.relay_session import RelaySession
from shoal.protocols.tealenet.membership.relay_sessions import (
    SESSIONS_MAX,
    RelaySessions,
)
from shoal.protocols.tealenet.peer import PeerSoftware

SESSIONS_OF_PEER_MAX = 256
DIALS_MAX = 50  # peers that are dialled at once
DIAL_INTERVAL = 1.0  # seconds between two such batches


class RelayDialer:
    """Dials the peers of a node and accepts their sessions.

    ``deadlines`` has the peers to dial again or to forget.
    """

    def __init__(
        self,
        local: TealeLocalNode,
        sessions: RelaySessions,
        directory: NodeDirectory,
        peers: RelayPeers,
        deadlines: DeadlineQueue[RelaySession | RelayPeer],
    ) -> None:
        self._local = local
        self._sessions = sessions
        self._directory = directory
        self._peers = peers
        self._deadlines = deadlines
        self.host: str | None = None  # the coordinator whose relay this is
        self.dial_due_at: float | None = None

    @property
    def needs_directory(self) -> bool:
        """Whether this node needs to know the other nodes of the relay."""
        return self._local.role is TealeRole.COORDINATOR or self.host is None

    def on_host(self, node_id: str, now: float) -> list[NodeOutput]:
        """Set the coordinator whose relay this is, and dial it."""
        self.host = node_id
        return self.dial_due(now)

    def dial_due(self, now: float) -> list[NodeOutput]:
        """Dial the nodes of the directory that are due, ``DIALS_MAX`` at most."""
        self.dial_due_at = None
        nodes = {node.id: node for node in self._directory.all()}
        if self.host is not None:
            nodes[self.host] = self._directory.get(self.host)
        outputs: list[NodeOutput] = []
        dials = 0
        for node in nodes.values():
            outputs += self._peers.update_description(node, now)
            if not self._is_due(node, now):
                continue
            if dials < DIALS_MAX and len(self._sessions) < SESSIONS_MAX:
                outputs.append(self._dial(node, now))
                dials += 1
            else:
                self.dial_due_at = now + DIAL_INTERVAL
        return outputs

    def on_deadline(self, peer: RelayPeer, now: float) -> list[NodeOutput]:
        """Dial a peer again that has no session, or forget it."""
        if self._peers.find(peer.id) is not peer or peer.sessions:
            return []
        outputs: list[NodeOutput] = []
        if now >= peer.forget_at:
            outputs += peer.leave("its last session ended")
        node = self._directory.get(peer.id)
        if self._is_due(node, now) and len(self._sessions) < SESSIONS_MAX:
            outputs.append(self._dial(node, now))
        elif peer.dial_at > now:
            self._deadlines.set(peer, peer.dial_at)
        elif peer.joined:
            self._deadlines.set(peer, peer.forget_at)
        elif not self._should_dial(node):
            outputs += peer.leave("it is not dialled any more")
            self._peers.forget(peer)
        else:
            self.dial_due_at = now + DIAL_INTERVAL
        return outputs

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
        self._peers.add_session(self._sessions.accept(node, session_id, now))
        return [ready, *self._peers.evict_unadmitted(now)]

    def on_offer(self, message: RelayOffer) -> list[NodeOutput]:
        """Answer a peer that offers a direct connection."""
        if not self._accepts(message.from_node_id, message.session_id):
            return []
        return [self._sessions.answer_message(message)]

    # Private parts, in the order in which they are called.

    def _is_due(self, node: KnownNode, now: float) -> bool:
        if node.id == self._sessions.id or not self._should_dial(node):
            return False
        peer = self._peers.find(node.id)
        return peer is None or (not peer.is_dialled and peer.dial_at <= now)

    def _should_dial(self, node: KnownNode) -> bool:
        """Return whether this node dials the other one."""
        if self._local.role is TealeRole.WORKER:
            return node.id == self.host
        if node.software is not PeerSoftware.SHOAL:
            return node.description.available and bool(node.description.models)
        if node.role == TealeRole.WORKER.value:
            return self.host is None  # otherwise it dials its coordinator
        # Of two coordinators one dials; one with a passcode never does, because a
        # dialling peer shows the hash first.
        return (
            node.role == TealeRole.COORDINATOR.value
            and self._sessions.id > node.id
            and self._local.passcode is None
        )

    def _dial(self, node: KnownNode, now: float) -> Send:
        session, opening = self._sessions.open_outbound(node, now)
        self._peers.add_session(session)
        return opening

    def _accepts(self, peer_id: str, session_id: str) -> bool:
        if not self.needs_directory and peer_id != self.host:
            return False
        peer = self._peers.find(peer_id)
        few = peer is None or len(peer.sessions) < SESSIONS_OF_PEER_MAX
        return few and self._sessions.can_accept(peer_id, session_id)
