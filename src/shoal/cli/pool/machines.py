"""The machines of a pool, from its status: each under all its names."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Entry: TypeAlias = Mapping[str, Any]
"""A worker, peer, order or node of the status."""

CALL = "call"  # the kind of the jobs that run functions
NOT_ADMITTED = "not admitted"
PENDING = "pending"  # the state of a machine that an operator has to approve


@dataclass(slots=True)
class MachineRow:
    """A machine of the pool; ``names`` are WIRE:NAME for each peer that it is.

    ``orders`` are the names, also of single workers, that operators have paused,
    drained or removed.  ``since`` is the Unix time since which it is connected, or is
    paused, drained or removed; None: unknown.  ``workers`` and ``peers`` are the
    entries of the status that it was found in.
    """

    title: str = ""  # what it calls itself
    names: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    running: int = 0
    engines: dict[str, int] = field(default_factory=dict)  # the slots of each
    since: float | None = None
    workers: list[Entry] = field(default_factory=list)
    peers: list[Entry] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """How many jobs it takes at a time."""
        return sum(self.engines.values())

    @property
    def name(self) -> str:
        """What people call it."""
        return self.title or ", ".join(self.ids)

    @property
    def argument(self) -> str:
        """Its name for `shoal nodes`, which takes one with a colon for WIRE:NAME."""
        named = (each for each in (self.title, *self.ids) if each and ":" not in each)
        return next(named, self.names[0])

    @property
    def remark(self) -> str:
        """What an operator has to do about it; empty if nothing."""
        if PENDING not in self.states:
            return ""
        command = f"shoal nodes approve {shlex.quote(self.argument)}"
        return f"an operator has to approve it: {command}"

    @property
    def ids(self) -> Sequence[str]:
        """Its names, without their wires."""
        return _unique(each.partition(":")[2] for each in self.names)

    @property
    def wires(self) -> Sequence[str]:
        """The wires by which it is connected."""
        return _unique(each.partition(":")[0] for each in self.names)

    @property
    def is_away(self) -> bool:
        """Whether it is not connected, and only orders name it."""
        return bool(self.orders) and not (self.workers or self.peers)

    def is_called(self, name: str) -> bool:
        """Return whether ``name`` is one of its names, without a wire."""
        return name == self.title or name in self.ids

    def as_json(self) -> dict[str, object]:
        """Return its form for ``--json``."""
        return {
            "name": self.name,
            "names": self.names,
            "states": self.states,
            "wires": self.wires,
            "models": sorted(self.models),
            "functions": sorted(self.functions),
            "running": self.running,
            "slots": self.slots,
            "since": self.since,
        }


def machines(status: Entry) -> list[MachineRow]:
    """Return the machines of a coordinator's status, in the order of their names."""
    grouping = _Grouping()
    for worker in status["workers"]:
        grouping.add_worker(worker)
    for peer in status["peers"]:
        grouping.add_peer(peer, PENDING if peer["pending"] else "active")
    for peer in status["refused"]:
        grouping.add_peer(peer, NOT_ADMITTED)
    for order in status["orders"]:
        grouping.add_order(order)
    for node in status["nodes"]:
        grouping.add_node(node)
    return grouping.machines()


class _Grouping:
    """Groups what the status lists by machine.

    Peers that have proven to hold the same private key are one machine.
    """

    def __init__(self) -> None:
        self._by_peer: dict[str, MachineRow] = {}
        self._by_key: dict[str, MachineRow] = {}

    def machines(self) -> list[MachineRow]:
        """Return the machines found."""
        found = {id(each): each for each in self._by_peer.values()}.values()
        return sorted(found, key=lambda each: (each.ids, each.names))

    def add_worker(self, worker: Entry) -> None:
        """Add a connected worker: some models or functions of a machine."""
        peer = worker["id"].partition("/")[0]
        key = worker["public_key"] if worker["proven"] else None
        machine = self._machine(peer, key or peer)
        machine.workers.append(worker)
        machine.title = machine.title or worker["peer_name"]
        machine.models |= {*worker["models"]}
        if CALL in worker["kinds"]:
            machine.functions |= {*worker["tasks"]}
        machine.running += worker["busy"]
        # All workers of an engine have the same slots.
        machine.engines[worker["engine"] or worker["id"]] = worker["slots"]
        _add_state(machine, _state(worker))
        connected_at = worker["connected_at"]
        if connected_at is not None:
            machine.since = min(machine.since or connected_at, connected_at)

    def add_peer(self, peer: Entry, state: str) -> None:
        """Add a connected peer, which may have no workers."""
        machine = self._machine(peer["id"], peer["id"])
        machine.peers.append(peer)
        machine.title = machine.title or peer["name"]
        if not machine.states or state == NOT_ADMITTED:
            _add_state(machine, state)

    def add_order(self, order: Entry) -> None:
        """Add an order about a machine, which may be away, or about a worker."""
        name = order["name"]
        peer = name.partition("/")[0]
        machine = self._machine(peer, peer)
        machine.orders.append(name)
        if name == peer:
            machine.since = order["since"]
        if not machine.states:
            _add_state(machine, order["state"])

    def add_node(self, node: Entry) -> None:
        """Add a node that a wire monitors, unless it is this coordinator."""
        name = f"{node['wire']}:{node['name'] or node['address']}"
        if node["address"] and name not in self._by_peer:
            machine = self._machine(name, name)
            machine.since = node["since"]
            _add_state(machine, node["state"])

    def _machine(self, peer: str, key: str) -> MachineRow:
        machine = self._by_peer.get(peer) or self._by_key.get(key) or MachineRow()
        self._by_peer[peer] = self._by_key[key] = machine
        if peer not in machine.names:
            machine.names.append(peer)
        return machine


def _state(worker: Entry) -> str:
    """Return whether a worker gets jobs; ``shoal status`` says why not."""
    if worker["suspension"]:
        return str(worker["suspension"])
    if worker["draining"]:
        return "leaving"
    return "unfit" if worker["unfit"] else "active"


def _add_state(machine: MachineRow, state: str) -> None:
    if state not in machine.states:
        machine.states.append(state)


def _unique(names: Iterable[str]) -> Sequence[str]:
    return sorted({*names})
