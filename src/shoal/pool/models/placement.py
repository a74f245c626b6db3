"""Which models are loaded and unloaded on which machines: a function of the demand."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

from shoal.domain.facts import DeploymentSet
from shoal.domain.work import HubModel, ModelAction, ModelOrder
from shoal.domain.worker import LoadableModel, ModelLibrary
from shoal.pool.models.machine import (
    NAMES_MAX,
    Bid,
    Claim,
    Effort,
    Machine,
    PlacementRules,
    Room,
    shown_size,
    some_of,
)

DEFAULT_RULES = PlacementRules()


@dataclass(frozen=True, slots=True)
class Demand:
    """What requests want of a model.

    ``waiting`` requests have no slot yet, and the first has ``waited`` so many seconds.
    ``busy`` is the number of requests that run or wait, for each slot of its workers.
    """

    waiting: int = 0
    waited: float = 0.0
    busy: float = 0.0


NO_DEMAND = Demand()


class Order(NamedTuple):
    """An order to a machine, as a job's work, with the reason for users."""

    work: ModelOrder
    reason: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Orders, and the reasons why models are not loaded, by model.

    ``unplaced`` models are loaded nowhere, and can be loaded nowhere until an operator,
    or the owner of a machine, changes something: requests for them fail.  ``pending``
    ones wait for what passes by itself, or have fewer replicas than asked for.
    ``again`` is when another call may return orders even if nothing has changed; inf:
    never.
    """

    orders: tuple[Order, ...]
    unplaced: Mapping[str, str]
    pending: Mapping[str, str]
    again: float


def place(
    machines: Sequence[Machine],
    demands: Mapping[str, Demand],
    deployments: Mapping[str, DeploymentSet],
    now: float,
    rules: PlacementRules = DEFAULT_RULES,
) -> Placement:
    """Decide what machines load and unload.

    The caller gives the orders to the machines, and calls it again with these in
    ``Machine.ordered``: a model that needs the memory of others is ordered only once
    they are unloaded.  Orders never need more memory than a machine has, and never
    unload a model that is busy, pinned, waited for, or was loaded a moment ago.
    """
    orders: list[Order] = []
    while True:
        call = _Call(machines, demands, deployments, now, rules)
        call.decide()
        orders += call.orders
        if not (call.orders and call.unsettled):
            break
        machines = with_orders(machines, call.orders)
    return Placement(tuple(orders), call.unplaced, call.pending, call.again)


def with_orders(
    machines: Sequence[Machine], orders: Sequence[Order]
) -> Sequence[Machine]:
    """Return machines that have been given orders."""
    given: dict[str, dict[str, ModelOrder]] = {}
    for order in orders:
        given.setdefault(order.work.machine, {})[order.work.name] = order.work
    return [
        replace(each, ordered={**each.ordered, **given[each.id]})
        if each.id in given
        else each
        for each in machines
    ]


@dataclass(frozen=True, slots=True)
class _Want:
    """A model that is to be loaded on one more machine."""

    model: str
    claim: Claim
    reason: str
    waited: float = 0.0


@dataclass(slots=True)
class _Call:
    """The state of one decision."""

    machines: Sequence[Machine]
    demands: Mapping[str, Demand]
    deployments: Mapping[str, DeploymentSet]
    now: float
    rules: PlacementRules
    orders: list[Order] = field(default_factory=list)
    unplaced: dict[str, str] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)
    again: float = inf
    unsettled: bool = False
    """Whether further orders may follow from these: a model waits for memory that was
    not promised to it, and may find other memory; or a deployment lost a replica.
    """

    _known: dict[str, LoadableModel | None] = field(default_factory=dict)
    """The models that were looked for, by name."""

    _files: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By model, the places of the machines that have its files."""

    _blocked: bool = False
    """Whether a model finds no room for now."""

    _waited: set[str] = field(default_factory=set)
    """The models that requests wait for."""

    _groups: dict[str, list[str]] = field(default_factory=dict)
    """The models of each exclusive group."""

    _rooms: dict[int, Room] = field(default_factory=dict)
    """Of the machines that were looked at, by their places."""

    _keeping: dict[str, list[Room]] = field(default_factory=dict)
    """By model, the machines that take jobs and have it loaded, or load it."""

    _replicas: dict[str, list[Room]] = field(default_factory=dict)
    """Of these, the machines that a deployment counts."""

    _promised: dict[str, list[Room]] = field(default_factory=dict)
    """By model, the machines that unload others to make room for it."""

    _placed: dict[str, set[str]] = field(default_factory=dict)
    """By model, the machines that are to have it by these orders, or once they can."""

    def decide(self) -> None:
        """Fill in the orders and reasons."""
        self._files = _files(tuple([each.library for each in self.machines]))
        self._waited = {name for name, each in self.demands.items() if each.waiting}
        tracked = self._waited | self.deployments.keys()
        for place, machine in enumerate(self.machines):
            if not machine.takes_orders:
                continue
            names = machine.loaded.keys() & tracked
            if machine.ordered:
                names |= machine.ordered.keys() & tracked
            for name in names:
                room = self._room(place)
                if room.keeps(name):
                    self._keeping.setdefault(name, []).append(room)
        self._find_replicas()
        wants = self._wants()
        if wants:
            wants.sort(key=self._precedence)
            self._reserve_promised(wants)
            for want in wants:
                self._satisfy(want)
        self._unload_idle()
        if self._blocked:
            self._await_room()

    def _room(self, place: int) -> Room:
        """Return the room of a machine, by its place."""
        if (room := self._rooms.get(place)) is None:
            machine = self.machines[place]
            room = Room(machine, self._waited, self._find, self.now, self.rules)
            self._rooms[place] = room
        return room

    def _find(self, name: str) -> LoadableModel | None:
        """Return the largest model of a name."""
        if name not in self._known:
            places = self._files.get(name, ())
            found = (self.machines[place].library.find(name) for place in places)
            known = [each for each in found if each is not None]
            largest = max(known, key=lambda each: (each.size, each.cache), default=None)
            if largest is None and (hub := self._deployed_hub(name)) is not None:
                largest = LoadableModel(name, hub.size, hub=hub)
            self._known[name] = largest
        return self._known[name]

    def _deployed_hub(self, name: str) -> HubModel | None:
        """Return where the files of a model are, as its deployment says."""
        deployment = self.deployments.get(name)
        return None if deployment is None else deployment.hub

    def _with_files(self, name: str) -> list[Room]:
        """Return the machines that have the files of a model."""
        return [self._room(place) for place in self._files.get(name, ())]

    def _find_replicas(self) -> None:
        """Find the replicas of each deployment, and protect as many as it needs."""
        for name, deployment in self.deployments.items():
            replicas = [
                room
                for room in self._keeping.get(name, ())
                if _allows(deployment, room.machine) and self._suits(deployment, room)
            ]
            self._replicas[name] = replicas
            least = _least(deployment)
            if len(replicas) > least:
                replicas = sorted(replicas, key=lambda each: _value(name, each))[:least]
            for room in replicas:
                (room.pinned if deployment.pinned else room.deployed).add(name)

    def _suits(self, deployment: DeploymentSet, room: Room) -> bool:
        """Return whether a model is loaded with what its deployment asks for."""
        loaded = room.machine.loaded.get(deployment.name)
        if loaded is None:
            return True
        context = deployment.context
        known = room.machine.library.find(deployment.name)
        if known is not None and known.context:
            context = min(context, known.context)  # no engine gives more
        return (not loaded.context or loaded.context >= context) and (
            not loaded.slots or loaded.slots >= deployment.slots
        )

    def _wants(self) -> list[_Want]:
        wants = []
        for name, demand in self.demands.items():
            if demand.waiting and name not in self._keeping:
                deployment = self.deployments.get(name)
                pinned = deployment is not None and deployment.pinned
                if pinned and self._missing(name):
                    continue
                wait = "requests wait" if demand.waiting > 1 else "request waits"
                reason = f"{demand.waiting} {wait} for it"
                wants.append(_Want(name, Claim.WAITED, reason, demand.waited))
        waited = {want.model for want in wants}
        for name, deployment in self.deployments.items():
            missing = self._missing(name)
            has = f"{len(self._replicas[name])} of {_least(deployment)} replicas"
            claim = Claim.PINNED if deployment.pinned else Claim.DEPLOYED
            want = _Want(name, claim, f"deployed: {has}")
            wants += [want] * (missing - (name in waited))
            if not missing and (reason := self._growth(name, deployment)):
                wants.append(_Want(name, Claim.GROWTH, reason))
        return wants

    def _missing(self, name: str) -> int:
        return max(0, _least(self.deployments[name]) - len(self._replicas[name]))

    def _growth(self, name: str, deployment: DeploymentSet) -> str:
        """Return why a deployment grows now; empty: it does not."""
        replicas = self._replicas[name]
        if not 0 < len(replicas) < deployment.most:
            return ""
        demand, rules = self.demands.get(name, NO_DEMAND), self.rules
        if demand.waiting and demand.waited < rules.growth_wait:
            self._call_again(self.now + rules.growth_wait - demand.waited)
        if not (reason := self._load_reason(name)):
            return ""
        if any(name in each.loading for each in replicas):
            return ""
        newest = max(each.machine.loaded[name].since for each in replicas)
        if self.now - newest < rules.settles:
            self._call_again(newest + rules.settles)
            return ""
        return f"{reason}, and it has {len(replicas)} of at most {deployment.most}"

    def _load_reason(self, name: str) -> str:
        """Return how a model's replicas have too much to do; empty: they do not."""
        demand = self.demands.get(name, NO_DEMAND)
        if demand.waiting and demand.waited >= self.rules.growth_wait:
            return f"requests wait {demand.waited:.0f} s for its replicas"
        if demand.busy >= self.rules.growth_busy:
            return f"{demand.busy:.1f} requests run or wait for each of its slots"
        return ""

    def _reserve_promised(self, wants: Sequence[_Want]) -> None:
        """Keep memory that is being freed for the model that it is freed for."""
        makers: dict[str, dict[str, Room]] = {}
        for place, maker in enumerate(self.machines):
            for order in maker.ordered.values() if maker.ordered else ():
                if order.room_for:
                    room = self._room(place)
                    makers.setdefault(order.room_for, {})[maker.id] = room
        for want in wants if makers else ():
            name = want.model
            for machine, room in makers.get(name, {}).items():
                if not self._may_have(room, name):
                    continue
                need = self._need(room, name)
                if need > room.free + room.coming - room.reserved:
                    self.unsettled = True  # other orders may free more
                    continue
                room.reserved += need
                self._promised.setdefault(name, []).append(room)
                self._placed.setdefault(name, set()).add(machine)
                break

    def _precedence(self, want: _Want) -> tuple[int, float, int, str]:
        """Order by claim, then by wait; of deployments, what fits fewest machines."""
        if want.claim not in (Claim.PINNED, Claim.DEPLOYED):
            return want.claim, -want.waited, 0, want.model
        known = self._find(want.model)
        possible = len(self._possible(want.model))
        return want.claim, possible, -known.size if known else 0, want.model

    def _satisfy(self, want: _Want) -> None:
        """Order what brings one more copy of a model onto a machine, or say why not."""
        name = want.model
        if promised := self._promised.get(name):
            room = promised.pop()
            room.reserved -= self._need(room, name)
        elif (best := self._best(want)) is not None:
            bid, room = best
            self._placed.setdefault(name, set()).add(room.machine.id)
            for victim in bid.victims:
                reason = f"makes room for {name}: {want.reason}"
                self._unload(room, victim, reason, name)
            if bid.effort in (Effort.WAIT, Effort.EVICT_DEPLOYED):
                self.unsettled = True
        else:
            self._explain(want)
            return
        need = self._need(room, name)
        waits = name in room.machine.loaded or room.has_any(self._rivals(name))
        if need <= room.free and not waits:
            self._load(want, room, need)
        else:
            room.reserved += need
            self.pending[name] = _unloads(room)

    def _best(self, want: _Want) -> tuple[Bid, Room] | None:
        """Return the machine to load a model on, if possible one with its files."""
        rooms = self._with_files(want.model)
        if (best := self._best_of(want, rooms)) is not None:
            return best
        if self._find(want.model) is None:
            return None
        return self._best_of(want, self._fetching(want.model))

    def _best_of(self, want: _Want, rooms: Iterable[Room]) -> tuple[Bid, Room] | None:
        name = want.model
        rivals = self._rivals(name)
        bids = [
            (bid, room)
            for room in rooms
            if self._may_have(room, name)
            and (bid := room.bid(name, self._need(room, name), want.claim, rivals))
            is not None
        ]
        return min(bids, key=lambda each: each[0], default=None)

    def _rivals(self, name: str) -> Collection[str]:
        """Return the models that exclude one on a machine, by their deployments."""
        deployment = self.deployments.get(name)
        if deployment is None or not deployment.exclusive_group:
            return ()
        if not self._groups:
            for each in self.deployments.values():
                self._groups.setdefault(each.exclusive_group, []).append(each.name)
        group = self._groups[deployment.exclusive_group]
        return [each for each in group if each != name]

    def _fetching(self, name: str) -> list[Room]:
        """Return the machines that would first copy the files of a model."""
        having = self._files.get(name, ())
        return [
            self._room(place)
            for place, machine in enumerate(self.machines)
            if machine.library.fetches and place not in having
        ]

    def _possible(self, name: str) -> list[Room]:
        """Return the machines that could have a model, if there were room."""
        rooms = self._with_files(name)
        if self._find(name) is not None:
            rooms += self._fetching(name)
        deployment = self.deployments.get(name)
        if deployment is not None and deployment.on:
            rooms = [each for each in rooms if _allows(deployment, each.machine)]
        return rooms

    def _may_have(self, room: Room, name: str) -> bool:
        """Return whether a machine may be asked to load one more copy of a model."""
        machine = room.machine
        if not machine.takes_orders or machine.id in self._placed.get(name, ()):
            return False
        if machine.failed and _failed_until(machine, name) > self.now:
            return False
        deployment = self.deployments.get(name)
        if deployment is None:
            return not room.keeps(name)
        if not _allows(deployment, machine):
            return False
        return not room.keeps(name) or not self._suits(deployment, room)

    def _need(self, room: Room, name: str) -> int:
        context, slots = self._settings(name)
        return room.need(name, context, slots)

    def _settings(self, name: str) -> tuple[int, int]:
        deployment = self.deployments.get(name)
        return (deployment.context, deployment.slots) if deployment else (0, 0)

    def _load(self, want: _Want, room: Room, need: int) -> None:
        context, slots = self._settings(want.model)
        room.load(want.model, need)
        hub = None
        if room.machine.library.find(want.model) is None:
            known = self._find(want.model)
            found = None if known is None else known.hub
            hub = self._deployed_hub(want.model) or found
        self._order(
            *(room, want.model, ModelAction.LOAD, want.reason, context, slots),
            hub=hub,
        )

    def _unload(self, room: Room, name: str, reason: str, room_for: str = "") -> None:
        room.unload(name)
        self._order(room, name, ModelAction.UNLOAD, reason, room_for=room_for)

    def _order(
        self,
        room: Room,
        name: str,
        action: ModelAction,
        reason: str,
        context: int = 0,
        slots: int = 0,
        room_for: str = "",
        hub: HubModel | None = None,
    ) -> None:
        work = ModelOrder(
            *(action, name, room.machine.id, context, slots, room_for),
            hub=hub,
        )
        self.orders.append(Order(work, reason))

    def _unload_idle(self) -> None:
        """Unload models that were not used for long."""
        idle: list[tuple[float, str, str, Room]] = []
        rules, deployments = self.rules, self.deployments
        for place, machine in enumerate(self.machines):
            if not machine.takes_orders:
                continue
            for name, loaded in machine.loaded.items():
                limit = rules.idle
                if (known := machine.library.find(name)) is not None and known.stays:
                    limit = inf
                if name in deployments:
                    limit = self._idle_limit(self._room(place), name)
                due = max(loaded.used + limit, loaded.since + max(limit, rules.stays))
                if due > self.now:
                    if due < self.again:
                        self.again = due
                elif (room := self._room(place)).may_unload(name, loaded):
                    idle.append((loaded.last_used, machine.id, name, room))
        for last_used, _, name, room in sorted(idle, key=lambda each: each[:3]):
            if self._can_spare(name):
                minutes = (self.now - last_used) / 60
                self._unload(room, name, f"unused for {minutes:.0f} minutes")

    def _idle_limit(self, room: Room, name: str) -> float:
        """Return after how long a model of a deployment is unloaded."""
        deployment = self.deployments[name]
        if not _allows(deployment, room.machine):
            return self.rules.idle
        if deployment.idle is None or name in room.pinned or name in room.deployed:
            return inf
        return deployment.idle

    def _can_spare(self, name: str) -> bool:
        """Return whether the other replicas of a model can do what this one did."""
        if self._load_reason(name):
            return False
        busy = self.demands.get(name, NO_DEMAND).busy
        if not busy:
            return True
        loaded = [
            self._room(place)
            for place, machine in enumerate(self.machines)
            if name in machine.loaded and machine.takes_orders
        ]
        others = sum(name not in each.unloading for each in loaded) - 1
        # ``busy`` is of the slots of all that are loaded.
        return busy * len(loaded) <= self.rules.shrink_busy * others

    def _explain(self, want: _Want) -> None:
        """Say why no machine can load a model, or not yet."""
        name = want.model
        rooms = self._possible(name)
        if not rooms:
            may = " that may have it" if self._files.get(name) else ""
            self._refuse(want, f"no machine{may} has its files")
            return
        having = {room.machine.id for room in self._replicas.get(name, ())}
        having |= self._placed.get(name, set())
        rooms = [each for each in rooms if each.machine.id not in having]
        if not rooms:
            self.pending[name] = f"{want.reason}: all machines that may have it do"
            return
        self._blocked = True
        passing: list[str] = []
        lasting: list[str] = []
        needs: list[int] = []
        for room in rooms:
            need = self._need(room, name)
            if room.machine.library.memory:
                needs.append(need)
            passes, why = room.rejection(name, need, self._rivals(name))
            (passing if passes else lasting).append(why)
            if len(passing) == NAMES_MAX:
                break
        size = f"needs {shown_size(min(needs))}: " if needs else ""
        text = f"{size}{some_of(passing or lasting, '; ')}"
        if passing:
            self.pending[name] = text
        else:
            self._refuse(want, text)

    def _refuse(self, want: _Want, why: str) -> None:
        """Note that a model cannot be loaded, or not so often."""
        name = want.model
        placed = name in self._keeping or name in self._placed
        (self.pending if placed else self.unplaced)[name] = why

    def _await_room(self) -> None:
        """Note when models may be evicted, or loaded where that failed before."""
        stays, quiet = self.rules.stays, self.rules.quiet
        for machine in self.machines:
            for loaded in machine.loaded.values():
                self._call_again(loaded.since + stays)
                self._call_again(loaded.last_used + quiet)
            for until, _ in machine.failed.values():
                self._call_again(until)

    def _call_again(self, at: float) -> None:
        if self.now < at < self.again:
            self.again = at


