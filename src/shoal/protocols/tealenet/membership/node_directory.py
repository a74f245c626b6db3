"""The directory of a relay's other nodes, as the relay describes them.

A relay is believed about what a node runs, but not about its encryption: a Shoal node
signs its Noise key with the key that is its id, and once it has, the key is pinned.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shoal.protocols.tealenet.codec.extension import (
    IntroductionExtension,
    read_introduction,
)
from shoal.protocols.tealenet.codec.hardware import NodeCapabilities
from shoal.protocols.tealenet.codec.relay_messages import NodeEntry
from shoal.protocols.tealenet.codec.signatures import (
    decode_base64,
    noise_binding,
    parse_key,
)
from shoal.protocols.tealenet.peer import PeerDescription, PeerSoftware

NODES_MAX = 4096  # other nodes that are known at a time
ENTRIES_MAX = 1000  # of one answer that are read: each has a signature to be verified
COMPLETE_BELOW = 50  # nodes: relays that tell of some only tell of as many as this
FORGOTTEN_AFTER = 600.0  # seconds since a relay told of a node, as Macs have it
PINNED_MAX = 65_536  # nodes whose keys for Noise are remembered

_NODE_ID = re.compile("[0-9a-f]{64}")
_capabilities = msgspec.json.Decoder(NodeCapabilities)


@dataclass(frozen=True, slots=True)
class KnownNode:
    """Another node, as a relay tells of it.

    ``role`` is what a node of ours says that it is for.  ``teale_key`` is what it says
    is its key for the channel of TealeNet's own peers, and nobody signed that.
    """

    id: str
    name: str
    software: PeerSoftware
    description: PeerDescription
    role: str = ""
    teale_key: bytes | None = None
    noise_key: bytes | None = None


@dataclass(slots=True)
class PinnedKeys:
    """The keys for Noise that nodes have signed, across all connections to relays."""

    keys: dict[str, bytes] = field(default_factory=dict)

    def pin(self, node_id: str, key: bytes) -> None:
        """Remember a key; the oldest is forgotten when there are too many."""
        self.keys.pop(node_id, None)
        self.keys[node_id] = key
        if len(self.keys) > PINNED_MAX:
            del self.keys[next(iter(self.keys))]


class NodeDirectory:
    """Who is on the relay."""

    def __init__(self, own_id: str, pinned_keys: PinnedKeys) -> None:
        self._own_id = own_id
        self._pinned_keys = pinned_keys
        self._known: dict[str, KnownNode] = {}
        self._seen: dict[str, float] = {}
        self._entries: dict[str, NodeEntry] = {}  # what was read last: mostly the same

    def update(self, peers: Sequence[NodeEntry], now: float) -> None:
        """Take note of who is there; who makes no sense is left out.

        Relays of ours do not tell of nodes that are not available at the moment.
        """
        if len(peers) < COMPLETE_BELOW:
            told = {entry.node_id for entry in peers}
            for node_id in self._known.keys() - told:
                self._mark_unavailable(node_id)
        for entry in peers[:ENTRIES_MAX]:
            node_id = entry.node_id
            if node_id == self._own_id or not _NODE_ID.fullmatch(node_id):
                continue
            if node_id not in self._known and len(self._known) >= NODES_MAX:
                continue
            if self._is_unchanged(entry) or self._parse(entry):
                self._seen[node_id] = now
        for node_id, seen in list(self._seen.items()):
            if now - seen > FORGOTTEN_AFTER:
                self.remove(node_id)

    def pin_key(self, node_id: str, key: bytes) -> None:
        """Take note of a node that has signed its key for Noise."""
        self._pinned_keys.pin(node_id, key)
        self._entries.pop(node_id, None)

    def remove(self, node_id: str) -> None:
        """Forget a node that has left, but not its key."""
        for table in (self._known, self._seen, self._entries):
            table.pop(node_id, None)

    def all(self) -> Iterable[KnownNode]:
        """Return all that are there."""
        return self._known.values()

    def get(self, node_id: str) -> KnownNode:
        """Return what is known of a node, which may be next to nothing."""
        known = self._known.get(node_id)
        if known is not None:
            return known
        key = self._pinned_keys.keys.get(node_id)
        breed = PeerSoftware.RUST if key is None else PeerSoftware.SHOAL
        return KnownNode(node_id, "", breed, PeerDescription(), noise_key=key)

    def _mark_unavailable(self, node_id: str) -> None:
        self._entries.pop(node_id, None)
        node = self._known[node_id]
        described = replace(node.description, available=False)
        self._known[node_id] = replace(node, description=described)

    def _is_unchanged(self, entry: NodeEntry) -> bool:
        before = self._entries.get(entry.node_id)
        return before is not None and (
            before.capabilities == entry.capabilities
            and before.wg_public_key == entry.wg_public_key
            and before.display_name == entry.display_name
        )

    def _parse(self, entry: NodeEntry) -> bool:
        node_id = entry.node_id
        try:
            said = _capabilities.decode(msgspec.json.encode(entry.capabilities))
        except (ValueError, TypeError, RecursionError):
            return False
        ours = read_introduction(said.shoal)
        key = None if ours is None else announced_key(node_id, ours)
        if key is not None:
            self._pinned_keys.pin(node_id, key)
        key = self._pinned_keys.keys.get(node_id)
        if ours is not None and key is None:
            return False  # one of ours without a key: somebody took it away
        self._known[node_id] = KnownNode(
            node_id,
            entry.display_name,
            PeerSoftware.SHOAL if key is not None else _software(said, entry),
            _description(said),
            "" if ours is None else ours.role,
            parse_key(entry.wg_public_key or "") or None,
            key,
        )
        self._entries[node_id] = entry
        return True


def announced_key(node_id: str, ours: IntroductionExtension) -> bytes | None:
    """Return a node's key for Noise, if the key that it is known by signed that."""
    key = parse_key(ours.noise)
    return key if is_bound(node_id, key, decode_base64(ours.noise_proof)) else None


def is_bound(node_id: str, exchange_key: bytes, signature: bytes) -> bool:
    """Say whether a node signed this X25519 key as its own."""
    owner = parse_key(node_id)
    if not owner or not exchange_key:
        return False
    try:
        key = Ed25519PublicKey.from_public_bytes(owner)
        key.verify(signature, noise_binding(exchange_key))
    except (InvalidSignature, ValueError):
        return False
    return True


def _software(said: NodeCapabilities, entry: NodeEntry) -> PeerSoftware:
    """Guess whose program a node is: Macs have a key, and say nothing of this."""
    rust = (
        entry.wg_public_key is None
        or said.max_concurrent_requests is not None
        or said.effective_context is not None
        or said.on_ac_power is not None
    )
    return PeerSoftware.RUST if rust else PeerSoftware.MAC


def _description(said: NodeCapabilities) -> PeerDescription:
    return PeerDescription(
        models=said.loaded_models,
        slots=max(1, said.max_concurrent_requests or 1),
        context=max(0, said.effective_context or 0),
        available=said.is_available,
    )
