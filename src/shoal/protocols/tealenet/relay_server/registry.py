"""The registry of a relay's nodes, and the announcements of joins and departures.

Each join and departure is announced to all nodes, in batches: each link gets one write,
and with many links other messages are processed in between.
"""

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.relay import RelayBroadcast, RelaySend
from shoal.protocols.tealenet.codec.relay_messages import (
    CLOSE_REPLACED,
    BadRelayMessage,
    Discover,
    DiscoverFilter,
    RelayClose,
    RelayPeerJoined,
    RelayPeerLeft,
    RelayRegisterAck,
    decode_payload,
    encode,
    encode_envelope,
)
from shoal.protocols.tealenet.codec.scalars import NAME_MAX, to_date
from shoal.protocols.tealenet.relay_server.limits import RelayLimits
from shoal.protocols.tealenet.relay_server.links import (
    NodeLink,
    NodeLinks,
    error_to,
    rate_limited,
)
from shoal.protocols.tealenet.relay_server.nodes import (
    NodeProfile,
    NodeRecord,
    RoutedSessions,
    check_signature,
    discover_entries,
    node_profile,
    read_registration,
)

BATCH_DELAY = 0.02  # seconds to collect announcements
BATCH_DELAY_PER_NODE = 0.0001  # seconds for each node, if that is more
PENDING_MAX = 1024  # announcements that are sent without further delay
BATCH_LINKS = 500  # links


class PresenceBroadcast:
    """The announcements that are not sent yet; the next batch is ``due``."""

    def __init__(self, nodes: Collection[NodeRecord]) -> None:
        self._nodes = nodes
        self._next: list[str] = []
        self._sending: tuple[str, ...] = ()
        self._waiting: list[tuple[int, int]] = []  # link, and its first announcement
        self.due: float | None = None

    def add(self, text: str, now: float) -> None:
        """Announce something to all current nodes."""
        self._next.append(text)
        if self.due is None:
            self.due = self._due(now)
        if len(self._next) >= PENDING_MAX:
            self.due = now

    def skip(self, node: NodeRecord) -> None:
        """Omit the pending announcements for a node that has just joined."""
        node.announced = len(self._next)

    def broadcast(self, now: float) -> Sequence[RelayBroadcast]:
        """Return the pending announcements for up to ``BATCH_LINKS`` links."""
        if not self._waiting:
            self._sending, self._next = tuple(self._next), []
            for node in self._nodes:
                if node.announced < len(self._sending):
                    self._waiting.append((node.link_id, node.announced))
                node.announced = 0
        some = self._waiting[:BATCH_LINKS]
        del self._waiting[:BATCH_LINKS]
        if self._waiting:
            self.due = now
        else:
            self.due = self._due(now) if self._next else None
        return (RelayBroadcast(self._sending, some),) if some else ()

    def _due(self, now: float) -> float:
        return now + max(BATCH_DELAY, BATCH_DELAY_PER_NODE * len(self._nodes))


CLOSE_REPLACED_CODE = 1012  # as at real relays
CLOSE_UNREGISTERED = (1008, "no registration in time")
CLOSE_NOT_OPEN = (1008, "only for this coordinator, unless it runs --relay-open")


class RelayNotOpen(BadRelayMessage):
    """The relay is the coordinator's alone; ends the connection."""

    def __init__(self) -> None:
        super().__init__(
            "invalid_register",
            "This relay is not open: start its coordinator with `shoal serve "
            "--relay-open` to let any node use it. A worker of Shoal 0.2.0 or older "
            "has to be upgraded to join this coordinator",
        )


RelayOutput: TypeAlias = RelaySend | RelayBroadcast


