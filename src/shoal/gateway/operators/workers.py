"""The operators' API of single workers: approve, pause, resume, drain and remove."""

from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias
from urllib.parse import unquote

import msgspec
from aiohttp import web
from msgspec import Meta

from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest, NotFound
from shoal.domain.facts import WorkerSuspended
from shoal.domain.ids import WorkerId, peer_of
from shoal.domain.worker import Suspension
from shoal.gateway.context import OperatorsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.operation import Operations
from shoal.pool.inputs import WorkerApproval, WorkerResumption, WorkerSuspension
from shoal.pool.roster import suggest_names
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker

api = Operations()

NAME_MAX = 1024  # characters of a worker's id
LIMIT_MAX = 7 * 86_400  # seconds: a week

PENDING = Suspension.PENDING
StateName = Literal["active", "pending", "paused", "draining", "drained", "removed"]


class DrainQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The seconds after which the jobs that still run are handed over."""

    within: Annotated[float, Meta(ge=0, le=LIMIT_MAX)] | msgspec.UnsetType = (
        msgspec.UNSET
    )


class SuspensionInfo(msgspec.Struct, frozen=True):
    """The order in force for a worker, or a machine with all its workers.

    ``since`` is in Unix seconds.  ``workers`` are the connected ones, and ``running``
    is the number of their jobs.  ``approved`` is what operators have approved: public
    keys, or the name.
    """

    name: str
    state: StateName
    by: str  # the key of the operator; empty if there is no order
    since: float | None
    workers: list[WorkerId]
    running: int
    approved: list[str]


StoredOrder: TypeAlias = tuple[WorkerSuspended, float]
"""An order, and the Unix time since which it is in force."""


async def stored_orders(gateway: OperatorsGateway) -> list[StoredOrder]:
    """Return the orders in force, the oldest first.  Raises StoreError."""
    return await gateway.store.suspensions()


def suspension_state(pool: PoolState, worker: Worker) -> StateName | None:
    """Return what an operator's order does to a worker; None: nothing."""
    if pool.is_drained(worker.id):
        return "drained"
    return None if worker.suspension is None else worker.suspension.value


def order_infos(
    gateway: OperatorsGateway, stored: Iterable[StoredOrder]
) -> list[SuspensionInfo]:
    """Return orders with the workers that they are about now."""
    return [
        _order(gateway, fact.name, fact.how, fact.by, since) for fact, since in stored
    ]


@api.get("/admin/workers/{name}", "Show a worker's state", Scope.MONITOR)
async def show_worker(
    gateway: OperatorsGateway, request: web.Request
) -> SuspensionInfo:
    name = _worker_name(gateway, request)
    order = await _order_of(gateway, name)
    if order.state == "active" and not (order.workers or order.approved):
        raise NotFound(f"no worker {name} is connected; `shoal status` lists all")
    return order


@api.post(
    "/admin/workers/{name}/pause", "Pause a worker: it gets no new jobs", Scope.ADMIN
)
async def pause_worker(
    gateway: OperatorsGateway, request: web.Request, caller: ApiCaller
) -> SuspensionInfo:
    return await _suspend(gateway, request, caller, Suspension.PAUSED)


@api.post("/admin/workers/{name}/approve", "Approve a new worker", Scope.ADMIN)
async def approve_worker(
    gateway: OperatorsGateway, request: web.Request, caller: ApiCaller
) -> SuspensionInfo:
    name = _worker_name(gateway, request)
    peer = gateway.directory.connected.get(name)
    key = None if peer is None else peer.public_key
    await gateway.hub.process(WorkerApproval(name, caller.name, key))
    return await _order_of(gateway, name)