# Machines change more often than their libraries.
@lru_cache(8)
def _files(libraries: tuple[ModelLibrary, ...]) -> Mapping[str, Sequence[int]]:
    """Return the places of the libraries that have each model."""
    having: dict[str, list[int]] = {}
    for place, library in enumerate(libraries):
        for name in {each.name for each in library.models}:
            having.setdefault(name, []).append(place)
    return having


def _least(deployment: DeploymentSet) -> int:
    """Return how many replicas a deployment always has."""
    return max(deployment.replicas, 1 if deployment.most else 0)


def _allows(deployment: DeploymentSet, machine: Machine) -> bool:
    # The others of a group are those that the deployment names.
    return (
        not deployment.on
        or machine.is_one_of(deployment.on)
        or machine.runs_with_others(deployment.name)
    )


def _value(name: str, room: Room) -> tuple[bool, float, str]:
    """Order replicas, the one to keep first: those in use, then the last used."""
    loaded = room.machine.loaded.get(name)
    if loaded is None:
        return True, 0.0, room.machine.id
    return not loaded.busy, -loaded.last_used, room.machine.id


def _failed_until(machine: Machine, name: str) -> float:
    return machine.failed[name][0] if name in machine.failed else -inf


def _unloads(room: Room) -> str:
    shown = some_of(sorted(room.unloading))
    return f"waits until {room.machine.shown_name} has unloaded {shown}"
