"""The relay server: nodes register, discover each other, and exchange data through it.

Source: the TealeNet document, and what real relays do; see
``docs/protocols/tealenet.md``.  Unlike real relays it verifies that a node's key has
signed its id, that senders are not forged, and that only its two ends use a session.
Unless it is open, only the coordinator itself can register.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.relay import RelaySend, RelayStanding
from shoal.protocols.seam.session import Data
from shoal.protocols.tealenet.codec.relay_messages import (
    SHOWN_MAX,
    BadRelayMessage,
    check_data,
    decode_envelope,
    encode_envelope,
)
from shoal.protocols.tealenet.relay_server import links, registry
from shoal.protocols.tealenet.relay_server.limits import RateBucket, RelayLimits
from shoal.protocols.tealenet.relay_server.nodes import NodeRecord, RoutedSessions

SWEEP_INTERVAL = 5.0  # seconds between evictions

CLOSE_TOO_MANY = (1013, "too many connections: try again later")

LIMITS = RelayLimits()


class RelayServer:
    """The relay's state machine over its links."""

    def __init__(self, context: ProtocolContext, limits: RelayLimits = LIMITS) -> None:
        self.is_open = context.relay_open
        self._limits = limits
        self._messages = RateBucket.full(limits.messages_in_all, 0.0)
        self._size = RateBucket.full(limits.size_in_all, 0.0)
        self._links = links.NodeLinks(limits)
        self._sessions = RoutedSessions(limits)
        self._registry = registry.NodeRegistry(
            context, limits, self._links, self._sessions
        )
        self._sweep_due: float | None = None
        self._handlers: Mapping[str, _Handler] = {
            "register": self._registry.register,
            "discover": self._registry.discover,
            "offer": self._forward_signal,
            "answer": self._forward_signal,
            "iceCandidate": self._forward_signal,
            "relayOpen": self._open_session,
            "relayReady": self._forward,
            "relayData": self._forward,
            "relayClose": self._close_session,
        }

    def link_opened(
        self, link: int, hello: UpgradeRequest, now: float
    ) -> Sequence[registry.RelayOutput]:
        # An HTTP request has a path; the coordinator's own link is within the process.
        is_host = not hello.path
        if not self._links.add(link, hello.address, now, is_host=is_host):
            code, why = CLOSE_TOO_MANY
            return (RelaySend(link, why, code),)
        if self._sweep_due is None:
            self._sweep_due = now + SWEEP_INTERVAL
        return ()

    def receive(
        self, link: int, batch: Sequence[Data], now: float
    ) -> Sequence[registry.RelayOutput]:
        node_link = self._links.get(link)
        if node_link is None:
            return ()  # it is being closed
        if wait := self._charge(node_link, len(batch), sum(map(len, batch)), now):
            node_link.read_at = now + wait
        if node_link.node is not None:
            node_link.node.last_heard = now
        outputs: list[registry.RelayOutput] = []
        for data in batch:
            try:
                kind, payload = decode_envelope(data)
                handler = self._handlers.get(kind, _unsupported)
                outputs += handler(node_link, kind, payload, now)
            except registry.RelayNotOpen as error:
                outputs.append(links.error_to(node_link, error.code, str(error)))
                code, why = registry.CLOSE_NOT_OPEN
                outputs.append(RelaySend(link, why, code))
                outputs += self.link_closed(link, now)
                break
            except BadRelayMessage as error:
                outputs.append(links.error_to(node_link, error.code, str(error)))
        return outputs

    def address_of(self, node_id: str) -> str:
        """Return the network address of a node; empty if it is not registered."""
        node = self._registry.nodes.get(node_id)
        node_link = None if node is None else self._links.get(node.link_id)
        return "" if node_link is None else node_link.origin.address

    def link_closed(self, link: int, now: float) -> Sequence[registry.RelayOutput]:
        node_link = self._links.get(link)
        if node_link is None:
            return ()
        self._links.remove(node_link)
        return (
            () if node_link.node is None else self._registry.remove(node_link.node, now)
        )

    def standing(self, link: int) -> RelayStanding:
        node_link = self._links.get(link)
        registered = node_link is not None and node_link.node is not None
        return RelayStanding.GUEST if registered else RelayStanding.STRANGER

    def count_peers(self) -> Counter[RelayStanding]:
        return Counter(
            self.standing(link.id) for link in self._links if not link.is_host
        )

    def read_delay(self, link: int, now: float) -> float:
        node_link = self._links.get(link)
        return node_link.read_at - now if node_link is not None else 0.0

    @property
    def deadline(self) -> float | None:
        broadcast, sweep = self._registry.presence.due, self._sweep_due
        if broadcast is None or (sweep is not None and sweep < broadcast):
            return sweep
        return broadcast

    def tick(self, now: float) -> Sequence[registry.RelayOutput]:
        outputs: list[registry.RelayOutput] = []
        if self._sweep_due is not None and now >= self._sweep_due:
            outputs += self._registry.evict(now)
            self._sweep_due = now + SWEEP_INTERVAL if self._links else None
        presence = self._registry.presence
        if presence.due is not None and now >= presence.due:
            outputs += presence.broadcast(now)
        return outputs

    def _charge(self, link: links.NodeLink, count: int, size: int, now: float) -> float:
        """Charge messages to a link; return the seconds without reading from it."""
        wait = max(link.messages.charge(count, now), link.size.charge(size, now))
        wait = min(wait, self._limits.pause_max)
        if link.is_host:
            return wait
        # Not cut short: many links would exceed a common rate that they only begin.
        return max(
            wait, self._messages.charge(count, now), self._size.charge(size, now)
        )

    # Handlers by the kind of a message; all raise BadRelayMessage.

    def _forward_signal(
        self, link: links.NodeLink, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[registry.RelayOutput]:
        _, other, _ = self._endpoints(link, kind, payload)
        if wait := link.openings.try_charge_one(now):
            return (links.rate_limited(link, "offers", wait),)
        return (RelaySend(other.link_id, encode_envelope(kind, payload)),)

    def _open_session(
        self, link: links.NodeLink, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[registry.RelayOutput]:
        node, other, session_id = self._endpoints(link, kind, payload)
        if wait := link.openings.try_charge_one(now):
            return (links.rate_limited(link, "sessions", wait),)
        self._sessions.open(session_id, node, other)
        return (RelaySend(other.link_id, encode_envelope(kind, payload)),)

    def _forward(
        self, link: links.NodeLink, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[registry.RelayOutput]:
        node, other, session_id = self._endpoints(link, kind, payload)
        if not self._sessions.is_open(session_id, node, other):
            raise BadRelayMessage(
                "session_not_found",
                f"{kind}: no session {session_id} is open between these nodes; "
                "open one with relayOpen",
            )
        if kind == "relayData":
            check_data(payload.get("data"))
        return (RelaySend(other.link_id, encode_envelope(kind, payload)),)

    def _close_session(
        self, link: links.NodeLink, kind: str, payload: dict[str, Any], now: float
    ) -> Sequence[registry.RelayOutput]:
        try:
            node, other, session_id = self._endpoints(link, kind, payload)
        except _NotConnected:
            return ()  # the session ended with the peer
        if not self._sessions.is_open(session_id, node, other):
            return ()  # the other end may have closed it at the same time
        self._sessions.close(session_id)
        return (RelaySend(other.link_id, encode_envelope(kind, payload)),)

    def _endpoints(
        self, link: links.NodeLink, kind: str, payload: dict[str, Any]
    ) -> tuple[NodeRecord, NodeRecord, str]:
        """Return a message's sender, receiver and session id.

        Raises BadRelayMessage unless both are registered and the sender is the link's.
        """
        node = link.registered_node
        sender, target = payload.get("fromNodeID"), payload.get("toNodeID")
        session_id = payload.get("sessionID")
        if (
            type(sender) is not str
            or type(target) is not str
            or type(session_id) is not str
            or not 0 < len(session_id) <= self._limits.session_id_max
        ):
            raise BadRelayMessage(
                "invalid_message",
                f"{kind}: fromNodeID, toNodeID, sessionID: expected texts, the last of "
                f"1 to {self._limits.session_id_max} characters",
            )
        if sender != node.id:
            raise BadRelayMessage(
                "wrong_sender",
                f"{kind}: fromNodeID: another node is registered on this connection",
            )
        other = self._registry.nodes.get(target)
        if other is None:
            raise _NotConnected(
                "peer_not_found", f"Peer {target[:SHOWN_MAX]} is not connected"
            )
        if other is node:
            raise BadRelayMessage("invalid_message", f"{kind}: toNodeID: that is you")
        return node, other, session_id


_Handler: TypeAlias = Callable[
    [links.NodeLink, str, dict[str, Any], float], Sequence[registry.RelayOutput]
]


class _NotConnected(BadRelayMessage):
    """The receiver is not registered."""


def _unsupported(
    link: links.NodeLink, kind: str, payload: dict[str, Any], now: float
) -> Sequence[registry.RelayOutput]:
    shown = kind[:SHOWN_MAX]
    raise BadRelayMessage("unsupported_message", f"Unsupported relay message: {shown}")
