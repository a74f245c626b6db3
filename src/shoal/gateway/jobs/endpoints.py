"""The job API: shows, awaits, lists and cancels jobs of any kind."""

import asyncio
import re
from contextlib import suppress
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from shoal.domain import errors
from shoal.domain.credentials import Scope
from shoal.domain.ids import JobId
from shoal.gateway.context import JobsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.decoding import job_id_in
from shoal.gateway.http.errors import PLAIN_ERRORS
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.request_record import record_of
from shoal.gateway.http.responses import json_bytes_response
from shoal.gateway.jobs.job_options import IDEMPOTENCY_KEY
from shoal.gateway.jobs.job_request import USER_MAX
from shoal.gateway.jobs.job_view import (
    STATUSES,
    STORED_KINDS,
    JobInfo,
    JobListEntry,
    JobStatus,
    JobType,
    encode_stored_job,
    job_type_of,
    list_entry,
)
from shoal.pool.lifecycle import ENDED, JobState
from shoal.store.port import JobFilter, Store, StoredJob, StoredJobSummary

api = Operations(PLAIN_ERRORS)

WAIT_MAX = 60.0  # seconds to wait for the end of a job
LISTED_MAX = 100  # jobs in one response

CANCELLED_BY_OWNER = "cancelled by its owner"
NOT_FOUND = "Job not found"


class JobPage(msgspec.Struct, frozen=True):
    """Jobs, newest first; ``next`` is the ``before`` of the next page."""

    jobs: list[JobListEntry]
    next: str | None


class JobListQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A filter of jobs; the listed ones are older than ``before``.

    That is the id of a job, or the ``next`` of the page before.
    """

    status: JobStatus | msgspec.UnsetType = msgspec.UNSET
    job_type: JobType | msgspec.UnsetType = msgspec.UNSET
    user_id: Annotated[str, Meta(max_length=USER_MAX)] | msgspec.UnsetType = (
        msgspec.UNSET
    )
    limit: Annotated[int, Meta(ge=1, le=LISTED_MAX)] = 20
    before: str | msgspec.UnsetType = msgspec.UNSET


class JobShowQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many seconds to wait for the end of an open job."""

    wait: Annotated[float, Meta(ge=0, le=WAIT_MAX)] = 0.0


async def owned_summary(
    store: Store, job_id: JobId, caller: ApiCaller
) -> StoredJobSummary:
    """Return the summary of a job that the caller may see.  Raises NotFound."""
    found = await store.summary(job_id)
    mine = found is not None and caller.owns(found.owner, job_id)
    if found is None or not (mine or caller.has_scope(Scope.MONITOR)):
        raise errors.NotFound(NOT_FOUND)
    return found


async def _owned_job(
    gateway: JobsGateway, job_id: JobId, caller: ApiCaller, missing: str = NOT_FOUND
) -> StoredJob:
    """Return a job that the caller may see.  Raises NotFound."""
    stored = await gateway.store.job(job_id)
    mine = stored is not None and caller.owns(stored.job.owner, job_id)
    if stored is None or not (mine or caller.has_scope(Scope.MONITOR)):
        raise errors.NotFound(missing.format(job_id))
    return stored


@api.get("/v1/jobs", "List jobs, newest first", Scope.READ, lists=True)
async def list_jobs(
    gateway: JobsGateway, caller: ApiCaller, query: JobListQuery
) -> JobPage:
    before = await find_cursor(gateway.store, query.before or None, caller)
    wanted = JobFilter(
        caller.name,
        frozenset(state for state in JobState if STATUSES[state] == query.status),
        query.user_id if isinstance(query.user_id, str) else None,
        next(
            (each for each in STORED_KINDS if job_type_of(each) == query.job_type), None
        ),
        before,
    )
    page = await gateway.store.recent(wanted, query.limit)
    return JobPage([*map(list_entry, page.jobs)], encode_place(page.before))


