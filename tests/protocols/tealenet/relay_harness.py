"""A relay and its nodes, in memory and in virtual time."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from protocols.contexts import SIGNER, protocol_context
from shoal.ledger.keys import Signer
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.relay import RelayBroadcast, RelaySend
from shoal.protocols.seam.session import Data
from shoal.protocols.tealenet.relay_server.limits import RelayLimits
from shoal.protocols.tealenet.relay_server.server import LIMITS, RelayServer

VECTORS = Path(__file__).parent / "vectors" / "tealenet.json"
SESSION = "550E8400-E29B-41D4-A716-446655440000"
HARDWARE = {
    "chipFamily": "nvidiaGPU",
    "chipName": "NVIDIA RTX 4090",
    "totalRAMGB": 64,
    "gpuCoreCount": 16384,
    "memoryBandwidthGBs": 1008,
    "tier": 1,
}
CAPABILITIES = {
    "hardware": HARDWARE,
    "isAvailable": True,
    "loadedModels": ["m"],
    "maxModelSizeGB": 60,
}


def cases(group: str) -> list[dict[str, Any]]:
    """Return the recorded cases of a group."""
    every = json.loads(VECTORS.read_text())["cases"]
    return [each for each in every if each["group"] == group]


def signer(seed: int) -> Signer:
    """Return a key; 0x11 and 0x22 are those of the recorded nodes."""
    return Signer.from_seed(bytes([seed]) * 32)


@dataclass(slots=True)
class RelayClient:
    """A link to the relay: its received messages, and how it was closed."""

    harness: "RelayHarness"
    link: int
    signer: Signer
    inbox: list[dict[str, Any]] = field(default_factory=list)
    closed: tuple[int, str] | None = None

    @property
    def id(self) -> str:
        return self.signer.public_key.hex()

    def send(self, *messages: Any) -> list[dict[str, Any]]:
        """Send messages together, texts unchanged; return the immediate answers."""
        before = len(self.inbox)
        batch = [
            each if isinstance(each, str | bytes) else json.dumps(each)
            for each in messages
        ]
        harness = self.harness
        harness.deliver(harness.relay.receive(self.link, batch, harness.now))
        answers = self.inbox[before:]
        del self.inbox[before:]
        return answers

    def registration(self, **fields: Any) -> dict[str, Any]:
        payload = {
            "nodeID": self.id,
            "publicKey": self.id,
            "displayName": "a node",
            "capabilities": CAPABILITIES,
            "signature": self.signer.sign(self.id.encode()).hex(),
        }
        return {"register": payload | fields}

    def to(
        self, kind: str, other: "RelayClient", session: str = SESSION, **fields: Any
    ) -> dict[str, Any]:
        """Return a message for another node."""
        ends = {"fromNodeID": self.id, "toNodeID": other.id, "sessionID": session}
        return {kind: ends | fields}

    def leave(self) -> None:
        """Close the link."""
        harness = self.harness
        harness.deliver(harness.relay.link_closed(self.link, harness.now))

    def drain(self) -> list[dict[str, Any]]:
        """Return the messages since the last call, announcements included."""
        self.harness.tick(1.0)
        received, self.inbox[:] = list(self.inbox), []
        return received

    def drain_kinds(self) -> list[str]:
        """Return the kinds of the messages since the last call."""
        return [next(iter(each)) for each in self.drain()]


class RelayHarness:
    """A relay and its links."""

    def __init__(self, limits: RelayLimits = LIMITS, *, is_open: bool = True) -> None:
        drawn = count(1)

        def draw(size: int) -> bytes:
            return next(drawn).to_bytes(size)

        context = replace(protocol_context(), random_bytes=draw, relay_open=is_open)
        self.relay = RelayServer(context, limits)
        self.now = 1000.0
        self.peers: dict[int, RelayClient] = {}

    def connect(
        self, seed: int, address: str = "192.0.2.1", path: str = "/ws"
    ) -> RelayClient:
        """Open a link for the node of that seed."""
        link = len(self.peers)
        peer = self.peers[link] = RelayClient(self, link, signer(seed))
        hello = UpgradeRequest(path, f"node={peer.id}", {}, address)
        self.deliver(self.relay.link_opened(link, hello, self.now))
        return peer

    def join(self, seed: int, **fields: Any) -> RelayClient:
        """Register a node; drain its announcements."""
        peer = self.connect(seed)
        (ack,) = peer.send(peer.registration(**fields))
        assert "registerAck" in ack, ack
        for each in self.peers.values():
            each.drain()
        return peer

    def join_host(self) -> RelayClient:
        """Register the coordinator's own node, within the process."""
        host = self.connect(0, address="", path="")
        host.signer = SIGNER
        (ack,) = host.send(host.registration())
        assert "registerAck" in ack, ack
        for each in self.peers.values():
            each.drain()
        return host

    def pair(self) -> tuple[RelayClient, RelayClient]:
        """Register two nodes with a session between them."""
        first, second = self.join(1), self.join(2)
        first.send(first.to("relayOpen", second))
        assert second.drain()
        return first, second

    def tick(self, seconds: float) -> None:
        """Advance the clock; handle each deadline at its time."""
        end = self.now + seconds
        while (due := self.relay.deadline) is not None and due <= end:
            self.now = max(self.now, due)
            self.deliver(self.relay.tick(self.now))
        self.now = end

    def deliver(self, outputs: Sequence[RelaySend | RelayBroadcast]) -> None:
        closed = []
        for output in outputs:
            match output:
                case RelayBroadcast(messages, links):
                    for link, first in links:
                        for message in messages[first:]:
                            self._post(link, message)
                case RelaySend(link, text, 0):
                    self._post(link, text)
                case RelaySend(link, text, code):
                    assert self.peers[link].closed is None, "closed once"
                    self.peers[link].closed = (code, str(text))
                    closed.append(link)
        for link in closed:
            self.deliver(self.relay.link_closed(link, self.now))

    def _post(self, link: int, data: Data) -> None:
        peer = self.peers[link]
        assert peer.closed is None, "a closed link gets no messages"
        assert isinstance(data, str), "a relay sends texts"
        message = json.loads(data)
        assert len(message) == 1
        peer.inbox.append(message)


def error_of(messages: list[dict[str, Any]]) -> str:
    """Return the code of the only message, an error."""
    ((kind, payload),) = [next(iter(each.items())) for each in messages]
    assert kind == "error", messages
    code: str = payload["code"]
    return code
