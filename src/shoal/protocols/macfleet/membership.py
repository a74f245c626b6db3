"""The nodes of a fleet: the addresses, hardware and liveness of each.

Source: the MacFleet document, "Membership".  Upstream nodes never ping a failed node
again; Shoal's do, and so notice its return.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from shoal.protocols.macfleet.codec.hardware import (
    UNKNOWN_PROFILE,
    WIRE_VERSION,
    HardwareProfile,
    reported_hardware,
)

HEARTBEAT_PORT = 50051  # MacFleet's default
MISSES_MAX = 3  # pings without a pong after which a node is suspected
FAILED_AFTER = 10.0  # seconds without a pong after which a suspected node has failed
FORGOTTEN_AFTER = 3600.0  # seconds since its last change of state or announcement
NODES_MAX = 1024  # announcements are not authenticated, so their number is limited
ADDRESSES_MAX = 8  # of one node


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """The address of a node's heartbeat port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class NodeState(Enum):
    """The liveness of a node."""

    SIGHTED = "sighted"  # announced on the network, not yet authenticated
    ALIVE = "alive"
    SUSPECTED = "suspected"
    FAILED = "failed"


MEMBER_STATES = frozenset({NodeState.ALIVE, NodeState.SUSPECTED})
"""The states of current members of the fleet."""


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A node as it is known now; times are monotonic seconds.

    ``addresses`` begins with the one to ping next.  ``since`` is the time of its last
    change of state.  ``accepts_hardware``: pings to it have this node's hardware; a
    node of version 2.1 disconnects without an answer to those.
    """

    id: str
    addresses: tuple[NodeAddress, ...]
    state: NodeState
    since: float
    profile: HardwareProfile = UNKNOWN_PROFILE
    accepts_hardware: bool = True
    misses: int = 0
    last_pong: float = float("-inf")
    last_ping: float = float("-inf")

    @property
    def address(self) -> NodeAddress:
        """The address to ping next."""
        return self.addresses[0]

    @property
    def stated_port(self) -> int:
        """The transport port it has announced; 0: none."""
        return self.profile.data_port

    @property
    def has_hardware(self) -> bool:
        """Whether its hardware is known."""
        return reported_hardware(self.profile) is not None

    @property
    def data_port(self) -> int:
        """The transport port; by default the one after the heartbeat port."""
        return self.stated_port or self.address.port + 1


POOL_VERSION = "2.2.0"  # of the MacFleet programs that this follows
MISMATCHES_MAX = 1024  # announcements are not authenticated


def _ignore(text: str) -> None:
    pass


@dataclass(slots=True, eq=False)
class FleetRegistry:
    """All nodes of a fleet but this one, by id.

    ``warn`` receives what to log about nodes of other versions.
    """

    own_id: str
    own_profile: Callable[[], HardwareProfile]
    _warn: Callable[[str], None] = _ignore
    # Ids and names of versions.
    _mismatches: set[tuple[str, str]] = field(default_factory=set)
    _nodes: dict[str, FleetNode] = field(default_factory=dict)

    @property
    def nodes(self) -> Sequence[FleetNode]:
        """All known nodes, the oldest first."""
        return tuple(self._nodes.values())

    def get(self, node_id: str) -> FleetNode | None:
        """Return a node, or None if it is unknown."""
        return self._nodes.get(node_id)

    def has_failed(self, node_id: str) -> bool:
        """Say whether a node is known and has failed."""
        node = self._nodes.get(node_id)
        return node is not None and node.state is NodeState.FAILED

    def members(self) -> Sequence[FleetNode]:
        """Return the current members of the fleet."""
        return [node for node in self._nodes.values() if node.state in MEMBER_STATES]

    def find_by_address(self, address: NodeAddress) -> FleetNode | None:
        """Return the current member at an address, if there is one."""
        for node in self._nodes.values():
            if node.address == address and node.state in MEMBER_STATES:
                return node
        return None

    # What discovery, gossip and connections find out.

    def version_note(
        self, node_id: str, name: str, theirs: int | str, ours: int | str
    ) -> str:
        """Return what to log about a node's version; empty: nothing, or no longer.

        Another version is accepted, as by upstream: what the node sends is checked
        field by field.
        """
        key = (node_id, name)
        is_known = theirs == ours or key in self._mismatches
        if is_known or len(self._mismatches) >= MISMATCHES_MAX:
            return ""
        self._mismatches.add(key)
        return f"node {node_id!a} has {name} {theirs!a}, and this node has {ours!a}"

    def on_pool_version(self, node_id: str, version: str) -> None:
        """Record the version in an announcement."""
        if text := self.version_note(node_id, "pool_version", version, POOL_VERSION):
            self._warn(text)

    def _on_wire_version(self, node_id: str, version: int) -> None:
        if text := self.version_note(node_id, "wire_version", version, WIRE_VERSION):
            self._warn(text)

    def on_announced(
        self,
        node_id: str,
        addresses: Sequence[NodeAddress],
        profile: HardwareProfile,
        now: float,
    ) -> None:
        """Record an announcement, which is not authenticated.

        It does not change the addresses of a current member.
        """
        if not addresses or node_id == self.own_id:
            return
        node = self._nodes.get(node_id)
        if node is None:
            if self._has_room(now):
                updated = tuple(addresses[:ADDRESSES_MAX])
                self._nodes[node_id] = FleetNode(
                    node_id, updated, NodeState.SIGHTED, now, profile
                )
        elif node.state not in MEMBER_STATES:
            new = [each for each in addresses if each not in node.addresses]
            updated = (*node.addresses[:1], *new, *node.addresses[1:])[:ADDRESSES_MAX]
            node = replace(node, addresses=updated)
            if node.state is NodeState.SIGHTED:
                node = replace(node, profile=profile, since=now)
            self._nodes[node_id] = node

    def on_pinged(
        self, node_id: str, host: str, profile: HardwareProfile | None, now: float
    ) -> None:
        """Record a node that has sent a signed ping from a host.

        A ping contains the transport port, not the heartbeat port: that is the one
        before it, or the default; without hardware (``profile`` is None), the default.
        The node is a member once it has answered there.  A node that states no
        transport port, such as a worker that dials, is not recorded.
        """
        ports = [HEARTBEAT_PORT]
        if profile is not None:
            self._on_wire_version(node_id, profile.wire_version)
            if profile.data_port <= 1:
                return
            ports = [*dict.fromkeys((profile.data_port - 1, *ports))]
        addresses = [NodeAddress(host, port) for port in ports]
        self.on_announced(node_id, addresses, profile or UNKNOWN_PROFILE, now)

    def on_handshake(self, node_id: str, profile: HardwareProfile) -> None:
        """Record the hardware in a handshake, of a node whose pongs have none."""
        node = self._nodes.get(node_id)
        if node is not None and not node.has_hardware:
            port = node.stated_port or profile.data_port
            profile = replace(profile, data_port=port)
            self._nodes[node_id] = replace(node, profile=profile)

    def on_ping_sent(self, node_id: str, now: float) -> None:
        """Record that a ping was sent to a node."""
        if (node := self._nodes.get(node_id)) is not None:
            self._nodes[node_id] = replace(node, last_ping=now)

    def on_pong(
        self,
        node_id: str,
        address: NodeAddress,
        profile: HardwareProfile | None,
        now: float,
        *,
        accepts_hardware: bool = True,
    ) -> None:
        """Record a pong from an address; ``profile`` is None if it has no hardware.

        ``accepts_hardware``: the ping had this node's hardware.  If another node was at
        that address, it has failed.
        """
        if node_id == self.own_id:
            return
        if profile is not None:
            self._on_wire_version(node_id, profile.wire_version)
        if (
            previous := self.find_by_address(address)
        ) is not None and previous.id != node_id:
            self._set_state(previous, NodeState.FAILED, now)
        node = self._nodes.get(node_id)
        if node is None:
            if not self._has_room(now):
                return
            node = FleetNode(node_id, (address,), NodeState.ALIVE, now)
        others = tuple(each for each in node.addresses if each != address)
        self._nodes[node_id] = replace(
            node,
            addresses=(address, *others)[:ADDRESSES_MAX],
            state=NodeState.ALIVE,
            since=node.since if node.state is NodeState.ALIVE else now,
            profile=profile or node.profile,
            accepts_hardware=accepts_hardware,
            misses=0,
            last_pong=now,
        )

    def on_missed_pong(
        self, node_id: str, now: float, *, hung_up: bool = False
    ) -> None:
        """Record that a ping was not answered; the next goes to another address.

        If the node ``hung_up``, the next ping is without hardware if this one had it.
        """
        node = self._nodes.get(node_id)
        if node is None:
            return
        accepts = not (hung_up and node.accepts_hardware)
        node = replace(node, misses=node.misses + 1, accepts_hardware=accepts)
        if node.state is not NodeState.ALIVE:
            rotated = (*node.addresses[1:], node.addresses[0])
            self._nodes[node_id] = replace(node, addresses=rotated)
        elif node.misses < MISSES_MAX:
            self._nodes[node_id] = node
        else:
            self._set_state(node, NodeState.SUSPECTED, now)
        self.expire(now)

    def expire(self, now: float) -> None:
        """Mark nodes as failed that were suspected too long; forget old failed ones."""
        for node in [*self._nodes.values()]:
            if (
                node.state is NodeState.SUSPECTED
                and now - node.last_pong > FAILED_AFTER
            ):
                self._set_state(node, NodeState.FAILED, now)
            elif node.state not in MEMBER_STATES and now - node.since > FORGOTTEN_AFTER:
                del self._nodes[node.id]

    def _set_state(self, node: FleetNode, state: NodeState, now: float) -> None:
        self._nodes[node.id] = replace(node, state=state, since=now)

    def _has_room(self, now: float) -> bool:
        """Say whether a node can be added; evicts the oldest that is not a member."""
        if len(self._nodes) < NODES_MAX:
            return True
        inactive = [
            node for node in self._nodes.values() if node.state not in MEMBER_STATES
        ]
        if not inactive:
            return False
        del self._nodes[min(inactive, key=lambda node: node.since).id]
        return True
