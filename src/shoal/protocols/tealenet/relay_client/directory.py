"""The directory of a relay's other nodes, as the relay describes them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from shoal.protocols.seam.session import PeerProfile
from shoal.protocols.tealenet.codec.hardware import (
    NodeCapabilities,
    read_hardware,
    shown_name,
)
from shoal.protocols.tealenet.codec.relay_messages import NodeEntry
from shoal.protocols.tealenet.codec.scalars import HEX_KEY
from shoal.protocols.tealenet.peer import PeerDescription, PeerSoftware

NODES_MAX = 4096  # nodes in the directory
ENTRIES_MAX = 1000  # of one answer that are read
COMPLETE_BELOW = 50  # nodes: an answer with fewer lists all available nodes
FORGOTTEN_AFTER = 600.0  # seconds without an entry, as at Macs

_capabilities = msgspec.json.Decoder(NodeCapabilities)


@dataclass(frozen=True, slots=True)
class KnownNode:
    """Another node, as a relay describes it.

    ``exchange_key`` is the announced key for encryption; no node signs it.
    """

    id: str
    software: PeerSoftware
    description: PeerDescription
    exchange_key: bytes | None = None


class NodeDirectory:
    """The other nodes of one relay."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
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

    def remove(self, node_id: str) -> None:
        """Remove a node that has left."""
        for table in (self._known, self._seen, self._entries):
            table.pop(node_id, None)

    def all(self) -> Iterable[KnownNode]:
        """Return all nodes."""
        return self._known.values()

    def get(self, node_id: str) -> KnownNode:
        """Return a node; without an entry, only its id is known."""
        unknown = KnownNode(node_id, PeerSoftware.RUST, PeerDescription())
        return self._known.get(node_id, unknown)

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
        node_id, key = entry.node_id, entry.wg_public_key
        try:
            capabilities = _capabilities.decode(msgspec.json.encode(entry.capabilities))
        except (ValueError, TypeError, RecursionError):
            return False
        self._known[node_id] = KnownNode(
            node_id,
            # Rust nodes have no key.
            PeerSoftware.RUST if key is None else PeerSoftware.MAC,
            _description(capabilities, entry.display_name),
            parse_key(key or ""),
        )
        self._entries[node_id] = entry
        return True


def parse_key(text: str) -> bytes | None:
    """Return a public key from its 64 hexadecimal digits; None for invalid text."""
    return bytes.fromhex(text) if HEX_KEY.fullmatch(text.lower()) else None


def _description(capabilities: NodeCapabilities, name: str) -> PeerDescription:
    return PeerDescription(
        models=capabilities.loaded_models,
        context=max(0, capabilities.effective_context or 0),
        available=capabilities.is_available,
        profile=PeerProfile(shown_name(name), read_hardware(capabilities.hardware)),
    )
