"""Groups of machines that run a model together, which fits on none of them.

A group is formed in two steps: the machines that lend memory are ordered at once to
hold their parts, and the one that runs the model is ordered to load it when all of them
do.  What has been done is read from what the machines report, so it survives a restart
of the coordinator.  If one of them cannot, is lost or leaves, the others are ordered to
free what they hold, and another group is formed.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as with_fields

from shoal.domain.facts import DeploymentSet
from shoal.domain.work import ModelAction, ModelOrder, Shard
from shoal.domain.worker import LentShard, LoadableModel, MemoryLoan
from shoal.pool.models.machine import Claim, Effort, Machine, Room, shown_size, some_of
from shoal.pool.models.placement import DEFAULT_RULES, Order, Placement, with_orders
from shoal.pool.models.split import ROUND_TRIP_MAX, Holder, ModelSplit, split_model

MILLISECONDS = 1000  # a second


def form_groups(
    machines: Sequence[Machine],
    placement: Placement,
    deployments: Mapping[str, DeploymentSet],
    now: float,
) -> Placement:
    """Return a placement that splits models over machines, where it had no place.

    ``placement`` is that of single machines.  A group that forms is ``pending``; a
    model that cannot be split either is ``unplaced`` for both reasons.
    """
    if not any(each.library.loan for each in machines):
        return placement
    call = _Groups(with_orders(machines, placement.orders), deployments, now)
    for name, why in sorted(placement.unplaced.items()):
        call.satisfy(name, why)
    call.free_shards()
    return replace(
        placement,
        orders=(*placement.orders, *call.orders),
        unplaced=call.unplaced,
        pending={**placement.pending, **call.pending},
    )


def plan_group(
    machines: Sequence[Machine], name: str, on: Collection[str], now: float
) -> ModelSplit | str:
    """Return how a model would be split over machines now, or why it would not be.

    ``on`` names the machines that may have a part; empty: any.
    """
    groups = _Groups(machines, {}, now)
    best = groups.best(name, groups.allowed(name, on))
    return best if isinstance(best, str) else best[1]


def fits_alone(machines: Sequence[Machine], name: str, now: float) -> bool:
    """Return whether a machine with a model's file has the memory to run it alone."""
    return any(
        room.need(name, 0, 0) <= room.capacity
        for room in (_room(each, now) for each in machines)
        if room.machine.library.find(name) is not None
    )


