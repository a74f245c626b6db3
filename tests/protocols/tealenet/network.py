"""Nodes connected to Shoal's relay, in memory and in virtual time."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from protocols.contexts import protocol_context
from shoal.domain.vocabulary import Command, Event
from shoal.ledger.keys import Signer
from shoal.protocols.seam.admission import AdmissionCheck
from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.peer_session import PeerMessage, ToPeer
from shoal.protocols.seam.relay import RelayBroadcast, RelaySend
from shoal.protocols.seam.session import Close, Data, Notice, Send
from shoal.protocols.tealenet.local_node import Config, TealeLocalNode, coordinator_node
from shoal.protocols.tealenet.relay_client.node import RelayNode
from shoal.protocols.tealenet.relay_server.server import RelayServer

HOST = Signer.from_seed(b"h" * 32)
EPOCH = 1.8e9  # seconds


def deterministic_bytes(seed: bytes) -> Callable[[int], bytes]:
    """Return a source of random bytes that never repeats, the same for each seed."""
    count = 0

    def draw(size: int) -> bytes:
        nonlocal count
        count += 1
        return b"".join(
            sha256(seed + bytes([count % 256, count // 256, part])).digest()
            for part in range(size // 32 + 1)
        )[:size]

    return draw


def local_coordinator(
    config: Config | None = None,
    admission: AdmissionCheck | None = None,
    signer: Signer = HOST,
) -> TealeLocalNode:
    """Return a coordinator's end."""
    context = replace(
        protocol_context(admission=admission),
        identity=signer,
        random_bytes=deterministic_bytes(signer.public_key),
        epoch=EPOCH,
        name="host",
    )
    return coordinator_node(config or Config(), context)


@dataclass
class ShoalNode:
    """A Shoal node, and the messages that it received."""

    link: int
    node: RelayNode
    received: list[PeerMessage] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    closed: str | None = None

    def messages(self, kind: type, peer: str | None = None) -> list[Any]:
        """Return the received messages of a type, from one peer or from all."""
        return [
            each.message
            for each in self.received
            if isinstance(each.message, kind) and peer in (None, each.peer)
        ]


@dataclass
class ForeignNode:
    """A node whose messages a test writes by hand."""

    link: int
    inbox: list[dict[str, Any]] = field(default_factory=list)
    closed: tuple[int, str] | None = None

    def payloads(self, kind: str) -> list[dict[str, Any]]:
        """Return the payloads of the received messages of a kind."""
        return [each[kind] for each in self.inbox if kind in each]


class TrustingRelay(RelayServer):
    """A relay as the original: each node of an id displaces the last one, unnoticed."""

    def __init__(self, context: ProtocolContext) -> None:
        super().__init__(context)
        self._nodes: dict[str, tuple[int, dict[str, Any]]] = {}

    @property
    def deadline(self) -> float | None:
        return None

    def link_closed(self, link: int, now: float) -> list[RelaySend]:
        for node_id, (node_link, payload) in [*self._nodes.items()]:
            if node_link == link:
                del self._nodes[node_id]
                return self._announce("peerLeft", node_id, payload)
        return []

    def receive(self, link: int, batch: Sequence[Data], now: float) -> list[RelaySend]:
        return [each for data in batch for each in self._receive(link, data)]

    def _receive(self, link: int, data: Data) -> list[RelaySend]:
        ((kind, payload),) = json.loads(data).items()
        match kind:
            case "register":
                node_id = payload["nodeID"]
                older, _ = self._nodes.get(node_id, (link, None))
                self._nodes[node_id] = (link, payload)
                ack = {"nodeID": node_id, "registeredAt": 1.0, "ttlSeconds": 300}
                replaced = RelaySend(older, "Replaced by newer session", 1012)
                return [
                    *([replaced] if older != link else []),
                    _sent(link, "registerAck", ack),
                    *self._announce("peerJoined", node_id, payload),
                ]
            case "discover":
                return [_sent(link, "discoverResponse", {"peers": self._entries(link)})]
            case _:
                target, _ = self._nodes.get(payload["toNodeID"], (None, None))
                return [] if target is None else [_sent(target, kind, payload)]

    def _entries(self, asking: int) -> list[dict[str, Any]]:
        known = {"lastSeen": 1.0, "natType": "unknown", "endpoints": []}
        return [
            payload | known for link, payload in self._nodes.values() if link != asking
        ]

    def _announce(
        self, kind: str, node_id: str, payload: dict[str, Any]
    ) -> list[RelaySend]:
        node = {"nodeID": node_id, "displayName": payload["displayName"]}
        return [
            _sent(link, kind, node)
            for other, (link, _) in self._nodes.items()
            if other != node_id
        ]


def _sent(link: int, kind: str, payload: object) -> RelaySend:
    return RelaySend(link, json.dumps({kind: payload}))


