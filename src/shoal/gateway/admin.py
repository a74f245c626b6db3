"""What operators ask: who is there, what runs, and why it went as it did."""

from functools import partial

import msgspec
from aiohttp import web

import shoal
from shoal.domain.errors import InvalidRequest, NotFound
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.work import Outcome
from shoal.gateway.chat_answer import PREFIX
from shoal.gateway.parts import Gateway
from shoal.pool.explain import explain
from shoal.pool.state import Worker
from shoal.store.port import StoredJob


class _Worker(msgspec.Struct, frozen=True):
    id: WorkerId
    models: list[str]
    slots: int
    busy: int
    draining: str  # why, or empty
    remark: str
    features: list[str]
    cancels: bool


class _Jobs(msgspec.Struct, frozen=True):
    queued: int
    running: int


class _Status(msgspec.Struct, frozen=True):
    version: str
    ready: bool
    models: list[str]
    workers: list[_Worker]
    jobs: _Jobs


class _Job(msgspec.Struct, frozen=True):
    """A job; times are Unix seconds."""

    id: JobId
    state: str
    model: str
    owner: str
    attempts: int
    submitted_at: float
    ended_at: float | None
    outcome: Outcome | None
    error: str | None


class _Explanation(msgspec.Struct, frozen=True):
    job: JobId
    lines: list[str]


class _Cancelled(msgspec.Struct, frozen=True):
    id: JobId
    cancelled: bool = True


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the paths of this face."""
    return [
        web.get("/admin/status", partial(_status, gateway)),
        web.get("/admin/jobs/{id}", partial(_show, gateway)),
        web.get("/admin/jobs/{id}/explain", partial(_explain, gateway)),
        web.delete("/admin/jobs/{id}", partial(_cancel, gateway)),
    ]


async def _status(gateway: Gateway, request: web.Request) -> web.Response:
    _admit(gateway, request)
    pool = gateway.hub.pool
    running = len(pool.jobs) - pool.waiting
    return _json(
        _Status(
            shoal.__version__,
            gateway.hub.ready is None,
            sorted(gateway.models),
            [_worker(worker) for worker in pool.workers.values()],
            _Jobs(pool.waiting, running),
        )
    )


async def _show(gateway: Gateway, request: web.Request) -> web.Response:
    _admit(gateway, request)
    stored = await _stored(gateway, request)
    return _json(
        _Job(
            stored.job.id,
            stored.state.value,
            stored.job.model,
            stored.job.owner,
            stored.lease,
            stored.submitted_at,
            stored.ended_at,
            stored.outcome,
            stored.error,
        )
    )


async def _explain(gateway: Gateway, request: web.Request) -> web.Response:
    _admit(gateway, request)
    stored = await _stored(gateway, request)
    story = await gateway.store.story(stored.job.id)
    return _json(_Explanation(stored.job.id, explain(story)))


async def _cancel(gateway: Gateway, request: web.Request) -> web.Response:
    _admit(gateway, request)
    job_id = _job_id(request)
    if not gateway.hub.withdraw(job_id, "cancelled by an operator"):
        stored = await _stored(gateway, request)
        raise InvalidRequest(f"job {job_id} has ended: {stored.state.value}")
    return _json(_Cancelled(job_id))


def _admit(gateway: Gateway, request: web.Request) -> None:
    gateway.keyring.owner(request.headers.get("Authorization"))


async def _stored(gateway: Gateway, request: web.Request) -> StoredJob:
    job_id = _job_id(request)
    stored = await gateway.store.job(job_id)
    if stored is None:
        raise NotFound(f"there is no job {job_id}: it never was, or was pruned")
    return stored


def _job_id(request: web.Request) -> JobId:
    """Return the job's id, which chat clients know with a prefix."""
    return JobId(request.match_info["id"].removeprefix(PREFIX))


def _worker(worker: Worker) -> _Worker:
    offer = worker.offer
    return _Worker(
        worker.id,
        sorted(offer.models),
        offer.slots,
        len(worker.leases),
        worker.draining,
        offer.remark,
        sorted(feature.value for feature in offer.features),
        worker.cancels,
    )


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), content_type="application/json"
    )