@dataclass(slots=True)
class _Groups:
    """The groups as machines report them, and the orders of one decision."""

    machines: Sequence[Machine]
    deployments: Mapping[str, DeploymentSet]
    now: float
    orders: list[Order] = field(default_factory=list)
    unplaced: dict[str, str] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)
    _kept: set[str] = field(default_factory=set)
    """The groups that run, or are being formed."""

    _forming: set[str] = field(default_factory=set)
    """The models whose parts are not all held yet."""

    _taken: Counter[str] = field(default_factory=Counter)
    """The bytes that machines are about to lend, by their orders."""

    _reserved: dict[str, Shard] = field(default_factory=dict)
    """The runners' parts of the groups that are being formed, by group."""

    def __post_init__(self) -> None:
        loads: set[str] = set()
        for machine in self.machines:
            loan = machine.library.loan
            loads.update(each.group for each in (loan.groups if loan else ()))
            for order in machine.ordered.values():
                if order.action is ModelAction.LOAD:
                    loads.add(order.group)
                elif order.action is ModelAction.LEND:
                    self._lend(order)
        for _, shard in self._shards():
            self._reserved[shard.order.group] = shard.order.shards[-1]
        for group in loads:
            self._reserved.pop(group, None)  # the runner counts it
        self._kept |= loads

    def _lend(self, order: ModelOrder) -> None:
        """Count an order to lend."""
        self._kept.add(order.group)
        self._taken[order.machine] += order.own_memory
        self._reserved[order.group] = order.shards[-1]

    def satisfy(self, name: str, why: str) -> None:
        """Take the next step to a group for a model, or say why there is none."""
        if lending := self._lending(name):
            self._forming.add(name)
            self.pending[name] = f"is being split: waits for {', '.join(lending)}"
        elif (ready := self._ready(name)) is not None:
            self._kept.add(ready.group)
            shown = ", ".join(self._shown(ready.shards))
            self._order(ready, f"split over {shown}")
            self.pending[name] = f"is split over {shown}"
        elif held := self._holding(name):
            self.pending[name] = f"waits until {', '.join(held)} freed its parts"
        else:
            self._form(name, why)

    def free_shards(self) -> None:
        """Order machines to free what they hold for groups that have ended."""
        for machine, shard in self._shards():
            order = shard.order
            if (
                order.group in self._kept
                or shard.used
                or order.name in self._forming
                or order.name in machine.ordered
                or self._is_expected(order)
            ):
                continue
            freed = with_fields(order, action=ModelAction.UNLOAD)
            self._order(freed, f"its group for {order.name} is no more")

    def _holding(self, name: str) -> Sequence[str]:
        """Return the machines that hold a part of a model for a group that has ended.

        Another group is formed when they have freed it: they may be in that too.
        """
        return [machine.shown_name for machine, _ in self._shards(name)]

    def _lending(self, name: str) -> Sequence[str]:
        """Return the machines that are about to hold a part of a model."""
        held = {machine.id for machine, _ in self._shards(name)}
        found = []
        for machine in self.machines:
            order = machine.ordered.get(name)
            lends = order is not None and order.action is ModelAction.LEND
            # What it holds is known a moment after the order has ended.
            if lends or (machine.id not in held and self._has_just_done(machine, name)):
                found.append(machine.shown_name)
        return found

    def _ready(self, name: str) -> ModelOrder | None:
        """Return the order to load a model whose shards are all there, or None."""
        groups: dict[str, dict[str, LentShard]] = {}
        for machine, shard in self._shards(name):
            if shard.order.machine == machine.id:
                groups.setdefault(shard.order.group, {})[machine.id] = shard
        for group, found in sorted(groups.items()):
            order = next(iter(found.values())).order
            *lent, own = order.shards
            runner = self._machine(own.machine)
            if (
                group in self._kept
                or runner is None
                or not _can_run(runner, name)
                or runner.failed.get(name, (0.0, ""))[0] > self.now
                or _room(runner, self.now).has_any(self._rivals(name))
                or any(each.machine not in found for each in lent)
            ):
                continue
            placed = [_located(each, found[each.machine]) for each in lent]
            return with_fields(
                order,
                action=ModelAction.LOAD,
                machine=own.machine,
                shards=(*placed, own),
            )
        return None

    def _form(self, name: str, why: str) -> None:
        """Order machines to lend what a model needs, or say why it is not split."""
        deployment = self.deployments.get(name)
        allowed = self.allowed(name, deployment.on if deployment else ())
        if not any(_can_run(each, name) for each in allowed) or not any(
            each.library.loan.lends for each in allowed if each.library.loan
        ):
            self.unplaced[name] = why
            return
        best = self.best(name, allowed)
        if isinstance(best, str):
            # What is missing may come back: a lender that was lost, or memory in use.
            self.pending[name] = f"fits on no machine ({why}), and {best}"
        else:
            self._begin(name, *best)

    def allowed(self, name: str, on: Collection[str]) -> Sequence[Machine]:
        """Return the machines that a model may be split over; empty ``on``: all.

        If none of the machines that ``on`` names could run it, they lend to others.
        """
        named = [each for each in self.machines if not on or each.is_one_of(on)]
        if any(_can_run(each, name) for each in named):
            return named
        return [*named, *(each for each in self.machines if _can_run(each, name))]

    def best(
        self, name: str, allowed: Sequence[Machine]
    ) -> tuple[Machine, ModelSplit] | str:
        """Return the machine that runs a model best, and its split, or why none does.

        Those that need not unload others are best, then the fewest machines, then those
        that are quickest for a token.
        """
        reasons: list[str] = []
        able: list[Machine] = []
        for machine in allowed:
            until, failure = machine.failed.get(name, (0.0, ""))
            if _can_run(machine, name) and until <= self.now:
                able.append(machine)
            elif _can_run(machine, name):
                reasons.append(f"{machine.shown_name} failed to run it ({failure})")
        for evicts in (False, True):
            tried = [(each, self._split(name, each, allowed, evicts)) for each in able]
            found = [
                (runner, split)
                for runner, split in tried
                if isinstance(split, ModelSplit)
            ]
            if found:
                return min(found, key=_preference)
        reasons += [split for _, split in tried if isinstance(split, str)]
        reasons += [
            f"{each.shown_name} lends nothing: {why}"
            for each in allowed
            if not _can_run(each, name) and (why := _refusal(each, name))
        ]
        return some_of(reasons, "; ") or "no machine with its file splits models"

    def _split(
        self, name: str, runner: Machine, allowed: Sequence[Machine], evicts: bool
    ) -> ModelSplit | str:
        """Return how a model is split with a runner; ``evicts``: it unloads others."""
        own, model, room = (
            _loan(runner),
            runner.library.find(name),
            _room(runner, self.now),
        )
        assert model is not None, "only those"
        evictable = sum(
            room.taken(other, each)
            for other, each in runner.loaded.items()
            if evicts and room.may_unload(other, each)
        )
        lenders = [
            Holder(
                *(each.id, each.shown_name, free, each.library.bandwidth),
                *_way(own, each.id, loan),
            )
            for each in allowed
            if (loan := each.library.loan) is not None
            and loan.protocol == own.protocol
            and (not loan.runners or own.key in loan.runners)
            and (free := loan.free - self._taken[each.id]) > 0
            and each.takes_orders
            and name not in each.failed
            and name not in each.ordered
        ]
        reserved = sum(
            each.memory for each in self._reserved.values() if each.machine == runner.id
        )
        memory = room.free + room.coming + evictable - reserved
        place = Holder(
            *(runner.id, runner.shown_name, max(0, memory)),
            runner.library.bandwidth,
            holds_last=own.holds_last,
        )
        return split_model(model, *self._settings(name, runner), place, lenders)

    def _begin(self, name: str, runner: Machine, split: ModelSplit) -> None:
        """Make room for the runner's part, or order the others to lend theirs."""
        bid = _room(runner, self.now).bid(
            name, split.shards[-1].memory, Claim.WAITED, self._rivals(name)
        )
        if bid is None or bid.effort is not Effort.NONE:
            for victim in bid.victims if bid else ():
                unload = ModelAction.UNLOAD
                work = ModelOrder(unload, victim, runner.id, room_for=name)
                self._order(work, f"makes room for a part of {name}")
            self.machines = with_orders(self.machines, self.orders)
            self.pending[name] = f"waits until {runner.shown_name} has room for a part"
            return
        model = runner.library.find(name)
        assert model is not None, "it runs the model"
        lent = ModelOrder(
            *(ModelAction.LEND, name, runner.id, *self._settings(name, runner)),
            group=f"{name}@{int(self.now * MILLISECONDS)}",
            shards=split.shards,
            runner=_loan(runner).key,
            batch=split.batch,
            has_copies=self._has_copies(model, runner),
            digest=model.digest,
        )
        shown = ", ".join(self._shown(split.shards))
        for shard in split.shards[:-1]:
            order = with_fields(lent, machine=shard.machine)
            self._lend(order)
            self._order(order, f"fits on no machine: split over {shown}")
        self.pending[name] = f"is being split over {shown}"

    def _has_copies(self, own: LoadableModel, runner: Machine) -> bool:
        """Return whether others than the runner have a model's file, as far as known.

        If only the runner has it, its engine sends the same bytes without hashing them.
        """
        return any(
            copy.size == own.size
            and ("" in (copy.digest, own.digest) or copy.digest == own.digest)
            for each in self.machines
            if each is not runner and (copy := each.library.find(own.name)) is not None
        )

    def _rivals(self, name: str) -> Sequence[str]:
        """Return the models that exclude one on the machine that runs it."""
        own = self.deployments.get(name)
        if own is None or not own.exclusive_group:
            return ()
        return [
            each.name
            for each in self.deployments.values()
            if each.exclusive_group == own.exclusive_group and each.name != name
        ]

    def _settings(self, name: str, runner: Machine) -> tuple[int, int]:
        """Return the context and slots that a model gets there."""
        deployment, library = self.deployments.get(name), runner.library
        model = library.find(name)
        context = (deployment.context if deployment else 0) or library.context
        if model is not None and model.context:
            context = min(context, model.context)
        return context, (deployment.slots if deployment else 0) or library.slots

    def _is_expected(self, order: ModelOrder) -> bool:
        """Return whether the machine that runs a model says so in a moment."""
        runner = self._machine(order.shards[-1].machine)
        return runner is not None and self._has_just_done(runner, order.name)

    def _has_just_done(self, machine: Machine, name: str) -> bool:
        """Return whether a machine carried out an order about a model a moment ago."""
        until, why = machine.failed.get(name, (0.0, ""))
        return machine.library.loan is not None and until > self.now and not why

    def _shards(self, name: str = "") -> Sequence[tuple[Machine, LentShard]]:
        """Return the parts that machines hold: of a model, or all."""
        return [
            (machine, shard)
            for machine in self.machines
            if (loan := machine.library.loan) is not None
            for shard in loan.shards
            if not name or shard.order.name == name
        ]

    def _machine(self, machine_id: str) -> Machine | None:
        return next((each for each in self.machines if each.id == machine_id), None)

    def _shown(self, shards: Sequence[Shard]) -> Sequence[str]:
        names = {each.id: each.shown_name for each in self.machines}
        return [
            f"{names.get(each.machine, each.machine)} ({shown_size(each.memory)})"
            for each in shards
        ]

    def _order(self, work: ModelOrder, reason: str) -> None:
        self.orders.append(Order(work, reason))


