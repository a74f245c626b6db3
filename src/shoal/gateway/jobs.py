"""Jobs over HTTP: looked at, waited for, listed and cancelled, whatever their kind."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, TypeAlias

import msgspec
from aiohttp import web
from msgspec import Meta

from shoal.domain.credentials import Scope
from shoal.domain.errors import (
    AlreadyEnded,
    InvalidRequest,
    NotFound,
    ShoalError,
)
from shoal.domain.ids import JobId
from shoal.gateway.access import Caller
from shoal.gateway.job_request import USER_MAX
from shoal.gateway.job_shown import (
    JOB_TYPES,
    STATUSES,
    JobListed,
    JobType,
    Status,
    listed,
    show,
)
from shoal.gateway.parts import Gateway
from shoal.gateway.query import job_in, read_query
from shoal.gateway.record import record_of
from shoal.gateway.respond import json_answer, json_bytes
from shoal.pool.lifecycle import ENDED, JobState
from shoal.pool.stimuli import Withdrawn
from shoal.store.port import Outline, StoredJob, Wanted

WAIT_MAX = 60.0  # seconds that a client may wait for the end of a job
LISTED_MAX = 100  # jobs in one answer

BASE = "/v1/jobs"

BY_OWNER = "cancelled by its owner"
NOT_FOUND = "Job not found"

Enter: TypeAlias = Callable[[web.Request, Scope], Awaitable[Caller]]
"""How callers come in; raises what ``Access.admit`` does."""


class JobPage(msgspec.Struct, frozen=True):
    """Jobs, the newest first; ``next`` is what the next page comes ``before``."""

    jobs: list[JobListed]
    next: str | None


class ListQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which jobs to list; ``before`` is the job that those listed are older than."""

    status: Status | msgspec.UnsetType = msgspec.UNSET
    job_type: JobType | msgspec.UnsetType = msgspec.UNSET
    user_id: Annotated[str, Meta(max_length=USER_MAX)] | msgspec.UnsetType = (
        msgspec.UNSET
    )
    limit: Annotated[int, Meta(ge=1, le=LISTED_MAX)] = 20
    before: str | msgspec.UnsetType = msgspec.UNSET


class ShowQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For how many seconds to wait for the end of a job that has not ended."""

    wait: Annotated[float, Meta(ge=0, le=WAIT_MAX)] = 0.0


def routes(gateway: Gateway, enter: Enter) -> list[web.RouteDef]:
    """Return the paths of jobs."""
    return [
        web.get(BASE, partial(_list, gateway, enter)),
        web.get(f"{BASE}/{{id}}", partial(_show, gateway, enter)),
        web.delete(f"{BASE}/{{id}}", partial(_cancel, gateway, enter)),
    ]


async def owned_outline(gateway: Gateway, job_id: JobId, caller: Caller) -> Outline:
    """Return the outline of a job that the caller may see.  Raises NotFound."""
    found = await gateway.store.outline(job_id)
    mine = found is not None and found.owner == caller.name
    if found is None or not (mine or caller.may(Scope.ADMIN)):
        raise NotFound(NOT_FOUND)
    return found


async def _owned(gateway: Gateway, job_id: JobId, caller: Caller) -> StoredJob:
    """Return a job that the caller may see.  Raises NotFound."""
    stored = await gateway.store.job(job_id)
    mine = stored is not None and stored.job.owner == caller.name
    if stored is None or not (mine or caller.may(Scope.ADMIN)):
        raise NotFound(NOT_FOUND)
    return stored


async def _show(gateway: Gateway, enter: Enter, request: web.Request) -> web.Response:
    caller = await enter(request, Scope.READ)
    query = read_query(request, ShowQuery)
    job_id = job_in(request)
    stored = await _owned(gateway, job_id, caller)
    record_of(request).job_id = job_id
    if query.wait and stored.state not in ENDED:
        await _ended(gateway, job_id, query.wait)
        gateway.access.check(caller)  # who may have been shut out while this waited
        stored = await _owned(gateway, job_id, caller)
    return await _shown(gateway, stored)


async def _ended(gateway: Gateway, job_id: JobId, seconds: float) -> None:
    """Wait for the end of a job, but not longer than so many seconds."""
    with gateway.hub.watching(job_id) as reader:
        if reader is None:
            return
        try:
            async with asyncio.timeout(seconds):
                await reader.outcome()
        except (TimeoutError, ShoalError):
            pass  # what became of it is in the store


async def _shown(gateway: Gateway, stored: StoredJob) -> web.Response:
    return json_bytes(await written(gateway, stored))


async def written(gateway: Gateway, stored: StoredJob) -> bytes:
    """Write a job as its owner is shown it.  Raises StoreError."""
    moderation = gateway.moderation_for(stored.job.owner)
    withheld = (
        moderation is not None
        and stored.outcome is not None
        and (
            moderation.refuses_outcome(stored.outcome)
            or moderation.matches(stored.outcome.output)
        )
    )
    return await show(gateway.store, stored, withheld=withheld)


async def _list(gateway: Gateway, enter: Enter, request: web.Request) -> web.Response:
    caller = await enter(request, Scope.READ)
    query = read_query(request, ListQuery)
    before = JobId(query.before) if query.before else None
    if before is not None:
        try:
            await owned_outline(gateway, before, caller)
        except NotFound:
            text = f"before: there is no job {before}: it never was, or was pruned"
            raise InvalidRequest(text, "before") from None
    wanted = Wanted(
        caller.name,
        frozenset(state for state in JobState if STATUSES[state] == query.status),
        query.user_id if isinstance(query.user_id, str) else None,
        next(
            (kind for kind, name in JOB_TYPES.items() if name == query.job_type), None
        ),
        before,
    )
    stored = await gateway.store.recent(wanted, query.limit)
    more = len(stored) == query.limit
    return json_answer(
        JobPage([listed(each) for each in stored], stored[-1].id if more else None)
    )


async def _cancel(gateway: Gateway, enter: Enter, request: web.Request) -> web.Response:
    caller = await enter(request, Scope.USE)
    job_id = job_in(request)
    state = (await owned_outline(gateway, job_id, caller)).state
    record_of(request).job_id = job_id
    if state not in ENDED:
        await gateway.hub.tell(Withdrawn(job_id, BY_OWNER))
        stored = await _owned(gateway, job_id, caller)
        state = stored.state
        if state is JobState.CANCELLED:
            return await _shown(gateway, stored)
    raise AlreadyEnded(
        f"job {job_id} has ended already ({STATUSES[state]}): there is nothing "
        "to cancel"
    )
