"""A relay with its nodes in memory, under a clock that is a number."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from protocols.settings import setting
from shoal.ledger.keys import Signer
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.relay import RelayBroadcast, RelaySend
from shoal.protocols.seam.session import Data
from shoal.protocols.tealenet.codec.relay_messages import challenge_text
from shoal.protocols.tealenet.relay.limits import RelayLimits
from shoal.protocols.tealenet.relay.server import LIMITS, RelayServer

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
OURS = CAPABILITIES | {"shoal": {"version": 1}}


def cases(group: str) -> list[dict[str, Any]]:
    """Return the recorded cases of a group."""
    every = json.loads(VECTORS.read_text())["cases"]
    return [each for each in every if each["group"] == group]


def signer(seed: int) -> Signer:
    """Return a key; 0x11 and 0x22 are those of the recorded nodes."""
    return Signer.from_seed(bytes([seed]) * 32)


@dataclass(slots=True)
class RelayClient:
    """A link to the relay: what came on it, and how it was closed."""

    relaying: "RelayHarness"
    link: int
    signer: Signer
    said: list[dict[str, Any]] = field(default_factory=list)
    closed: tuple[int, str] | None = None

    @property
    def id(self) -> str:
        return self.signer.public_key.hex()

    def say(self, *messages: Any) -> list[dict[str, Any]]:
        """Send messages together, texts as they are; take what came back at once."""
        before = len(self.said)
        batch = [
            each if isinstance(each, str | bytes) else json.dumps(each)
            for each in messages
        ]
        relaying = self.relaying
        relaying.deliver(relaying.relay.receive(self.link, batch, relaying.now))
        answers = self.said[before:]
        del self.said[before:]
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

    def prove(self, challenge: str, **fields: Any) -> list[dict[str, Any]]:
        """Register with a proof."""
        proof = self.signer.sign(challenge_text(challenge, self.id)).hex()
        shoal = {"challenge": challenge, "proof": proof}
        return self.say(self.registration(shoal=shoal, capabilities=OURS, **fields))

    def to(
        self, kind: str, other: "RelayClient", session: str = SESSION, **fields: Any
    ) -> dict[str, Any]:
        """Return a message for another node."""
        ends = {"fromNodeID": self.id, "toNodeID": other.id, "sessionID": session}
        return {kind: ends | fields}

    def leave(self) -> None:
        relaying = self.relaying
        relaying.deliver(relaying.relay.link_closed(self.link, relaying.now))

    @property
    def heard(self) -> list[dict[str, Any]]:
        """Take what was said, once news have spread."""
        self.relaying.tick(1.0)
        said, self.said[:] = list(self.said), []
        return said

    @property
    def kinds(self) -> list[str]:
        return [next(iter(each)) for each in self.heard]


class RelayHarness:
    """A relay, and what its links got."""

    def __init__(self, limits: RelayLimits = LIMITS) -> None:
        drawn = count(1)

        def draw(size: int) -> bytes:
            return next(drawn).to_bytes(size)

        self.relay = RelayServer(replace(setting(), random_bytes=draw), limits)
        self.now = 1000.0
        self.peers: dict[int, RelayClient] = {}

    def connect(self, seed: int, address: str = "192.0.2.1") -> RelayClient:
        """Open a link for the node of that seed."""
        link = len(self.peers)
        peer = self.peers[link] = RelayClient(self, link, signer(seed))
        hello = UpgradeRequest("/ws", f"node={peer.id}", {}, address)
        self.deliver(self.relay.link_opened(link, hello, self.now))
        return peer

    def join(self, seed: int, **fields: Any) -> RelayClient:
        """Have a node register, and forget what is said about it."""
        peer = self.connect(seed)
        (ack,) = peer.say(peer.registration(**fields))
        assert "registerAck" in ack, ack
        for each in self.peers.values():
            assert each.heard is not None
        return peer

    def join_proven(self, seed: int) -> RelayClient:
        """Have a node of ours register and prove its key."""
        peer = self.connect(seed)
        (challenge,) = peer.say(peer.registration(capabilities=OURS))
        (ack,) = peer.prove(challenge["registerChallenge"]["challenge"])
        assert "registerAck" in ack, ack
        for each in self.peers.values():
            assert each.heard is not None
        return peer

    def pair(self) -> tuple[RelayClient, RelayClient]:
        """Have two nodes that have a session."""
        here, there = self.join(1), self.join(2)
        here.say(here.to("relayOpen", there))
        assert there.heard
        return here, there

    def tick(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while (due := self.relay.deadline) is not None and due <= end:
            self.now = max(self.now, due)
            self.deliver(self.relay.tick(self.now))
        self.now = end

    def deliver(self, outputs: Sequence[RelaySend | RelayBroadcast]) -> None:
        gone = []
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
                    gone.append(link)
        for link in gone:
            self.deliver(self.relay.link_closed(link, self.now))

    def _post(self, link: int, data: Data) -> None:
        peer = self.peers[link]
        assert peer.closed is None, "nothing comes after the end"
        assert isinstance(data, str), "a relay answers with texts"
        message = json.loads(data)
        assert len(message) == 1
        peer.said.append(message)


def error_of(messages: list[dict[str, Any]]) -> str:
    """Return the code of the one error that came."""
    ((kind, payload),) = [next(iter(each.items())) for each in messages]
    assert kind == "error", messages
    code: str = payload["code"]
    return code
