"""The nodes of a fleet: where each is, what it is made of, and whether it is there.

Source: the MacFleet document, "Membership".  Real nodes never look again after one that
has failed; ours do, and so take part in its return.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from shoal.protocols.macfleet.codec.hardware import UNKNOWN_PROFILE, HardwareProfile

MISSES_MAX = 3  # pings without a pong after which a node is suspected
FAILED_AFTER = 10.0  # seconds without a pong after which a suspected node has failed
FORGOTTEN_AFTER = 3600.0  # seconds since it failed, or since it was last seen
NODES_MAX = 1024  # known at a time; anybody can announce more
ADDRESSES_MAX = 8  # of one node


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node's heartbeats are answered."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class NodeState(Enum):
    """Whether a node is there."""

    SIGHTED = "sighted"  # announced on the network, where anybody can say anything
    ALIVE = "alive"
    SUSPECTED = "suspected"
    FAILED = "failed"


MEMBER_STATES = frozenset({NodeState.ALIVE, NodeState.SUSPECTED})
"""The states of nodes that belong to the fleet for now."""


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A node as it is known now; times are monotonic seconds.

    ``addresses`` begins with the one that is asked next.  ``is_shoal`` says that it
    claims to be one of ours.  ``since`` is when its state came about, and
    ``last_ping`` when it was last asked.
    """

    id: str
    addresses: tuple[NodeAddress, ...]
    state: NodeState
    since: float
    profile: HardwareProfile = UNKNOWN_PROFILE
    is_shoal: bool = False
    misses: int = 0
    last_pong: float = float("-inf")
    last_ping: float = float("-inf")

    @property
    def address(self) -> NodeAddress:
        """Where it is, as far as is known."""
        return self.addresses[0]

    @property
    def stated_port(self) -> int:
        """What was told of where its transport listens; 0: nothing."""
        return self.profile.data_port

    @property
    def data_port(self) -> int:
        """Where its transport listens: if nothing was told, next to the heartbeat's."""
        return self.stated_port or self.address.port + 1


class FleetRegistry:
    """All nodes but ourselves, by id; plain data, changed by what is found out."""

    def __init__(self, own_id: str, own_profile: Callable[[], HardwareProfile]) -> None:
        self.own_id = own_id
        self.own_profile = own_profile
        self._nodes: dict[str, FleetNode] = {}

    @property
    def nodes(self) -> Sequence[FleetNode]:
        """Return all that are known, the one that was met first before others."""
        return tuple(self._nodes.values())

    def get(self, node_id: str) -> FleetNode | None:
        """Return a node, if it is known."""
        return self._nodes.get(node_id)

    def has_failed(self, node_id: str) -> bool:
        """Say whether a node is known to be there no more."""
        node = self._nodes.get(node_id)
        return node is not None and node.state is NodeState.FAILED

    def members(self) -> Sequence[FleetNode]:
        """Return the nodes that belong to the fleet for now."""
        return [node for node in self._nodes.values() if node.state in MEMBER_STATES]

    def find_by_address(self, address: NodeAddress) -> FleetNode | None:
        """Return the node that is there, if one is and answers."""
        for node in self._nodes.values():
            if node.address == address and node.state in MEMBER_STATES:
                return node
        return None

    # What is found out.

    def on_announced(
        self,
        node_id: str,
        addresses: Sequence[NodeAddress],
        profile: HardwareProfile,
        now: float,
        *,
        is_shoal: bool = False,
    ) -> None:
        """Take note of what was announced, which proves nothing.

        A node that answers where it is known to be is not looked for elsewhere.
        """
        if not addresses or node_id == self.own_id:
            return
        node = self._nodes.get(node_id)
        if node is None:
            if self._has_room(now):
                kept = tuple(addresses[:ADDRESSES_MAX])
                self._nodes[node_id] = FleetNode(
                    node_id, kept, NodeState.SIGHTED, now, profile, is_shoal=is_shoal
                )
        elif node.state not in MEMBER_STATES:
            new = [each for each in addresses if each not in node.addresses]
            kept = (*node.addresses[:1], *new, *node.addresses[1:])[:ADDRESSES_MAX]
            node = replace(node, addresses=kept, is_shoal=is_shoal)
            if node.state is NodeState.SIGHTED:
                node = replace(node, profile=profile, since=now)
            self._nodes[node_id] = node

    def mark_shoal(self, node_id: str) -> None:
        """Take note that a node has shown that it is one of ours."""
        if (node := self._nodes.get(node_id)) is not None and not node.is_shoal:
            self._nodes[node_id] = replace(node, is_shoal=True)

    def on_ping_sent(self, node_id: str, now: float) -> None:
        """Take note that a node was asked."""
        if (node := self._nodes.get(node_id)) is not None:
            self._nodes[node_id] = replace(node, last_ping=now)

    def on_pong(
        self,
        node_id: str,
        address: NodeAddress,
        profile: HardwareProfile | None,
        now: float,
    ) -> None:
        """Take note of a pong from an address; ``profile`` is what it told, if it did.

        Whoever was there before is not there any more.
        """
        if node_id == self.own_id:
            return
        if (
            before := self.find_by_address(address)
        ) is not None and before.id != node_id:
            self._set_state(before, NodeState.FAILED, now)
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
            misses=0,
            last_pong=now,
        )

    def on_missed_pong(self, node_id: str, now: float) -> None:
        """Take note that a ping was not answered; try another address next."""
        node = self._nodes.get(node_id)
        if node is None:
            return
        node = replace(node, misses=node.misses + 1)
        if node.state is not NodeState.ALIVE:
            turned = (*node.addresses[1:], node.addresses[0])
            self._nodes[node_id] = replace(node, addresses=turned)
        elif node.misses < MISSES_MAX:
            self._nodes[node_id] = node
        else:
            self._set_state(node, NodeState.SUSPECTED, now)
        self.expire(now)

    def expire(self, now: float) -> None:
        """Let nodes fail that were suspected for long, and forget those long gone."""
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
        """Say whether one more can be known; who does not count makes way for it."""
        if len(self._nodes) < NODES_MAX:
            return True
        away = [
            node for node in self._nodes.values() if node.state not in MEMBER_STATES
        ]
        if not away:
            return False
        del self._nodes[min(away, key=lambda node: node.since).id]
        return True
