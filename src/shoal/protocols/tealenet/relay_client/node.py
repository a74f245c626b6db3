"""A node on a relay: registration, discovery, and sessions with other nodes.

One node serves and submits jobs over one connection to a relay.  A peer can have any
number of sessions with it.  Jobs for the peer go through one of them; the answers to a
peer's jobs go through the session that the job came by, because gateways assign answers
by their session alone.

Source: TealeNet's document, and what real nodes, gateways and relays do; see
``docs/protocols/tealenet.md``.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import Draining, LoadChanged, OffersChanged
from shoal.protocols.seam.peer_session import ALL_PEERS, PeerJoined, PeerMessage, ToPeer
from shoal.protocols.seam.session import Batch, Close, Data, Notice, Output, Send
from shoal.protocols.tealenet.admission import admits_anonymous
from shoal.protocols.tealenet.codec import relay_messages
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.peer_session import SENDABLE
from shoal.protocols.tealenet.relay_client.peers import NodeOutput, RelayPeers
from shoal.protocols.tealenet.relay_client.registration import (
    NodeDirectory,
    NodeRegistration,
)
from shoal.protocols.tealenet.relay_client.session import RelaySessions

DISCOVER_INTERVAL = 10.0  # seconds, as gateways do
DISCOVER_INTERVAL_MIN = 2.0  # seconds between two requests, after a node has joined
FOUND_MAX = 1000  # nodes that one answer may contain
INVALID_MAX = 100  # consecutive invalid messages before the node disconnects
NO_PEERS = Notice(
    "relay nodes do not authenticate, so none of this relay's nodes is admitted: start "
    "the coordinator with --tealenet-open to admit them"
)
SHOWN_MAX = 200  # characters of a relay's error text in notices


def _unknown_address(node_id: str) -> str:
    return ""


class RelayNode:
    """One node's connection to a relay.

    ``local`` must have an identity, whose key is the node's id.  ``address_of`` returns
    the network address of another node, at the coordinator's own relay.  ALL_PEERS
    joins a worker's session as soon as the relay has acknowledged the registration.
    ``warning`` is reported at the first tick.
    """

    def __init__(
        self,
        local: TealeLocalNode,
        now: float,
        address_of: Callable[[str], str] | None = None,
        warning: str = "",
    ) -> None:
        identity = local.identity
        assert identity is not None, "a node's id is its key"
        self.id = identity.public_key.hex()
        self._local = local
        self._is_elsewhere = address_of is None
        self._registration = NodeRegistration(local, identity, now)
        self._directory = NodeDirectory(self.id)
        sessions = RelaySessions(local, identity, address_of or _unknown_address)
        self._peers = RelayPeers(
            sessions, self._directory, serves_only=local.serves_only
        )
        self.accepts = SENDABLE
        self._discovered_at: float | None = None
        self._discover_at: float | None = None
        self._invalid = 0
        self._sent_at = now  # when ``send`` was called last
        self._warnings = [Notice(warning)] if warning else []
        self._closed = False

    @property
    def deadline(self) -> float | None:
        if self._closed:
            return None
        if self._peers.pending:
            return self._sent_at
        times = (
            self._registration.deadline,
            self._discover_at,
            self._peers.dial_due_at,
            self._peers.deadlines.next_due,
        )
        return min(each for each in times if each is not None)

    def tick(self, now: float) -> Sequence[NodeOutput]:
        if self._closed:
            return ()
        outputs: list[NodeOutput] = [*self._warnings]
        self._warnings.clear()
        try:
            registration = self._registration.tick(now)
        except PeerError as error:
            return self._close(str(error))
        if registration is not None:
            outputs.append(_to_relay(registration))
        if self._discover_at is not None and now >= self._discover_at:
            self._discover_at = now + DISCOVER_INTERVAL
            self._discovered_at = now
            wanted = relay_messages.DiscoverFilter(max_peers=FOUND_MAX)
            outputs.append(_to_relay(relay_messages.Discover(self.id, wanted)))
        outputs += self._peers.take_pending()
        return [*outputs, *self._peers.tick(now)]

    def receive(self, batch: Batch, now: float) -> Sequence[NodeOutput]:
        # A peer that left may come back in this batch.
        outputs: list[NodeOutput] = [*self._peers.take_pending()]
        messages = (self._decoded(data) for data in batch)
        # The session's data of one read is processed together.
        for session_id, group in groupby(messages, _session_id):
            if self._closed:
                break
            if session_id is not None:
                data = [
                    each for each in group if isinstance(each, relay_messages.RelayData)
                ]
                outputs += self._peers.on_data(data, now)
                continue
            for message in group:
                outputs += self._receive_message(message, now)
        return outputs

    def send(self, message: ToPeer, now: float) -> Sequence[Output]:
        if self._closed:
            return ()
        self._sent_at = now
        if message.peer != ALL_PEERS:
            return self._peers.send(message.peer, message.message, now)
        if isinstance(message.message, OffersChanged | LoadChanged | Draining):
            self._registration.update(message.message)
        return self._peers.send_to_all(message.message, now)

    def _decoded(
        self, data: Data
    ) -> relay_messages.RelayMessage | relay_messages.BadRelayMessage | None:
        try:
            return relay_messages.decode(data)
        except relay_messages.BadRelayMessage as error:
            return error

    def _receive_message(
        self,
        message: relay_messages.RelayMessage | relay_messages.BadRelayMessage | None,
        now: float,
    ) -> Sequence[NodeOutput]:
        if isinstance(message, relay_messages.BadRelayMessage):
            self._invalid += 1
            if self._invalid >= INVALID_MAX:
                why = f"{INVALID_MAX} invalid messages of the relay in a row: {message}"
                return self._close(why)
            return (Notice(f"message of the relay ignored: {message}"),)
        self._invalid = 0
        match message:
            case relay_messages.RelayOpen():
                return self._peers.on_open(message, now)
            case relay_messages.RelayReady():
                return self._peers.on_ready(message, now)
            case relay_messages.RelayClose():
                return self._peers.on_close(message, now)
            case relay_messages.RelayOffer():
                return self._peers.on_offer(message)
            case relay_messages.RelayRegisterAck():
                return self._on_register_ack(message, now)
            case relay_messages.DiscoverResponse(peers):
                self._directory.update(peers, now)
                return self._peers.dial_due(now)
            case relay_messages.RelayPeerJoined():
                # Real relays also send this whenever a node registers again.
                self._schedule_discover(now)
                return ()
            case relay_messages.RelayPeerLeft(node_id, _):
                self._directory.remove(node_id)
                return self._peers.on_left(node_id, "it left the relay", now)
            case relay_messages.RelayError():
                return self._on_error(message, now)
            case relay_messages.RelayData():
                return self._peers.on_data([message], now)
            case (
                relay_messages.RelayAnswer()
                | relay_messages.IceCandidate()
                | relay_messages.RelayRegister()
                | relay_messages.Discover()
                | None
            ):
                return ()  # unknown kinds, and messages that a node never receives

    def _on_register_ack(
        self, ack: relay_messages.RelayRegisterAck, now: float
    ) -> Sequence[NodeOutput]:
        first = not self._registration.is_acknowledged
        self._registration.on_ack(ack, now)
        self._schedule_discover(now)
        if first and self._local.serves_only:
            # Every node of the relay may submit jobs to this worker.
            joined = PeerJoined(ALL_PEERS, submits_jobs=True)
            return (PeerMessage(ALL_PEERS, joined),)
        if first and self._is_elsewhere and not admits_anonymous(self._local):
            return (NO_PEERS,)
        return ()

    def _schedule_discover(self, now: float) -> None:
        since = self._discovered_at
        soon = now if since is None else max(now, since + DISCOVER_INTERVAL_MIN)
        self._discover_at = min(soon, self._discover_at or soon)

    def _on_error(
        self, error: relay_messages.RelayError, now: float
    ) -> Sequence[NodeOutput]:
        shown = ascii(error.message)[1:-1][:SHOWN_MAX]
        match error.code:
            case "peer_not_found":
                return self._peers.on_not_found(error.message, now)
            case "session_not_found":
                return self._peers.on_session_not_found(error.message, now)
            case "registration_expired":
                self._registration.on_expired(now)
            case "invalid_register" if not self._registration.is_acknowledged:
                return self._close(f"the relay refuses the registration: {shown}")
            case _:
                pass
        return (Notice(f"error of the relay: {shown}"),)

    def _close(self, reason: str) -> Sequence[NodeOutput]:
        self._closed = True
        return (Close(reason),)


def _session_id(
    message: relay_messages.RelayMessage | relay_messages.BadRelayMessage | None,
) -> str | None:
    return message.session_id if isinstance(message, relay_messages.RelayData) else None


def _to_relay(message: relay_messages.RelayMessage) -> Send:
    return Send(relay_messages.encode(message))
