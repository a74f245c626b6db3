"""The directory of a relay's other nodes, as the relay describes them.

Shoal trusts a relay's description of what a node runs, but not of its encryption: a
Shoal node signs its Noise key with the key that is its id, and that signed key is
pinned.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shoal.protocols.seam.session import PeerProfile
from shoal.protocols.tealenet.codec.extension import (
    IntroductionExtension,
    read_introduction,
)
from shoal.protocols.tealenet.codec.hardware import (
    NodeCapabilities,
    read_hardware,
    shown_name,
)
from shoal.protocols.tealenet.codec.relay_messages import NodeEntry
from shoal.protocols.tealenet.codec.signatures import (
    HEX_KEY,
    decode_base64,
    noise_binding,
    parse_key,
)
from shoal.protocols.tealenet.peer import PeerDescription, PeerSoftware

NODES_MAX = 4096  # nodes in the directory
ENTRIES_MAX = 1000  # of one answer that are read: each has a signature to verify
COMPLETE_BELOW = 50  # nodes: an answer with fewer lists all available nodes
FORGOTTEN_AFTER = 600.0  # seconds without an entry, as at Macs
PINNED_MAX = 65_536  # nodes whose Noise keys are pinned

_capabilities = msgspec.json.Decoder(NodeCapabilities)


@dataclass(frozen=True, slots=True)
class KnownNode:
    """Another node, as a relay describes it.

    ``role`` is the role that a Shoal node announces.  ``teale_key`` is the announced
    key for TealeNet's own encrypted channel; it is not signed.
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
    """The Noise keys that nodes have signed, for all connections to relays."""

    keys: dict[str, bytes] = field(default_factory=dict)

    def pin(self, node_id: str, key: bytes) -> None:
        """Pin a key; beyond ``PINNED_MAX`` the oldest one is evicted."""
        self.keys.pop(node_id, None)
        self.keys[node_id] = key
        if len(self.keys) > PINNED_MAX:
            del self.keys[next(iter(self.keys))]


class NodeDirectory:
    """The other nodes of one relay."""

    def __init__(self, own_id: str, pinned_keys: PinnedKeys) -> None:
        self._own_id = own_id
        self._pinned_keys = pinned_keys
        self._known: dict[str, KnownNode] = {}
        self._seen: dict[str, float] = {}
        self._entries: dict[str, NodeEntry] = {}  # the last ones, mostly unchanged

    def update(self, entries: Sequence[NodeEntry], now: float) -> None:
        """Apply a relay's list of nodes; skip invalid entries.

        Shoal's relays omit nodes that are not available at the moment.
        """
        if len(entries) < COMPLETE_BELOW:
            listed = {entry.node_id for entry in entries}
            for node_id in self._known.keys() - listed:
                self._mark_unavailable(node_id)
        for entry in entries[:ENTRIES_MAX]:
            node_id = entry.node_id
            if node_id == self._own_id or not HEX_KEY.fullmatch(node_id):
                continue
            if node_id not in self._known and len(self._known) >= NODES_MAX:
                continue
            if self._is_unchanged(entry) or self._parse(entry):
                self._seen[node_id] = now
        for node_id, seen in list(self._seen.items()):
            if now - seen > FORGOTTEN_AFTER:
                self.remove(node_id)

    def pin_key(self, node_id: str, key: bytes) -> None:
        """Pin the Noise key of a node that has signed it."""
        self._pinned_keys.pin(node_id, key)
        self._entries.pop(node_id, None)

    def remove(self, node_id: str) -> None:
        """Remove a node that has left; its key stays pinned."""
        for table in (self._known, self._seen, self._entries):
            table.pop(node_id, None)

    def all(self) -> Iterable[KnownNode]:
        """Return all nodes."""
        return self._known.values()

    def get(self, node_id: str) -> KnownNode:
        """Return a node; without an entry, only its id and pinned key are known."""
        known = self._known.get(node_id)
        if known is not None:
            return known
        key = self._pinned_keys.keys.get(node_id)
        software = PeerSoftware.RUST if key is None else PeerSoftware.SHOAL
        return KnownNode(node_id, "", software, PeerDescription(), noise_key=key)

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
            capabilities = _capabilities.decode(msgspec.json.encode(entry.capabilities))
        except (ValueError, TypeError, RecursionError):
            return False
        shoal = read_introduction(capabilities.shoal)
        key = None if shoal is None else announced_key(node_id, shoal)
        if key is not None:
            self._pinned_keys.pin(node_id, key)
        key = self._pinned_keys.keys.get(node_id)
        if shoal is not None and key is None:
            return False  # a Shoal node always has a key: it was removed on the way
        self._known[node_id] = KnownNode(
            node_id,
            entry.display_name,
            PeerSoftware.SHOAL if key is not None else _software(capabilities, entry),
            _description(capabilities, entry.display_name),
            "" if shoal is None else shoal.role,
            parse_key(entry.wg_public_key or "") or None,
            key,
        )
        self._entries[node_id] = entry
        return True


def announced_key(node_id: str, introduction: IntroductionExtension) -> bytes | None:
    """Return a node's announced Noise key; None unless the node's id signed it."""
    key = parse_key(introduction.noise)
    return (
        key if is_bound(node_id, key, decode_base64(introduction.noise_proof)) else None
    )


def is_bound(node_id: str, exchange_key: bytes, signature: bytes) -> bool:
    """Return whether the key that is a node's id has signed this X25519 key."""
    owner = parse_key(node_id)
    if not owner or not exchange_key:
        return False
    try:
        key = Ed25519PublicKey.from_public_bytes(owner)
        key.verify(signature, noise_binding(exchange_key))
    except (InvalidSignature, ValueError):
        return False
    return True


def _software(capabilities: NodeCapabilities, entry: NodeEntry) -> PeerSoftware:
    """Guess a node's software: Macs have a key and none of these fields."""
    rust = (
        entry.wg_public_key is None
        or capabilities.max_concurrent_requests is not None
        or capabilities.effective_context is not None
        or capabilities.on_ac_power is not None
    )
    return PeerSoftware.RUST if rust else PeerSoftware.MAC


def _description(capabilities: NodeCapabilities, name: str) -> PeerDescription:
    return PeerDescription(
        models=capabilities.loaded_models,
        context=max(0, capabilities.effective_context or 0),
        available=capabilities.is_available,
        profile=PeerProfile(shown_name(name), read_hardware(capabilities.hardware)),
    )
