"""The registry of a relay's nodes, and the announcements of joins and departures.

Each join and departure is announced to all nodes.  The announcements are collected for
a moment: each link then gets one write, and with many links other messages get their
turn in between.
"""

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

from msgspec import UNSET

from shoal.protocols.seam.multi_peer import RelayBroadcast, RelaySend
from shoal.protocols.seam.session import ProtocolContext
from shoal.protocols.tealenet.codec.relay_envelope import (
    BadRelayMessage,
    encode_envelope,
)
from shoal.protocols.tealenet.codec.relay_messages import (
    Discover,
    RegistrationProof,
    RelayClose,
    RelayHost,
    RelayPeerJoined,
    RelayPeerLeft,
    RelayRegisterAck,
    RelayRegisterChallenge,
    decode_payload,
    encode,
)
from shoal.protocols.tealenet.codec.signatures import noise_fields
from shoal.protocols.tealenet.relay.limits import RelayLimits
from shoal.protocols.tealenet.relay.links import (
    NodeLink,
    NodeLinks,
    error_to,
    rate_limited,
)
from shoal.protocols.tealenet.relay.nodes import (
    NodeProfile,
    NodeRecord,
    check_proof,
    check_signature,
    discover_entries,
    knows_extension,
    node_profile,
    read_registration,
)
from shoal.protocols.tealenet.relay.routed_sessions import RoutedSessions

BATCH_DELAY = 0.02  # seconds for which news are gathered
BATCH_DELAY_PER_NODE = 0.0001  # seconds for each node, where that is more
PENDING_MAX = 1024  # news that are gathered before they are told at once
BATCH_LINKS = 500  # links


class PresenceBroadcast:
    """What is still to be told, and to whom of ``nodes``, by the time ``due``."""

    def __init__(self, nodes: Collection[NodeRecord]) -> None:
        self._nodes = nodes
        self._next: list[str] = []
        self._sending: tuple[str, ...] = ()
        self._waiting: list[tuple[int, int]] = []  # links, and what is news to them
        self.due: float | None = None

    def add(self, text: str, now: float) -> None:
        """Have something told to all nodes that are there by now."""
        self._next.append(text)
        if self.due is None:
            self.due = self._due(now)
        if len(self._next) >= PENDING_MAX:
            self.due = now

    def skip(self, node: NodeRecord) -> None:
        """Have a node not told what there is by now, for it has come since."""
        node.announced = len(self._next)

    def broadcast(self, now: float) -> Sequence[RelayBroadcast]:
        """Tell some of those who have yet to hear it."""
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


SINCE_2001 = -978_307_200.0  # seconds to add to Unix time for the wire's own
CHALLENGE_SIZE = 32  # bytes

CLOSE_REPLACED = (1012, "Replaced by newer session")  # as real relays have it
CLOSE_UNREGISTERED = (1008, "nobody registered in time")

RelayOutput: TypeAlias = RelaySend | RelayBroadcast