class Network:
    """A relay and the nodes that are connected to it.

    ``signer`` is the key of the relay's own coordinator.  ``original``: it is a relay
    as real ones are, which check nothing.
    """

    def __init__(
        self,
        signer: Signer = HOST,
        *,
        is_open: bool = True,
        original: bool = False,
    ) -> None:
        self._host = None if original else signer.public_key
        context = replace(
            protocol_context(),
            identity=signer,
            random_bytes=deterministic_bytes(b"relay"),
            epoch=EPOCH,
            relay_open=is_open,
        )
        self.relay = (TrustingRelay if original else RelayServer)(context)
        self.now = 0.0
        self.carried: list[str] = []  # all messages to the relay
        self._links = 0
        self._ends: dict[int, ShoalNode | ForeignNode] = {}
        self._to_relay: deque[tuple[int, Data]] = deque()

    def attach(self, local: TealeLocalNode) -> ShoalNode:
        """Connect a Shoal node; the relay's own coordinator within its process."""
        assert local.identity is not None
        is_host = local.identity.public_key == self._host
        node = RelayNode(local, self.now, self.relay.address_of if is_host else None)
        end = ShoalNode(self._open_link("" if is_host else "/ws"), node)
        self._ends[end.link] = end
        self._apply(end, end.node.tick(self.now))
        self.settle()
        return end

    def attach_raw(self) -> ForeignNode:
        """Connect a node whose messages the test writes."""
        end = ForeignNode(self._open_link())
        self._ends[end.link] = end
        return end

    def detach(self, end: ShoalNode | ForeignNode) -> None:
        """Cut a connection."""
        del self._ends[end.link]
        self._route(self.relay.link_closed(end.link, self.now))
        self.settle()

    def mute(self, end: ShoalNode) -> None:
        """Carry nothing from or to a node any more, whose connection stays open."""
        del self._ends[end.link]

    def send_raw(self, end: ForeignNode, kind: str, payload: object) -> None:
        """Send a message of a foreign node to the relay."""
        self._to_relay.append((end.link, json.dumps({kind: payload})))
        self.settle()

    def send(self, end: ShoalNode, peer: str, message: Event | Command) -> None:
        """Send a message of a Shoal node to one of its peers."""
        self._apply(end, end.node.send(ToPeer(peer, message), self.now))
        self.settle()

    def settle(self) -> None:
        """Deliver messages until none is left."""
        while True:
            while self._to_relay:
                link, data = self._to_relay.popleft()
                self.carried.append(str(data))
                self._route(self.relay.receive(link, [data], self.now))
            if not self._tick():
                return

    def run(self, seconds: float) -> None:
        """Advance the clock; handle each deadline at its time."""
        until = self.now + seconds
        while True:
            self.settle()
            due = [each for each in self._deadlines() if each <= until]
            if not due:
                break
            self.now = max(self.now, min(due))
        self.now = until
        self.settle()

    def _open_link(self, path: str = "/ws") -> int:
        self._links += 1
        request = UpgradeRequest(path, address="192.0.2.1" if path else "")
        self._route(self.relay.link_opened(self._links, request, self.now))
        return self._links

    def _nodes(self) -> list[ShoalNode]:
        return [each for each in self._ends.values() if isinstance(each, ShoalNode)]

    def _deadlines(self) -> list[float]:
        times = [self.relay.deadline, *(each.node.deadline for each in self._nodes())]
        return [each for each in times if each is not None]

    def _tick(self) -> bool:
        acted = False
        for end in self._nodes():
            due = end.node.deadline
            if due is not None and due <= self.now:
                self._apply(end, end.node.tick(self.now))
                acted = True
        due = self.relay.deadline
        if due is not None and due <= self.now:
            self._route(self.relay.tick(self.now))
            acted = True
        return acted

    def _apply(self, end: ShoalNode, outputs: Iterable[object]) -> None:
        for output in outputs:
            match output:
                case Send(data):
                    self._to_relay.append((end.link, data))
                case Close(reason):
                    end.closed = reason
                case Notice(text):
                    end.notices.append(text)
                case PeerMessage():
                    end.received.append(output)
                case _:
                    raise AssertionError(output)

    def _route(self, outputs: Iterable[RelaySend | RelayBroadcast]) -> None:
        for output in outputs:
            if isinstance(output, RelayBroadcast):
                for link, start in output.links:
                    for data in output.messages[start:]:
                        self._deliver(link, data)
            elif output.close:
                end = self._ends.pop(output.link, None)
                if isinstance(end, ForeignNode):
                    end.closed = (output.close, str(output.data))
                elif end is not None:
                    end.closed = str(output.data)
            else:
                self._deliver(output.link, output.data)

    def _deliver(self, link: int, data: Data) -> None:
        end = self._ends.get(link)
        if isinstance(end, ForeignNode):
            end.inbox.append(json.loads(data))
        elif end is not None:
            self._apply(end, end.node.receive([data], self.now))