@api.post("/admin/workers/{name}/resume", "Resume a worker", Scope.ADMIN)
async def resume_worker(
    gateway: OperatorsGateway, request: web.Request, caller: ApiCaller
) -> SuspensionInfo:
    name = _worker_name(gateway, request)
    suspensions = gateway.hub.pool.suspensions
    if not suspensions.ended_by(name):
        machine = peer_of(WorkerId(name))
        if suspensions.get(machine) is not None:
            raise InvalidRequest(
                f"the order is about the whole machine: resume {machine}"
            )
        reason = f"{name} is not paused, drained or removed"
        if _is_pending(gateway, name):
            reason += "; it waits for an approval: shoal nodes approve"
        raise NotFound(reason)
    await gateway.hub.process(WorkerResumption(name, caller.name))
    return await _order_of(gateway, name)


@api.post(
    "/admin/workers/{name}/drain",
    "Drain a worker: it finishes its jobs and gets no new ones",
    Scope.ADMIN,
)
async def drain_worker(
    gateway: OperatorsGateway,
    request: web.Request,
    caller: ApiCaller,
    query: DrainQuery,
) -> SuspensionInfo:
    within = None if isinstance(query.within, msgspec.UnsetType) else query.within
    return await _suspend(gateway, request, caller, Suspension.DRAINING, within)


@api.post(
    "/admin/workers/{name}/remove",
    "Remove a worker: disconnect and refuse it",
    Scope.ADMIN,
)
async def remove_worker(
    gateway: OperatorsGateway, request: web.Request, caller: ApiCaller
) -> SuspensionInfo:
    return await _suspend(gateway, request, caller, Suspension.REMOVED)


async def _suspend(
    gateway: OperatorsGateway,
    request: web.Request,
    caller: ApiCaller,
    how: Suspension,
    within: float | None = None,
) -> SuspensionInfo:
    name = _worker_name(gateway, request)
    await gateway.hub.process(WorkerSuspension(name, how, caller.name, within))
    return await _order_of(gateway, name)


def _worker_name(gateway: OperatorsGateway, request: web.Request) -> str:
    # From the raw path: aiohttp would decode escapes that are part of the name.
    name = unquote(request.rel_url.raw_parts[3])
    if len(name) > NAME_MAX or not name.isprintable() or ":" not in name:
        connected = gateway.hub.pool.workers
        known = {*connected, *map(peer_of, connected)}
        suggestion = suggest_names(name, known, "`shoal status` lists all")
        raise InvalidRequest(
            f"{name[:80]!r}: expected the name of a worker as `shoal status` shows it, "
            "WIRE:NAME, or the part before the slash"
            + (f"; {suggestion}" if suggestion else "")
        )
    return name


async def _order_of(gateway: OperatorsGateway, name: str) -> SuspensionInfo:
    for fact, since in await gateway.store.suspensions():
        if fact.name == name:
            return _order(gateway, name, fact.how, fact.by, since)
    return _order(gateway, name)


def _order(
    gateway: OperatorsGateway,
    name: str,
    how: Suspension | None = None,
    by: str = "",
    since: float | None = None,
) -> SuspensionInfo:
    pool = gateway.hub.pool
    order = pool.suspensions.get(name)
    # There may be thousands of both, so the workers are not searched for each order.
    workers = pool.workers_named(name) if order is None else sorted(order.workers)
    running = sum(1 for each in workers for _ in pool.leases_of(each))
    state: StateName
    if how is Suspension.DRAINING and not running:
        state = "drained"
    elif how is not None:
        state = how.value
    else:
        state = "pending" if _is_pending(gateway, name) else "active"
    approved = pool.approvals.of(name)
    return SuspensionInfo(name, state, by, since, workers, running, approved)


def _is_pending(gateway: OperatorsGateway, name: str) -> bool:
    """Return whether a worker of a name, or a peer without workers, is pending."""
    pool, peer = gateway.hub.pool, gateway.directory.connected.get(name)
    if not pool.approvals.required:
        return False
    if workers := pool.workers_named(name):
        return any(pool.workers[each].suspension is PENDING for each in workers)
    return peer is not None and pool.approvals.is_pending(name, peer.public_key)
