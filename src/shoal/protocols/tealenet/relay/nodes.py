"""A relay's nodes: registrations are verified, and discovery requests answered."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from shoal.protocols.tealenet.codec.relay_envelope import BadRelayMessage
from shoal.protocols.tealenet.codec.relay_messages import (
    DiscoverFilter,
    RegistrationProof,
    RelayRegister,
    challenge_text,
    decode_payload,
)
from shoal.protocols.tealenet.codec.signatures import HEX_KEY
from shoal.protocols.tealenet.relay.limits import RelayLimits

SIGNATURE = re.compile(r"[0-9a-fA-F]{128}")
NODE_OVERHEAD = 1024  # bytes of a node beside its capabilities, approximately

Verify = Callable[[bytes, bytes, bytes], bool]
"""Verifies a signature by key, signature and message: ``ProtocolContext.verify``."""

_REGISTER_DEFAULTS: Mapping[str, object] = {"displayName": "", "capabilities": {}}


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """What a node has registered.

    ``capabilities`` is JSON; ``extended``: the node runs Shoal.
    """

    name: str
    capabilities: msgspec.Raw
    exchange_key: str | None
    signature: str
    extended: bool
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
    announcements that it does not need.  ``member``: the coordinator has admitted it.
    ``listed``: it was announced to the others.
    """

    id: str
    link_id: int
    profile: NodeProfile
    last_heard: float
    proven: bool
    registered_at: float
    address: str = ""
    opened_sessions: int = 0
    announced: int = 0
    member: bool = False
    listed: bool = True


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
    text = message.node_id.encode()
    if not _is_signed(message.node_id, message.signature, text, verifies):
        raise _invalid_registration(
            "signature: expected nodeID's text signed with the key that it names"
        )


def check_proof(
    message: RelayRegister, proof: RegistrationProof, challenge: str, verifies: Verify
) -> None:
    """Raise BadRelayMessage unless the id's key signed this connection's challenge."""
    text = challenge_text(challenge, message.node_id)
    if (
        not challenge
        or proof.challenge != challenge
        or not _is_signed(message.node_id, proof.proof, text, verifies)
    ):
        raise _invalid_registration(
            "shoal.proof: not a signature of this connection's challenge by nodeID's "
            "key; register without it to get a challenge"
        )


def knows_extension(capabilities: Mapping[str, Any]) -> bool:
    """Return whether a node announces Shoal's extension."""
    shoal = capabilities.get("shoal")
    version = shoal.get("version") if isinstance(shoal, dict) else None
    return type(version) is int and version >= 1


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
        extended=knows_extension(capabilities),
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
        if node is not requester and node.listed and node.profile.matches(wanted):
            entries.append(_entry(node, epoch))
            size += node.profile.size
    return entries


# Private parts, in the order in which they are called.


def _invalid_registration(why: str) -> BadRelayMessage:
    return BadRelayMessage("invalid_register", why)


def _is_signed(key: str, signature: str, text: bytes, verifies: Verify) -> bool:
    if not SIGNATURE.fullmatch(signature):
        return False
    return verifies(bytes.fromhex(key), bytes.fromhex(signature), text)


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
        "shoal": {"proven": node.proven},
    }