def _room(machine: Machine, now: float) -> Room:
    return Room(machine, (), machine.library.find, now, DEFAULT_RULES)


def describe_loan(loan: MemoryLoan, name_of: Callable[[str], str]) -> str:
    """Describe what a machine lends, and which models it runs with which others.

    ``name_of`` returns what a machine is called, by the id of its library's worker.
    """
    parts = []
    for group in loan.groups:
        others = [
            f"{name_of(each.machine)} ({each.layers} layers)"
            for each in group.shards[:-1]
        ]
        own = group.shards[-1].layers
        parts.append(f"runs {group.name} with {', '.join(others)}, {own} layers here")
    if loan.unfit:
        parts.append(f"lends nothing now: {loan.unfit}")
    elif loan.memory:
        lent = f"lends {shown_size(loan.memory)}"
        held = [
            f"{shown_size(each.order.own_memory)} to {each.order.name} on "
            f"{name_of(each.order.shards[-1].machine)}"
            for each in loan.shards
        ]
        parts.append(f"{lent}: {', '.join(held)}" if held else lent)
    return "; ".join(parts)


def _preference(found: tuple[Machine, ModelSplit]) -> tuple[int, float, str]:
    runner, split = found
    return len(split.shards), split.seconds, runner.id


def _refusal(machine: Machine, name: str) -> str:
    """Return why a machine holds no part of a model now; empty: it lends, or never."""
    loan = machine.library.loan
    return machine.failed.get(name, (0.0, ""))[1] or (loan.unfit if loan else "")


def _can_run(machine: Machine, name: str) -> bool:
    """Return whether a machine could run a model with others."""
    model = machine.library.find(name)
    return (
        machine.library.loan is not None
        and machine.library.memory > 0
        and model is not None
        and model.layers is not None
        and machine.takes_orders
        and name not in machine.ordered
    )


def _loan(machine: Machine) -> MemoryLoan:
    assert machine.library.loan is not None, "only those"
    return machine.library.loan


def _way(runner: MemoryLoan, machine: str, lender: MemoryLoan) -> tuple[float, float]:
    """Return the round trip from a machine that runs a model to a lender, and the rate.

    Before they are measured, the way over the coordinator is the upper limit of the
    first, in seconds; for that alone, no machine is left out.
    """
    for each in runner.links:
        if each.machine == machine:
            return each.round_trip, each.rate
    return min(ROUND_TRIP_MAX, runner.round_trip + lender.round_trip), 0.0


def _located(shard: Shard, lent: LentShard) -> Shard:
    return with_fields(
        shard, hosts=lent.hosts, port=lent.port, fingerprint=lent.fingerprint
    )
