"""What nodes say of themselves at a relay: this one's registration, and the others'.

Source: what real nodes do: every four minutes, and after each change.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import Draining, LoadChanged, OffersChanged
from shoal.domain.work import JobKind
from shoal.domain.worker import Offer, WorkerLoad
from shoal.protocols.seam.context import Identity
from shoal.protocols.seam.session import PeerProfile
from shoal.protocols.tealenet.codec import hardware, scalars
from shoal.protocols.tealenet.codec.relay_messages import (
    CAPABILITIES_MAX,
    NodeEntry,
    RelayRegister,
    RelayRegisterAck,
)
from shoal.protocols.tealenet.local_node import TealeLocalNode
from shoal.protocols.tealenet.peer import PeerDescription, PeerSoftware

REFRESH_INTERVAL = 240.0  # seconds between two registrations
CHANGE_INTERVAL = 2.0  # seconds at least between two registrations, on changes
TTL_FRACTION = 0.8  # of a registration's lifetime, after which it is renewed
ACK_TIMEOUT = 10.0  # seconds to wait for the first acknowledgement
NAMES_SIZE_MAX = CAPABILITIES_MAX - (8 << 10)  # bytes; the rest is less than 8 KiB


NODES_MAX = 4096  # nodes in the directory
ENTRIES_MAX = 1000  # of one answer that are read
COMPLETE_BELOW = 50  # nodes: an answer with fewer lists all available nodes
FORGOTTEN_AFTER = 600.0  # seconds without an entry, as at Macs

_capabilities = msgspec.json.Decoder(hardware.NodeCapabilities)


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
            if node_id == self._own_id or not scalars.HEX_KEY.fullmatch(node_id):
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
    return bytes.fromhex(text) if scalars.HEX_KEY.fullmatch(text.lower()) else None


def _description(capabilities: hardware.NodeCapabilities, name: str) -> PeerDescription:
    return PeerDescription(
        models=capabilities.loaded_models,
        context=max(0, capabilities.effective_context or 0),
        available=capabilities.is_available,
        profile=PeerProfile(
            hardware.shown_name(name), hardware.read_hardware(capabilities.hardware)
        ),
    )


class NodeRegistration:
    """This node's registration; the next one is ``due_at``.

    ``is_acknowledged``: the relay has acknowledged the last one.
    """

    def __init__(self, local: TealeLocalNode, identity: Identity, now: float) -> None:
        self._local, self._identity = local, identity
        self._offers = local.offers
        self._load = WorkerLoad()
        self._draining = False
        self._last_at = now
        self._timeout_at = now + ACK_TIMEOUT
        self.is_acknowledged = False
        self.due_at = now

    @property
    def deadline(self) -> float:
        """When ``tick`` is next due."""
        return (
            self.due_at if self.is_acknowledged else min(self.due_at, self._timeout_at)
        )

    def tick(self, now: float) -> RelayRegister | None:
        """Return the registration if it is due.

        Raises PeerError if the relay has not acknowledged it in time.
        """
        if not self.is_acknowledged and now >= self._timeout_at:
            raise PeerError(
                "the relay did not acknowledge the registration within "
                f"{ACK_TIMEOUT:g} s"
            )
        if now < self.due_at:
            return None
        self._last_at = now
        self.due_at = now + REFRESH_INTERVAL
        return self._registration()

    def on_ack(self, ack: RelayRegisterAck, now: float) -> None:
        """Schedule the renewal within the lifetime that the relay grants."""
        self.is_acknowledged = True
        # The relay may send any number.
        lifetime = min(ack.ttl_seconds, REFRESH_INTERVAL / TTL_FRACTION)
        self.due_at = min(
            self.due_at, now + max(CHANGE_INTERVAL, TTL_FRACTION * lifetime)
        )

    def on_expired(self, now: float) -> None:
        """Register again, because the relay has removed this node."""
        self.is_acknowledged = False
        self._timeout_at = now + ACK_TIMEOUT
        self._schedule_change()

    def update(self, event: OffersChanged | LoadChanged | Draining) -> None:
        """Apply a change of this node's state, and register again if it matters."""
        match event:
            case OffersChanged(offers):
                self._offers = offers
            case LoadChanged(load):
                unchanged = bool(load.unfit) is bool(self._load.unfit)
                self._load = load
                if unchanged:
                    return
            case Draining():
                self._draining = True
        self._schedule_change()

    def _schedule_change(self) -> None:
        self.due_at = min(self.due_at, self._last_at + CHANGE_INTERVAL)

    def _registration(self) -> RelayRegister:
        node_id = self._identity.public_key.hex()
        return RelayRegister(
            node_id=node_id,
            public_key=node_id,
            display_name=scalars.well_formed(self._local.name)[: scalars.NAME_MAX],
            capabilities=self._capabilities(),
            signature=self._identity.sign(node_id.encode()).hex(),
            wg_public_key=self._identity.exchange_key.hex(),
        )

    def _capabilities(self) -> dict[str, Any]:
        local, offers = self._local, [*_public_offers(self._offers)]
        contexts = [offer.context for offer in offers if offer.context]
        # A coordinator without offers still submits jobs.
        usable = not local.serves_only or bool(offers)
        capabilities: dict[str, Any] = msgspec.to_builtins(
            hardware.node_capabilities(
                local.hardware,
                fitting_names(public_model_names(offers), NAMES_SIZE_MAX),
                available=usable and not self._draining and not self._load.unfit,
                slots=max((offer.slots for offer in offers), default=1),
                context=min(contexts, default=0),
            )
        )
        return capabilities


def public_model_names(offers: Iterable[Offer]) -> list[str]:
    """Return the names of the models that plain peers can use, without duplicates."""
    names = {name for offer in offers for name in offer.models}
    return sorted(name for name in names if 0 < len(name) <= scalars.NAME_MAX)[
        : scalars.MODELS_MAX
    ]


def fitting_names(names: Iterable[str], size_max: int) -> list[str]:
    """Return the first names that fit, with commas, into ``size_max`` bytes of JSON."""
    fitting = []
    for name in names:
        size_max -= len(msgspec.json.encode(name)) + 1
        if size_max < 0:
            break
        fitting.append(name)
    return fitting


def _public_offers(offers: Iterable[Offer]) -> Iterable[Offer]:
    """Return the offers that plain peers can use: chats that are open to every key."""
    return (
        offer
        for offer in offers
        if JobKind.CHAT in offer.kinds and offer.slots and not offer.is_restricted
    )
