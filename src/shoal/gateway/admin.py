"""What operators ask first: who is there, and how busy they are."""

from functools import partial

import msgspec
from aiohttp import web

import shoal
from shoal.domain.credentials import Scope
from shoal.domain.ids import WorkerId
from shoal.domain.worker import Health
from shoal.gateway.admin_nodes import NodeStatus, nodes_of
from shoal.gateway.parts import Gateway
from shoal.gateway.respond import json_answer
from shoal.pool.worker import Worker
from shoal.runtime.peers import Via

UNKNOWN = Health()


class WorkerStatus(msgspec.Struct, frozen=True):
    id: WorkerId
    models: list[str]
    slots: int
    busy: int
    draining: str  # why, or empty
    remark: str
    kinds: list[str]
    features: list[str]
    context: int  # tokens; 0: unknown
    only_for: list[str]  # names of keys; empty: all
    tokens_per_second: float | None  # of one answer, lately
    cancels: bool
    tasks: list[str]  # names; empty: any, if it does tasks at all
    device: str | None
    public_key: str | None  # hexadecimal; null where its wire has none
    proven: bool  # whether it has shown that it has the other half
    price: str  # what it would like to be paid, in its own words
    points: int  # against it; with 3 it gets no work for a day
    cpu: float | None  # percent of all processors, as it says
    memory: float | None  # percent, as it says
    unfit: str  # why it gets nothing for now, or empty
    queued: int  # jobs that others have there
    speed: float  # the share of its full speed, at most 1
    neighbour: bool  # whether it is a pool of its own
    peer: str | None  # the peer that has its models, where several workers are one
    protection: str | None  # of what the peer is told: plain, noise, teale or tls


class JobCounts(msgspec.Struct, frozen=True):
    queued: int
    running: int


class Status(msgspec.Struct, frozen=True):
    version: str
    ready: bool
    why_not: str  # empty if it is ready
    models: list[str]
    workers: list[WorkerStatus]
    jobs: JobCounts
    nodes: list[NodeStatus]  # that wires keep an eye on by themselves


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the paths of this face."""
    return [
        web.get("/admin/status", partial(_status, gateway)),
    ]


async def _status(gateway: Gateway, request: web.Request) -> web.Response:
    await gateway.access.admit(request, Scope.READ)
    pool = gateway.hub.pool
    running = len(pool.jobs) - pool.waiting
    return json_answer(
        Status(
            shoal.__version__,
            gateway.hub.ready is None,
            gateway.hub.ready or "",
            sorted(gateway.models),
            [
                _worker(
                    worker,
                    gateway.hub.healths.get(worker.id, UNKNOWN),
                    gateway.hub.via(worker.id),
                )
                for worker in pool.workers.values()
            ],
            JobCounts(pool.waiting, running),
            nodes_of(gateway),
        )
    )


def _worker(worker: Worker, health: Health, via: Via | None) -> WorkerStatus:
    offer, condition = worker.offer, worker.condition
    return WorkerStatus(
        worker.id,
        sorted(offer.models),
        offer.slots,
        len(worker.leases),
        worker.draining,
        offer.remark,
        sorted(kind.value for kind in offer.kinds),
        sorted(feature.value for feature in offer.features),
        offer.context,
        sorted(offer.only_for),
        None if worker.pace is None else round(worker.pace, 1),
        worker.cancels,
        sorted(offer.tasks),
        None if offer.device is None else offer.device.value,
        offer.public_key or None,
        offer.proven,
        offer.price,
        worker.points,
        health.cpu,
        health.memory,
        condition.unfit,
        condition.queued,
        condition.speed,
        offer.neighbour,
        None if via is None else via.name,
        None if via is None else via.protection.value,
    )
