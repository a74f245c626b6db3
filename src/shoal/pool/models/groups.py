"""Groups of machines that run a model together, which fits on none of them.

A group is formed in two steps: the machines that lend memory are told at once what they
are to hold, and the one that runs the model is told to load it when all of them hold
it.  What has been done is read from what the machines report, so it survives a restart
of the coordinator.  If one of them cannot, is lost or leaves, the others are told to
free what they hold, and another group is formed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as with_fields

from shoal.domain.facts import DeploymentSet
from shoal.domain.work import ModelAction, ModelOrder, Shard
from shoal.domain.worker import LentShard, MemoryLoan
from shoal.pool.models.machine import GB, Claim, Effort, Machine, Room, some_of
from shoal.pool.models.placement import DEFAULT_RULES, Order, Placement, with_orders
from shoal.pool.models.split import Holder, Split, split_model

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
    told = with_orders(machines, placement.orders)
    call = _Groups(told, placement, deployments, now)
    for name, why in sorted(placement.unplaced.items()):
        call.satisfy(name, why)
    call.free_shards()
    return replace(
        placement,
        orders=(*placement.orders, *call.orders),
        unplaced=call.unplaced,
        pending={**placement.pending, **call.pending},
    )


@dataclass(slots=True)
class _Groups:
    """The groups as machines report them, and the orders of one decision."""

    machines: Sequence[Machine]
    placement: Placement
    deployments: Mapping[str, DeploymentSet]
    now: float
    orders: list[Order] = field(default_factory=list)
    unplaced: dict[str, str] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)
    _kept: set[str] = field(default_factory=set)
    """The groups that run, or are being formed."""

    def __post_init__(self) -> None:
        for machine in self.machines:
            loan = machine.library.loan
            self._kept.update(each.group for each in (loan.groups if loan else ()))
            self._kept.update(
                each.group
                for each in machine.ordered.values()
                if each.action is not ModelAction.UNLOAD
            )

    def satisfy(self, name: str, why: str) -> None:
        """Take the next step to a group for a model, or say why there is none."""
        if busy := self._in_progress(name):
            self.pending[name] = busy
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
        """Tell machines to free what they hold for groups that are no more."""
        for machine, shard in self._shards():
            order = shard.order
            if (
                order.group in self._kept
                or shard.used
                or order.name in machine.ordered
                or self._is_expected(order)
            ):
                continue
            freed = with_fields(order, action=ModelAction.UNLOAD)
            self._order(freed, f"its group for {order.name} is no more")

    def _holding(self, name: str) -> Sequence[str]:
        """Return the machines that hold a part of a model for a group that is no more.

        Another group is formed when they have freed it: they may be in that too.
        """
        return [
            machine.shown_name
            for machine, shard in self._shards()
            if shard.order.name == name
        ]

    def _in_progress(self, name: str) -> str:
        """Return what a model waits for; empty: nothing is being done for it."""
        lending = []
        for machine in self.machines:
            order = machine.ordered.get(name)
            until, why = machine.failed.get(name, (0.0, ""))
            if order is not None and order.action is ModelAction.LEND:
                lending.append(machine.shown_name)
            elif machine.library.loan and until > self.now and not why:
                lending.append(machine.shown_name)  # it says so in a moment
        return f"is being split: waits for {', '.join(lending)}" if lending else ""

    def _ready(self, name: str) -> ModelOrder | None:
        """Return the order to load a model whose shards are all there, or None."""
        groups: dict[str, dict[str, LentShard]] = {}
        for machine, shard in self._shards():
            if shard.order.name == name and shard.order.machine == machine.id:
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
        """Tell machines to lend what a model needs, or say why it is not split."""
        deployment = self.deployments.get(name)
        on = deployment.on if deployment else ()
        allowed = [each for each in self.machines if not on or each.is_one_of(on)]
        having = [each for each in allowed if _can_run(each, name)]
        if not having or not any(
            _loan(each).memory for each in allowed if each.library.loan
        ):
            self.unplaced[name] = why
            return
        found = [
            (each, self._split(name, each, allowed))
            for each in having
            if each.failed.get(name, (0.0, ""))[0] <= self.now
        ]
        splits = [
            (len(split.shards), split.seconds, each.id, each, split)
            for each, split in found
            if isinstance(split, Split)
        ]
        if splits:
            *_, runner, split = min(splits, key=lambda each: each[:3])
            self._begin(name, runner, split)
            return
        # What is missing may come back: a lender that was lost, or memory in use.
        reasons = [split for _, split in found if isinstance(split, str)]
        reasons += [
            f"{each.shown_name} failed to run it ({failure})"
            for each in having
            if (failure := each.failed.get(name, (0.0, ""))[1])
        ]
        self.pending[name] = f"fits on no machine ({why}), and {some_of(reasons, '; ')}"

    def _split(
        self, name: str, runner: Machine, allowed: Sequence[Machine]
    ) -> Split | str:
        """Return how a model is split with a runner, which may unload others first."""
        own, model, room = _loan(runner), runner.library.find(name), self._room(runner)
        assert model is not None, "only those"
        evictable = sum(
            room.taken(other, each)
            for other, each in runner.loaded.items()
            if room.may_unload(other, each)
        )
        lenders = [
            Holder(each.id, each.shown_name, loan.free, each.library.bandwidth)
            for each in allowed
            if (loan := each.library.loan) is not None
            and loan.protocol == own.protocol
            and (not loan.runners or own.key in loan.runners)
            and loan.free > 0
            and each.takes_orders
            and name not in each.failed
            and name not in each.ordered
        ]
        place = Holder(
            *(runner.id, runner.shown_name, room.free + room.coming + evictable),
            runner.library.bandwidth,
        )
        return split_model(model, *self._settings(name, runner), place, lenders)

    def _begin(self, name: str, runner: Machine, split: Split) -> None:
        """Make room for the runner's part, or tell the others to lend theirs."""
        bid = self._room(runner).bid(name, split.shards[-1].memory, Claim.WAITED)
        if bid is None or bid.effort is not Effort.NONE:
            for victim in bid.victims if bid else ():
                unload = ModelAction.UNLOAD
                work = ModelOrder(unload, victim, runner.id, room_for=name)
                self._order(work, f"makes room for a part of {name}")
            self.pending[name] = f"waits until {runner.shown_name} has room for a part"
            return
        lent = ModelOrder(
            *(ModelAction.LEND, name, runner.id, *self._settings(name, runner)),
            group=f"{name}@{int(self.now * MILLISECONDS)}",
            shards=split.shards,
            runner=_loan(runner).key,
            batch=split.batch,
        )
        self._kept.add(lent.group)
        shown = ", ".join(self._shown(split.shards))
        for shard in split.shards[:-1]:
            order = with_fields(lent, machine=shard.machine)
            self._order(order, f"fits on no machine: split over {shown}")
        self.pending[name] = f"is being split over {shown}"

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
        until, why = runner.failed.get(order.name, (0.0, "")) if runner else (0.0, "")
        return until > self.now and not why

    def _room(self, machine: Machine) -> Room:
        return Room(machine, (), machine.library.find, self.now, DEFAULT_RULES)

    def _shards(self) -> Sequence[tuple[Machine, LentShard]]:
        return [
            (machine, shard)
            for machine in self.machines
            if (loan := machine.library.loan) is not None
            for shard in loan.shards
        ]

    def _machine(self, machine_id: str) -> Machine | None:
        return next((each for each in self.machines if each.id == machine_id), None)

    def _shown(self, shards: Sequence[Shard]) -> Sequence[str]:
        names = {each.id: each.shown_name for each in self.machines}
        return [
            f"{names.get(each.machine, each.machine)} ({each.memory / GB:.1f} GB)"
            for each in shards
        ]

    def _order(self, work: ModelOrder, reason: str) -> None:
        self.orders.append(Order(work, reason))


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


def _located(shard: Shard, lent: LentShard) -> Shard:
    return with_fields(
        shard, hosts=lent.hosts, port=lent.port, fingerprint=lent.fingerprint
    )
