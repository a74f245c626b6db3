"""The nodes of a fleet: where each is, what it is made of, and whether it is there.

Source: the MacFleet document, "Membership".  Real nodes never look again after one that
has failed; ours do, and so take part in its return.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from shoal.protocols.macfleet.wire.hardware import UNKNOWN_PROFILE, Profile

MISSES_MAX = 3  # pings without a pong after which a node is suspected
FAILED_AFTER = 10.0  # seconds without a pong after which a suspected node has failed
FORGOTTEN_AFTER = 3600.0  # seconds since it failed, or since it was last seen
NODES_MAX = 1024  # known at a time; anybody can announce more
ADDRESSES_MAX = 8  # of one node


@dataclass(frozen=True, slots=True)
class Address:
    """Where a node's heartbeats are answered."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class State(Enum):
    """Whether a node is there."""

    SIGHTED = "sighted"  # announced on the network, where anybody can say anything
    ALIVE = "alive"
    SUSPECTED = "suspected"
    FAILED = "failed"


COUNTED = frozenset({State.ALIVE, State.SUSPECTED})
"""The states of nodes that belong to the fleet for now."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node as it is known now; times are monotonic seconds.

    ``addresses`` begins with the one that is asked next.  ``ours`` says that it claims
    to be one of ours.
    ``since`` is when its state came about, and ``asked`` when it was last asked.
    """

    id: str
    addresses: tuple[Address, ...]
    state: State
    since: float
    profile: Profile = UNKNOWN_PROFILE
    ours: bool = False
    misses: int = 0
    answered: float = float("-inf")
    asked: float = float("-inf")

    @property
    def address(self) -> Address:
        """Where it is, as far as is known."""
        return self.addresses[0]

    @property
    def port(self) -> int:
        """What was told of where its transport listens; 0: nothing."""
        return self.profile.data_port

    @property
    def data_port(self) -> int:
        """Where its transport listens: if nothing was told, next to the heartbeat's."""
        return self.port or self.address.port + 1


class Fleet:
    """All nodes but ourselves, by id; plain data, changed by what is found out."""

    def __init__(self, own_id: str, profile: Callable[[], Profile]) -> None:
        self.own_id = own_id
        self.profile = profile
        self._nodes: dict[str, Node] = {}

    @property
    def nodes(self) -> Sequence[Node]:
        """Return all that are known, the one that was met first before others."""
        return tuple(self._nodes.values())

    def get(self, node_id: str) -> Node | None:
        """Return a node, if it is known."""
        return self._nodes.get(node_id)

    def failed(self, node_id: str) -> bool:
        """Say whether a node is known to be there no more."""
        node = self._nodes.get(node_id)
        return node is not None and node.state is State.FAILED

    def counted(self) -> Sequence[Node]:
        """Return the nodes that belong to the fleet for now."""
        return [node for node in self._nodes.values() if node.state in COUNTED]

    def at(self, address: Address) -> Node | None:
        """Return the node that is there, if one is and answers."""
        for node in self._nodes.values():
            if node.address == address and node.state in COUNTED:
                return node
        return None

    # What is found out.

    def sighted(
        self,
        node_id: str,
        addresses: Sequence[Address],
        profile: Profile,
        now: float,
        *,
        ours: bool = False,
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
                self._nodes[node_id] = Node(
                    node_id, kept, State.SIGHTED, now, profile, ours=ours
                )
        elif node.state not in COUNTED:
            new = [each for each in addresses if each not in node.addresses]
            kept = (*node.addresses[:1], *new, *node.addresses[1:])[:ADDRESSES_MAX]
            node = replace(node, addresses=kept, ours=ours)
            if node.state is State.SIGHTED:
                node = replace(node, profile=profile, since=now)
            self._nodes[node_id] = node

    def is_ours(self, node_id: str) -> None:
        """Take note that a node has shown that it is one of ours."""
        if (node := self._nodes.get(node_id)) is not None and not node.ours:
            self._nodes[node_id] = replace(node, ours=True)

    def asked(self, node_id: str, now: float) -> None:
        """Take note that a node was asked."""
        if (node := self._nodes.get(node_id)) is not None:
            self._nodes[node_id] = replace(node, asked=now)

    def answered(
        self, node_id: str, address: Address, profile: Profile | None, now: float
    ) -> None:
        """Take note of a pong from an address; ``profile`` is what it told, if it did.

        Whoever was there before is not there any more.
        """
        if node_id == self.own_id:
            return
        if (before := self.at(address)) is not None and before.id != node_id:
            self._change(before, State.FAILED, now)
        node = self._nodes.get(node_id)
        if node is None:
            if not self._has_room(now):
                return
            node = Node(node_id, (address,), State.ALIVE, now)
        others = tuple(each for each in node.addresses if each != address)
        self._nodes[node_id] = replace(
            node,
            addresses=(address, *others)[:ADDRESSES_MAX],
            state=State.ALIVE,
            since=node.since if node.state is State.ALIVE else now,
            profile=profile or node.profile,
            misses=0,
            answered=now,
        )

    def missed(self, node_id: str, now: float) -> None:
        """Take note that a ping was not answered; try another address next."""
        node = self._nodes.get(node_id)
        if node is None:
            return
        node = replace(node, misses=node.misses + 1)
        if node.state is not State.ALIVE:
            turned = (*node.addresses[1:], node.addresses[0])
            self._nodes[node_id] = replace(node, addresses=turned)
        elif node.misses < MISSES_MAX:
            self._nodes[node_id] = node
        else:
            self._change(node, State.SUSPECTED, now)
        self.pass_time(now)

    def pass_time(self, now: float) -> None:
        """Let nodes fail that were suspected for long, and forget those long gone."""
        for node in [*self._nodes.values()]:
            if node.state is State.SUSPECTED and now - node.answered > FAILED_AFTER:
                self._change(node, State.FAILED, now)
            elif node.state not in COUNTED and now - node.since > FORGOTTEN_AFTER:
                del self._nodes[node.id]

    def _change(self, node: Node, state: State, now: float) -> None:
        self._nodes[node.id] = replace(node, state=state, since=now)

    def _has_room(self, now: float) -> bool:
        """Say whether one more can be known; who does not count makes way for it."""
        if len(self._nodes) < NODES_MAX:
            return True
        away = [node for node in self._nodes.values() if node.state not in COUNTED]
        if not away:
            return False
        del self._nodes[min(away, key=lambda node: node.since).id]
        return True