@api.delete(
    "/v1/jobs", "Cancel the job with an Idempotency-Key", Scope.USE, answer=JobInfo
)
async def cancel_keyed_job(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    key = request.headers.get(IDEMPOTENCY_KEY)
    if not key:
        raise errors.InvalidRequest(f"{IDEMPOTENCY_KEY}: missing", IDEMPOTENCY_KEY)
    stored = await gateway.store.by_idempotency_key(caller.name, key)
    if stored is None:
        raise errors.NotFound(NOT_FOUND)
    return await _cancel(gateway, request, caller, stored.job.id)


@api.get(
    "/v1/jobs/{id}",
    "Show a job, or wait for its end",
    Scope.READ,
    by_calls=True,
    answer=JobInfo,
)
async def show_job(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller, query: JobShowQuery
) -> web.Response:
    stored = await awaited_job(gateway, request, caller, query.wait)
    return await _job_response(gateway, stored)


async def awaited_job(
    gateway: JobsGateway,
    request: web.Request,
    caller: ApiCaller,
    seconds: float,
    missing: str = NOT_FOUND,
) -> StoredJob:
    """Return the requested job, after waiting for its end for at most ``seconds``.

    Raises NotFound, with the text ``missing``, if the caller may not see it.
    """
    job_id = job_id_in(request)
    stored = await _owned_job(gateway, job_id, caller, missing)
    record_of(request).job_id = job_id
    if not seconds or stored.state in ENDED:
        return stored
    with (
        gateway.jobs.observe(job_id) as reader,
        suppress(TimeoutError, errors.ShoalError),  # the store has the job's state
    ):
        if reader is not None:
            async with asyncio.timeout(seconds):
                await reader.outcome()
    gateway.access.ensure_active(caller)  # the key may have been revoked meanwhile
    return await _owned_job(gateway, job_id, caller, missing)


async def _job_response(gateway: JobsGateway, stored: StoredJob) -> web.Response:
    return json_bytes_response(await encode_job(gateway, stored))


async def encode_job(gateway: JobsGateway, stored: StoredJob) -> bytes:
    """Encode a job as its owner sees it.  Raises StoreError."""
    moderation = gateway.moderation_for(stored.job.owner)
    withheld = (
        moderation is not None
        and stored.outcome is not None
        and (
            moderation.blocks_outcome(stored.outcome)
            or moderation.matches(stored.outcome.output)
        )
    )
    return await encode_stored_job(gateway.store, stored, withheld=withheld)


async def find_cursor(
    store: Store, before: str | None, caller: ApiCaller
) -> JobId | int | None:
    """Return the job, or the place, that the jobs of a page are older than, if given.

    Raises InvalidRequest if the caller may not see the job.
    """
    if before is None:
        return None
    if (place := _PLACE.fullmatch(before)) is not None:
        return int(place[1])
    job_id = JobId(before)
    try:
        await owned_summary(store, job_id, caller)
    except errors.NotFound:
        text = f"before: there is no job {before}: it never existed, or was pruned"
        raise errors.InvalidRequest(text, "before") from None
    return job_id


def encode_place(place: int | None) -> str | None:
    """Return the ``before`` of the next page: it stays when jobs are deleted."""
    return None if place is None else f"@{place}"


_PLACE = re.compile("@([0-9]{1,18})", re.ASCII)


@api.delete("/v1/jobs/{id}", "Cancel a job", Scope.USE, by_calls=True, answer=JobInfo)
async def cancel_job(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    return await _cancel(gateway, request, caller, job_id_in(request))


async def _cancel(
    gateway: JobsGateway, request: web.Request, caller: ApiCaller, job_id: JobId
) -> web.Response:
    state = (await owned_summary(gateway.store, job_id, caller)).state
    record_of(request).job_id = job_id
    if state not in ENDED:
        await gateway.jobs.cancel_now(job_id, CANCELLED_BY_OWNER)
        stored = await _owned_job(gateway, job_id, caller)
        state = stored.state
        if state is JobState.CANCELLED:
            return await _job_response(gateway, stored)
    raise errors.AlreadyEnded(
        f"job {job_id} has ended already ({STATUSES[state]}): there is nothing "
        "to cancel"
    )