class NodeRegistry:
    """The nodes by their ids, and the news of them.

    With a node go its sessions.
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
        identity = context.identity
        self._host = RelayHost(identity.public_key.hex(), *noise_fields(identity))
        self._epoch = context.epoch + SINCE_2001
        self._stored_size = 0  # bytes, about
        self.nodes: dict[str, NodeRecord] = {}
        self.presence = PresenceBroadcast(self.nodes.values())

    def register(
        self, link: NodeLink, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[RelayOutput]:
        """Register a node, again or at last, or ask it for a proof.

        Raises BadRelayMessage.
        """
        if wait := link.registrations.try_charge_one(now):
            return (rate_limited(link, "registrations", wait),)
        message = read_registration(payload)
        before = link.node
        if before is not None and before.id != message.node_id:
            raise BadRelayMessage(
                "invalid_register",
                "nodeID: another one is registered on this connection; use one "
                "connection for each",
            )
        verifies = self._context.verify
        if before is None or before.profile.signature != message.signature:
            check_signature(message, verifies)
        proven = before is not None and before.proven
        if not isinstance(message.shoal, RegistrationProof):
            if not proven and knows_extension(message.capabilities):
                # The signature may be a copy: it is the same each time.
                link.challenge = (
                    link.challenge or self._context.random_bytes(CHALLENGE_SIZE).hex()
                )
                challenge = RelayRegisterChallenge(link.challenge)
                return (RelaySend(link.id, encode(challenge)),)
        else:
            check_proof(message, message.shoal, link.challenge, verifies)
            proven = True
        said = node_profile(message, self._limits)
        return [
            *self._store(link, message.node_id, said, now, proven=proven),
            self._acknowledge(link.id, message.node_id, said, now),
        ]

    def discover(
        self, link: NodeLink, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[RelayOutput]:
        """Say who is there.  Raises BadRelayMessage."""
        asker = link.registered_node
        if wait := link.discoveries.try_charge_one(now):
            return (rate_limited(link, "questions", wait),)
        # Who asks is known: what it calls itself does not matter.
        message = decode_payload(kind, {**payload, "requestingNodeID": asker.id})
        assert isinstance(message, Discover), "this is what that kind is read as"
        # Each question may lead to a look at all nodes, and those who ask from one
        # address may be many as well.
        if wait := link.origin.lookups.try_charge(len(self.nodes), now):
            return (rate_limited(link, "questions", wait),)
        first = int.from_bytes(self._context.random_bytes(8)) % len(self.nodes)
        peers = discover_entries(
            self.nodes, asker, message.filter, self._limits, first, self._epoch
        )
        return (
            RelaySend(link.id, encode_envelope("discoverResponse", {"peers": peers})),
        )

    def remove(self, node: NodeRecord, now: float) -> Sequence[RelayOutput]:
        """Forget a node and tell the others."""
        del self.nodes[node.id]
        self._stored_size -= node.profile.size
        self.presence.add(encode(RelayPeerLeft(node.id, node.profile.name)), now)
        return self._close_sessions(node)

    def evict(self, now: float) -> Sequence[RelayOutput]:
        """Have those go who never registered, and those who are not heard of."""
        outputs: list[RelayOutput] = []
        for line in self._links:
            node = line.node
            if node is None:
                if now - line.unregistered_since >= self._limits.registration_timeout:
                    self._links.remove(line)
                    code, why = CLOSE_UNREGISTERED
                    outputs.append(RelaySend(line.id, why, code))
            elif now - node.last_heard >= self._limits.node_ttl:
                line.node, line.unregistered_since = None, now
                outputs += self.remove(node, now)
                why = "Nothing was heard for too long; register again"
                outputs.append(error_to(line, "registration_expired", why))
        return outputs

    # Private parts, in the order in which they are called.

    def _store(
        self,
        link: NodeLink,
        node_id: str,
        profile: NodeProfile,
        now: float,
        *,
        proven: bool,
    ) -> Sequence[RelayOutput]:
        """Let a node in, or let it say something else of itself."""
        node = link.node
        holder = self.nodes.get(node_id)
        if node is None and holder is not None and holder.proven and not proven:
            raise BadRelayMessage(
                "invalid_register",
                "nodeID: registered by a node that has proved its key, which can only "
                "be replaced by one that does so",
            )
        kept = self._stored_size + profile.size - (holder.profile.size if holder else 0)
        if kept > self._limits.stored_size or (
            holder is None and len(self.nodes) >= self._limits.nodes
        ):
            raise BadRelayMessage(
                "relay_full", "The relay has no room for more nodes; try again later"
            )
        self._stored_size = kept
        if node is not None:
            node.profile, node.proven = profile, proven
            return ()
        link.node = self.nodes[node_id] = node = NodeRecord(
            node_id, link.id, profile, now, proven, link.origin.address
        )
        if holder is None:
            self.presence.add(encode(RelayPeerJoined(node_id, profile.name)), now)
            self.presence.skip(node)
            return ()
        node.announced = holder.announced
        code, why = CLOSE_REPLACED
        older = self._links.get(holder.link_id)
        assert older is not None, "with its line a node goes"
        self._links.remove(older)
        return [*self._close_sessions(holder), RelaySend(holder.link_id, why, code)]

    def _acknowledge(
        self, link_id: int, node_id: str, profile: NodeProfile, now: float
    ) -> RelayOutput:
        lifetime = int(self._limits.node_ttl)
        host = self._host if profile.extended else UNSET
        ack = RelayRegisterAck(node_id, self._epoch + now, lifetime, host)
        return RelaySend(link_id, encode(ack))

    def _close_sessions(self, node: NodeRecord) -> Sequence[RelayOutput]:
        """End a node's sessions in its name, for those who expect a relay to do that.

        A real node would take it for a reason to come back again and again.
        """
        outputs = []
        for session in self._sessions.close_all(node):
            other = session.other_end(node)
            assert other is not None, "it is one of the session's two"
            if other.profile.extended:
                closing = RelayClose(node.id, other.id, session.id)
                outputs.append(RelaySend(other.link_id, encode(closing)))
        return outputs
