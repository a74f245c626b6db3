"""A relay's nodes and their sessions: verified registrations, and discovery."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from shoal.protocols.tealenet.codec.relay_messages import (
    BadRelayMessage,
    DiscoverFilter,
    RelayRegister,
    decode_payload,
)
from shoal.protocols.tealenet.codec.scalars import HEX_KEY
from shoal.protocols.tealenet.relay_server.limits import RelayLimits

SIGNATURE = re.compile(r"[0-9a-fA-F]{128}")
NODE_OVERHEAD = 1024  # bytes of a node beside its capabilities, approximately

Verify = Callable[[bytes, bytes, bytes], bool]
"""Verifies a signature by key, signature and message: ``ProtocolContext.verify``."""

_REGISTER_DEFAULTS: Mapping[str, object] = {"displayName": "", "capabilities": {}}


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """What a node has registered; ``capabilities`` is JSON."""

    name: str
    capabilities: msgspec.Raw
    exchange_key: str | None
    signature: str
    available: bool
    models: frozenset[str]
    memory_gb: float
    tier: float

    @property
    def size(self) -> int:
        """The approximate number of bytes that are stored."""
        return NODE_OVERHEAD + memoryview(self.capabilities).nbytes

    def matches(self, wanted: DiscoverFilter | None) -> bool:
        """Return whether discovery lists the node.  Tier 1 is the most capable."""
        if not self.available:
            return False
        if wanted is None:
            return True
        return (
            (wanted.model_id is None or wanted.model_id in self.models)
            and (wanted.min_ram_gb is None or self.memory_gb >= wanted.min_ram_gb)
            and (wanted.min_tier is None or self.tier <= wanted.min_tier)
        )


@dataclass(slots=True, eq=False)
class NodeRecord:
    """A registered node.

    ``last_heard`` is the time of its last message, ``registered_at`` that of its first
    registration, since which it has been here without a break, ``opened_sessions`` the
    number of open sessions that it opened, and ``announced`` the number of pending
    announcements that it does not need.
    """

    id: str
    link_id: int
    profile: NodeProfile
    last_heard: float
    registered_at: float
    address: str = ""
    opened_sessions: int = 0
    announced: int = 0


def read_registration(payload: Mapping[str, Any]) -> RelayRegister:
    """Decode a registration; only the id, its key and the signature are required.

    Raises BadRelayMessage.
    """
    if not payload.get("nodeID"):
        raise _invalid_registration("Missing nodeID in register payload")
    try:
        message = decode_payload("register", {**_REGISTER_DEFAULTS, **payload})
    except BadRelayMessage as error:
        raise _invalid_registration(str(error)) from error
    assert isinstance(message, RelayRegister), "the kind determines the type"
    if not HEX_KEY.fullmatch(message.node_id):
        raise _invalid_registration(
            "nodeID: expected an Ed25519 public key: 64 hex digits, lower case"
        )
    if message.public_key != message.node_id:
        raise _invalid_registration("publicKey: expected the same as nodeID")
    return message


def check_signature(message: RelayRegister, verifies: Verify) -> None:
    """Raise BadRelayMessage unless the id's key signed the id."""
    signed = SIGNATURE.fullmatch(message.signature) and verifies(
        bytes.fromhex(message.node_id),
        bytes.fromhex(message.signature),
        message.node_id.encode(),
    )
    if not signed:
        raise _invalid_registration(
            "signature: expected nodeID's text signed with the key that it names"
        )


def node_profile(message: RelayRegister, limits: RelayLimits) -> NodeProfile:
    """Return a registration's profile.  Raises BadRelayMessage if it is too large."""
    capabilities = message.capabilities
    encoded = msgspec.json.encode(capabilities)
    if len(encoded) > limits.capabilities_max:
        raise _invalid_registration(
            f"capabilities of {len(encoded)} bytes, at most {limits.capabilities_max}"
        )
    key = message.wg_public_key
    if key is not None and not HEX_KEY.fullmatch(key):
        raise _invalid_registration(
            "wgPublicKey: expected an X25519 public key: 64 hex digits, lower case"
        )
    hardware = capabilities.get("hardware")
    if not isinstance(hardware, dict):
        hardware = {}
    models = capabilities.get("loadedModels")
    return NodeProfile(
        name=message.display_name[: limits.name_max],
        capabilities=msgspec.Raw(encoded),
        exchange_key=key,
        signature=message.signature,
        available=capabilities.get("isAvailable") is not False,
        models=frozenset(
            each
            for each in (models if isinstance(models, list) else ())
            if isinstance(each, str)
        ),
        memory_gb=_number(hardware.get("totalRAMGB"), 0.0),
        tier=_number(hardware.get("tier"), 4.0),
    )


