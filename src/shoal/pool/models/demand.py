"""What the pool's machines have loaded, and which models are wanted: for ``place``."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from shoal.domain.facts import DeploymentSet
from shoal.domain.ids import peer_of
from shoal.domain.work import ANY_MODEL, JobKind, ModelAction, ModelOrder
from shoal.pool.models.groups import form_groups
from shoal.pool.models.machine import (
    Described,
    DescribeMachine,
    LoadedModel,
    Machine,
    PlacementRules,
)
from shoal.pool.models.placement import DEFAULT_RULES, Demand, Placement, place
from shoal.pool.roster import SPECIAL_QUEUES
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker


def present_placement(
    pool: PoolState,
    now: float,
    describe: DescribeMachine,
    rules: PlacementRules = DEFAULT_RULES,
    deployments: Mapping[str, DeploymentSet] | None = None,
) -> tuple[list[Machine], Placement]:
    """Return the machines that load models, and what they would be ordered now.

    ``deployments`` are those of the pool, as far as they hold now; None: all of them.
    """
    deployments = pool.deployments if deployments is None else deployments
    found = _machines(pool, now, describe)
    placement = place(found, _demands(pool, now), deployments, now, rules)
    return found, form_groups(found, placement, deployments, now)


def orders_to_unload(pool: PoolState, model: str, now: float) -> list[ModelOrder]:
    """Return the orders that free the memory of a model, as an operator asks.

    None for what a deployment keeps, or requests use or wait for.
    """
    if model in pool.deployments or pool.queues.get(model):
        return []
    return [
        ModelOrder(ModelAction.UNLOAD, model, each.id)
        for each in _machines(pool, now, Described)
        if each.takes_orders
        and model not in each.ordered
        and each.library.find(model) is not None
        and (loaded := each.loaded.get(model)) is not None
        and not loaded.busy
    ]


def _machines(pool: PoolState, now: float, describe: DescribeMachine) -> list[Machine]:
    libraries = [
        worker for worker in pool.workers.values() if worker.offer.library is not None
    ]
    serving: defaultdict[str, list[Worker]] = defaultdict(list)
    for worker in pool.workers.values() if libraries else ():
        if worker.offer.models:
            serving[peer_of(worker.id)].append(worker)
    found = []
    for worker in libraries:
        library = worker.offer.library
        assert library is not None, "only those"
        peer = peer_of(worker.id)
        described = describe(peer)
        loaded = {}
        for each in serving[peer]:
            for model in each.offer.models:
                known = library.find(model)
                context, slots = each.offer.context, each.offer.slots
                group = library.loan and library.loan.group(model)
                memory = 0 if known is None else known.memory(context, slots)
                loaded[model] = LoadedModel(
                    group.own_memory if group else memory,
                    each.since,
                    now if each.leases else each.used,
                    bool(each.leases),
                    context,
                    slots,
                )
        found.append(
            Machine(
                worker.id,
                described.name,
                library,
                loaded,
                pool.model_orders.of_machine(worker.id),
                worker.accepts_jobs,
                pool.model_orders.failures(worker.id, now),
                described.kind,
                pool.model_orders.doubts(worker.id),
            )
        )
    return found


def _demands(pool: PoolState, now: float) -> dict[str, Demand]:
    """Return the demand for each model that jobs wait for or machines have loaded.

    Not of those that a machine is loading which is not connected: it may come back.
    """
    present = pool.workers.keys()
    absent = {
        each.order.name
        for each in pool.model_orders
        if each.order.machine not in present
    }
    found = {}
    for model in (pool.queues.keys() | pool.roster.models) - SPECIAL_QUEUES - absent:
        if model not in pool.roster.loadable:
            continue
        workers = pool.roster.with_model.get(model, {}).values()
        slots = sum(each.offer.slots for each in workers if each.accepts_jobs)
        busy = sum(each.busy_slots for each in workers if each.accepts_jobs)
        queue = pool.queues.get(model)
        waiting = 0 if queue is None else len(queue)
        found[model] = Demand(
            waiting,
            0.0 if queue is None else now - queue.since,
            (busy + waiting) / slots if slots else 0.0,
        )
    anything = pool.queues.get(ANY_MODEL)
    if anything is None or ANY_MODEL in pool.roster.with_model:
        return found
    if (chosen := _chat_model(pool, now)) is not None and chosen not in absent:
        own = found.get(chosen, Demand())
        waited = max(own.waited, now - anything.since)
        found[chosen] = replace(own, waiting=own.waiting + len(anything), waited=waited)
    return found


def _chat_model(pool: PoolState, now: float) -> str | None:
    """Return the largest chat model that a machine has memory for; None: there is none.

    Requests for any model wait for it while none is loaded.  One that is to be copied
    from the hub goes after those with files in the pool.
    """
    sizes: dict[str, tuple[bool, int]] = {}
    for name, machines in pool.roster.loadable.items():
        for machine, model in machines.items():
            library = pool.workers[machine].offer.library
            assert library is not None, "only those"
            need = model.memory(library.context, library.slots)
            if (
                JobKind.CHAT in model.kinds
                and not pool.model_orders.has_failed(machine, name, now)
                and (not library.memory or need <= library.memory)
            ):
                size = pool.roster.has_files(name), model.size
                sizes[name] = max(size, sizes.get(name, size))
    return max(sizes, key=lambda name: (sizes[name], name), default=None)
