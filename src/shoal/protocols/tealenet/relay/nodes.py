"""A relay's nodes: how registrations are verified and discovery requests answered."""

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
from shoal.protocols.tealenet.relay.limits import RelayLimits

HEX_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
SIGNATURE = re.compile(r"[0-9a-fA-F]{128}", re.ASCII)
NODE_OVERHEAD = 1024  # bytes that a node takes beside its capabilities, about

Verify = Callable[[bytes, bytes, bytes], bool]
"""Takes a key, a signature and a message; see ``ProtocolContext.verify``."""

_REGISTER_DEFAULTS: Mapping[str, object] = {"displayName": "", "capabilities": {}}


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """What a node says of itself.

    ``capabilities`` is their JSON, and ``extended`` says that it knows what is ours.
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
        """How many bytes are kept of it, about."""
        return NODE_OVERHEAD + memoryview(self.capabilities).nbytes

    def matches(self, wanted: DiscoverFilter | None) -> bool:
        """Say whether it is to be told of.  Of tiers, 1 is the most capable."""
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
    """A node that is registered.

    ``address`` is where it comes from, ``last_heard`` when something came from it last,
    ``opened_sessions`` how many sessions it has opened, and ``announced`` how many of
    the pending news are none to it.
    """

    id: str
    link_id: int
    profile: NodeProfile
    last_heard: float
    proven: bool
    address: str = ""
    opened_sessions: int = 0
    announced: int = 0


def read_registration(payload: Mapping[str, Any]) -> RelayRegister:
    """Read a registration, in which only what proves the id has to be there.

    Raises BadRelayMessage.
    """
    if not payload.get("nodeID"):
        raise _invalid_registration("Missing nodeID in register payload")
    try:
        message = decode_payload("register", {**_REGISTER_DEFAULTS, **payload})
    except BadRelayMessage as error:
        raise _invalid_registration(str(error)) from error
    assert isinstance(message, RelayRegister), "this is what that kind is read as"
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
            "signature: not one of nodeID's text by the key that it names"
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
    """Say whether a node announces what is ours."""
    shoal = capabilities.get("shoal")
    version = shoal.get("version") if isinstance(shoal, dict) else None
    return type(version) is int and version >= 1


def node_profile(message: RelayRegister, limits: RelayLimits) -> NodeProfile:
    """Return what a node says of itself.  Raises BadRelayMessage if it is too much."""
    said = message.capabilities
    written = msgspec.json.encode(said)
    if len(written) > limits.capabilities_max:
        raise _invalid_registration(
            f"capabilities of {len(written)} bytes, at most {limits.capabilities_max}"
        )
    key = message.wg_public_key
    if key is not None and not HEX_KEY.fullmatch(key):
        raise _invalid_registration(
            "wgPublicKey: expected an X25519 public key: 64 hex digits, lower case"
        )
    hardware = said.get("hardware")
    if not isinstance(hardware, dict):
        hardware = {}
    models = said.get("loadedModels")
    return NodeProfile(
        name=message.display_name[: limits.name_max],
        capabilities=msgspec.Raw(written),
        exchange_key=key,
        signature=message.signature,
        extended=knows_extension(said),
        available=said.get("isAvailable") is not False,
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
    asker: NodeRecord,
    wanted: DiscoverFilter | None,
    limits: RelayLimits,
    first: int,
    epoch: float,
) -> list[dict[str, object]]:
    """Return what is told of nodes that fit, going round from the ``first`` on.

    ``epoch`` is when the clock was at 0, in the wire's own seconds.
    """
    most = limits.results
    if wanted is not None and wanted.max_peers is not None:
        most = max(0, min(int(wanted.max_peers), limits.results_max))
    entries: list[dict[str, object]] = []
    size = 0
    for node in _rotated(nodes, first):
        if len(entries) >= most or size >= limits.results_size:
            break
        if node is not asker and node.profile.matches(wanted):
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