def discover_entries(
    nodes: Mapping[str, NodeRecord],
    requester: NodeRecord,
    wanted: DiscoverFilter | None,
    limits: RelayLimits,
    first: int,
    epoch: float,
) -> list[dict[str, object]]:
    """Return the entries of matching nodes, starting with number ``first``.

    ``epoch`` is the wire's date at which the clock was 0.
    """
    entries_max = limits.results
    if wanted is not None and wanted.max_peers is not None:
        entries_max = max(0, min(int(wanted.max_peers), limits.results_max))
    entries: list[dict[str, object]] = []
    size = 0
    for node in _rotated(nodes, first):
        if len(entries) >= entries_max or size >= limits.results_size:
            break
        if node is not requester and node.profile.matches(wanted):
            entries.append(_entry(node, epoch))
            size += node.profile.size
    return entries


# Private parts, in the order in which they are called.


def _invalid_registration(why: str) -> BadRelayMessage:
    return BadRelayMessage("invalid_register", why)


def _number(value: object, otherwise: float) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return otherwise


def _rotated(nodes: Mapping[str, NodeRecord], first: int) -> Iterable[NodeRecord]:
    yield from islice(nodes.values(), first, None)
    yield from islice(nodes.values(), first)


def _entry(node: NodeRecord, epoch: float) -> dict[str, object]:
    return {
        "nodeID": node.id,
        "publicKey": node.id,
        "wgPublicKey": node.profile.exchange_key,
        "displayName": node.profile.name,
        "capabilities": node.profile.capabilities,
        "lastSeen": epoch + node.last_heard,
        "natType": "unknown",
        "endpoints": [],
    }


@dataclass(slots=True, eq=False)
class RoutedSession:
    """A session between two nodes; ``id`` is as the opener wrote it."""

    id: str
    opener: NodeRecord
    other: NodeRecord

    def other_end(self, node: NodeRecord) -> NodeRecord | None:
        """Return the other end's node; None if ``node`` is at neither end."""
        if node is self.opener:
            return self.other
        return self.opener if node is self.other else None


class RoutedSessions:
    """All open sessions, by their ids without regard to case.

    An id belongs to one pair of nodes.  Some peers identify a session by its id alone,
    so a third node that knows the id must not be able to send into the session.
    """

    def __init__(self, limits: RelayLimits) -> None:
        self._limits = limits
        self._by_id: dict[str, RoutedSession] = {}
        self._of_node: dict[NodeRecord, set[RoutedSession]] = {}
        self._of_address = Counter[str]()  # by the opener's

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, session_id: str, opener: NodeRecord, other: NodeRecord) -> None:
        """Open a session, if these nodes have not opened it already.

        Raises BadRelayMessage if other nodes have this id, or at a limit.
        """
        key = session_id.lower()
        session = self._by_id.get(key)
        if session is not None:
            # Nodes that reconnect open their sessions again.
            if session.other_end(opener) is other:
                return
            raise BadRelayMessage(
                "session_taken",
                "sessionID: other nodes use this id; choose a random UUID",
            )
        if opener.opened_sessions >= self._limits.sessions_per_node:
            raise BadRelayMessage(
                "too_many_sessions",
                f"{opener.opened_sessions} sessions are open; end some with relayClose",
            )
        of_address = self._of_address[opener.address]
        if of_address >= self._limits.sessions_per_address:
            raise BadRelayMessage(
                "too_many_sessions",
                f"{of_address} sessions are open from your address; end some with "
                "relayClose",
            )
        if len(self._by_id) >= self._limits.sessions:
            raise BadRelayMessage(
                "relay_full", "The relay has no room for more sessions; try again later"
            )
        self._by_id[key] = session = RoutedSession(session_id, opener, other)
        opener.opened_sessions += 1
        self._of_address[opener.address] += 1
        for end in (opener, other):
            self._of_node.setdefault(end, set()).add(session)

    def is_open(
        self, session_id: str, node: NodeRecord, other: NodeRecord | None
    ) -> bool:
        """Return whether these nodes have the session open."""
        session = self._by_id.get(session_id) or self._by_id.get(session_id.lower())
        return (
            session is not None
            and other is not None
            and session.other_end(node) is other
        )

    def close(self, session_id: str) -> None:
        """Close an open session."""
        self._remove(self._by_id[session_id.lower()])

    def close_all(self, node: NodeRecord) -> list[RoutedSession]:
        """Close all sessions of a node, and return them."""
        closed = list(self._of_node.get(node, ()))
        for session in closed:
            self._remove(session)
        return closed

    def _remove(self, session: RoutedSession) -> None:
        del self._by_id[session.id.lower()]
        opener = session.opener
        opener.opened_sessions -= 1
        self._of_address[opener.address] -= 1
        if not self._of_address[opener.address]:
            del self._of_address[opener.address]
        for end in (session.opener, session.other):
            of_node = self._of_node[end]
            of_node.discard(session)
            if not of_node:
                del self._of_node[end]