class NodeRegistry:
    """The nodes by their ids, and their announcements.

    Removing a node closes its sessions.  ``host_id`` is the coordinator's own node,
    which registers on the link within the process only.
    """

    def __init__(
        self,
        context: ProtocolContext,
        limits: RelayLimits,
        links: NodeLinks,
        sessions: RoutedSessions,
    ) -> None:
        self._context = context
        self._limits = limits
        self._links = links
        self._sessions = sessions
        self.host_id = context.identity.public_key.hex()
        self._epoch = to_date(context.epoch)
        self._stored_size = 0  # bytes, about
        self.nodes: dict[str, NodeRecord] = {}
        self.presence = PresenceBroadcast(self.nodes.values())

    def register(
        self, link: NodeLink, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[RelayOutput]:
        """Register a node.  Raises BadRelayMessage."""
        if wait := link.registrations.try_charge_one(now):
            return (rate_limited(link, "registrations", wait),)
        message = read_registration(payload)
        if not (link.is_host or self._context.relay_open):
            raise RelayNotOpen
        before = link.node
        if before is not None and before.id != message.node_id:
            raise BadRelayMessage(
                "invalid_register",
                "nodeID: another node is registered on this connection; use one "
                "connection for each node",
            )
        if message.node_id == self.host_id and not link.is_host:
            # Anybody can copy a signature, which never changes.
            raise BadRelayMessage(
                "invalid_register", "nodeID: that is the coordinator of this relay"
            )
        # No secret: it is public, and checked again only if it has changed.
        if before is None or before.profile.signature != message.signature:
            check_signature(message, self._context.verify)
        profile = node_profile(message, self._limits)
        outputs = [*self._store(link, message.node_id, profile, now)]
        ack = RelayRegisterAck(
            message.node_id,
            self._epoch + self.nodes[message.node_id].registered_at,
            int(self._limits.node_ttl),
        )
        outputs.append(RelaySend(link.id, encode(ack)))
        pending, link.pending_discovery = link.pending_discovery, None
        if pending is not None and link.node is not None:
            outputs += self._list_nodes(link, link.node, pending.filter, now)
        return outputs

    def discover(
        self, link: NodeLink, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[RelayOutput]:
        """Return the list of nodes, after the registration if that is yet to come.

        Real peers may send it first: the original relay requires no registration.
        Raises BadRelayMessage.
        """
        # The link identifies the requester; the id that the message claims is ignored.
        message = decode_payload(kind, {**payload, "requestingNodeID": ""})
        assert isinstance(message, Discover), "the kind determines the type"
        if link.node is not None:
            return self._list_nodes(link, link.node, message.filter, now)
        if message.filter is not None and len(message.filter.model_id or "") > NAME_MAX:
            raise BadRelayMessage("not_registered", "Send register first")
        link.pending_discovery = message
        return ()

    def remove(self, node: NodeRecord, now: float) -> Sequence[RelayOutput]:
        """Remove a node and announce that to the others."""
        del self.nodes[node.id]
        self._stored_size -= node.profile.size
        self.presence.add(encode(RelayPeerLeft(node.id, node.profile.name)), now)
        return self._close_sessions(node)

    def evict(self, now: float) -> Sequence[RelayOutput]:
        """Close links without a registration, and remove silent nodes."""
        outputs: list[RelayOutput] = []
        for link in self._links:
            node = link.node
            if node is not None:
                link.unregistered_since = now
                if now - node.last_heard >= self._limits.node_ttl:
                    link.node = None
                    outputs += self.remove(node, now)
                    why = "No message for too long; register again"
                    outputs.append(error_to(link, "registration_expired", why))
            elif now - link.unregistered_since >= self._limits.registration_timeout:
                code, why = CLOSE_UNREGISTERED
                self._links.remove(link)
                outputs.append(RelaySend(link.id, why, code))
        return outputs

    # Private parts, in the order in which they are called.

    def _store(
        self, link: NodeLink, node_id: str, profile: NodeProfile, now: float
    ) -> Sequence[RelayOutput]:
        """Add a node, or replace its profile or its older connection."""
        node = link.node
        holder = self.nodes.get(node_id)
        stored_size = (
            self._stored_size + profile.size - (holder.profile.size if holder else 0)
        )
        if stored_size > self._limits.stored_size or (
            holder is None and len(self.nodes) >= self._limits.nodes
        ):
            raise BadRelayMessage(
                "relay_full", "The relay has no room for more nodes; try again later"
            )
        self._stored_size = stored_size
        if node is not None:
            node.profile = profile
            return ()
        link.node = self.nodes[node_id] = node = NodeRecord(
            node_id,
            link.id,
            profile,
            now,
            now if holder is None else holder.registered_at,
            link.origin.address,
        )
        if holder is None:
            self.presence.add(encode(RelayPeerJoined(node_id, profile.name)), now)
            self.presence.skip(node)
            return ()
        node.announced = holder.announced
        older = self._links.get(holder.link_id)
        assert older is not None, "a node is removed with its link"
        self._links.remove(older)
        return [
            *self._close_sessions(holder),
            RelaySend(holder.link_id, CLOSE_REPLACED, CLOSE_REPLACED_CODE),
        ]

    def _list_nodes(
        self,
        link: NodeLink,
        requester: NodeRecord,
        wanted: DiscoverFilter | None,
        now: float,
    ) -> Sequence[RelayOutput]:
        """Return the nodes that a filter lets through, or the error beyond a rate."""
        if wait := link.discoveries.try_charge_one(now):
            return (rate_limited(link, "questions", wait),)
        # A request may search all nodes, and one address may have many requesters.
        if wait := link.origin.lookups.try_charge(len(self.nodes), now):
            return (rate_limited(link, "questions", wait),)
        first = int.from_bytes(self._context.random_bytes(8)) % len(self.nodes)
        peers = discover_entries(
            self.nodes, requester, wanted, self._limits, first, self._epoch
        )
        return (
            RelaySend(link.id, encode_envelope("discoverResponse", {"peers": peers})),
        )

    def _close_sessions(self, node: NodeRecord) -> Sequence[RelayOutput]:
        """Close a node's sessions; send relayClose in its name to the coordinator.

        Other nodes that get one would reopen the session again and again.
        """
        outputs = []
        for session in self._sessions.close_all(node):
            other = session.other_end(node)
            assert other is not None, "the node is an end of the session"
            if other.id == self.host_id:
                closing = RelayClose(node.id, other.id, session.id)
                outputs.append(RelaySend(other.link_id, encode(closing)))
        return outputs
