"""Jobs over HTTP: committed, waited for, listed and cancelled, whatever their kind."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
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
    PaymentDue,
    ShoalError,
)
from shoal.domain.ids import JobId
from shoal.domain.work import Job, Policy, Privacy
from shoal.gateway.access import OPEN, Caller
from shoal.gateway.asking import job_of
from shoal.gateway.job_request import USER_MAX, read_commit
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
from shoal.gateway.paying import pay, to_the_end
from shoal.gateway.payments import NO_PAYMENTS
from shoal.gateway.problems import problem
from shoal.gateway.query import job_in, read_query
from shoal.gateway.record import record_of
from shoal.gateway.respond import json_answer, json_bytes
from shoal.pool.lifecycle import ENDED, JobState
from shoal.pool.react import NO_TRUSTED_WORKER, Withdrawn
from shoal.store.port import StoredJob, Wanted

WAIT_MAX = 60.0  # seconds that a client may wait for the end of a job
LISTED_MAX = 100  # jobs in one answer

BASE = "/v1/jobs"
COMMIT = f"{BASE}/commit/{{tier}}"
BODY_TYPE = "application/json"

BY_OWNER = "cancelled by its owner"
NOT_FOUND = "Job not found"

Enter: TypeAlias = Callable[[web.Request, Scope], Awaitable[Caller]]
"""How callers come in; raises what ``Access.admit`` does."""


class Committed(msgspec.Struct, frozen=True):
    job_id: str


class Nothing(msgspec.Struct, frozen=True):
    """An empty object."""


NOTHING = Nothing()


class Untrusted(msgspec.Struct, frozen=True, kw_only=True):
    """That nobody may have a private job."""

    error: str = NO_TRUSTED_WORKER
    job_id: str


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
    tiers = [
        web.post(
            COMMIT.format(tier=policy.value), partial(_commit, gateway, enter, policy)
        )
        for policy in Policy
    ]
    return [
        *tiers,
        web.get(BASE, partial(_list, gateway, enter)),
        web.get(f"{BASE}/{{id}}", partial(_show, gateway, enter)),
        web.delete(f"{BASE}/{{id}}", partial(_cancel, gateway, enter)),
    ]


async def body_of(gateway: Gateway, request: web.Request) -> bytes:
    """Return a body in JSON; of another type it counts as empty, as in the original.

    That also keeps web pages out, which send no JSON elsewhere without being let.
    """
    if request.content_type != BODY_TYPE:
        return b""
    return await gateway.bodies.read(request)


async def owned(gateway: Gateway, job_id: JobId, caller: Caller) -> StoredJob:
    """Return a job that the caller may see.  Raises NotFound."""
    stored = await gateway.store.job(job_id)
    mine = stored is not None and stored.job.owner == caller.name
    if stored is None or not (mine or caller.may(Scope.ADMIN)):
        raise NotFound(NOT_FOUND)
    return stored


async def _commit(
    gateway: Gateway, enter: Enter, policy: Policy, request: web.Request
) -> web.Response:
    caller = await enter(request, Scope.USE)
    data = await body_of(gateway, request)
    work, terms = read_commit(data, policy, gateway.prices)
    if terms.webhook is not None:
        _check_webhooks(gateway, caller)
    moderation = gateway.moderation_for(caller.name)
    if moderation is not None and moderation.matches(work.text):
        raise InvalidRequest("the payload matches the moderation list", "payload")
    job = job_of(gateway, request, work, caller.name, terms=terms)
    accepting = _accepted(gateway, request, caller, job)
    if gateway.payments is not NO_PAYMENTS:
        accepting = to_the_end(accepting)
    try:
        job_id = await accepting
    except PaymentDue as error:
        record_of(request).error = problem(error).code
        # Its clients read the header; the original's body is empty as well.
        return _json(402, NOTHING, error.headers)
    if terms.privacy is Privacy.PRIVATE:
        stored = await gateway.store.job(job_id)
        if stored is not None and (stored.error or "").startswith(NO_TRUSTED_WORKER):
            return _json(422, Untrusted(job_id=job_id))
    return _json(201, Committed(job_id))


async def _accepted(
    gateway: Gateway, request: web.Request, caller: Caller, job: Job
) -> JobId:
    """Hand a job over; return its id, which is an earlier one's if that is the same."""
    paying = partial(pay, gateway, request, caller)
    async with gateway.access.answering(job, caller, paying) as reader:
        record_of(request).reading(reader)
    return reader.job_id


def _check_webhooks(gateway: Gateway, caller: Caller) -> None:
    if not gateway.webhooks:
        raise InvalidRequest(
            "webhook: the coordinator calls nobody (--webhooks off): ask for the job "
            "with ?wait=",
            "webhook",
        )
    if caller.key is OPEN:
        raise InvalidRequest(
            "webhook: only for clients with a key: send the header `Authorization: "
            "Bearer KEY`",
            "webhook",
        )


async def _show(gateway: Gateway, enter: Enter, request: web.Request) -> web.Response:
    caller = await enter(request, Scope.READ)
    query = read_query(request, ShowQuery)
    job_id = job_in(request)
    stored = await owned(gateway, job_id, caller)
    record_of(request).job_id = job_id
    if query.wait and stored.state not in ENDED:
        await _ended(gateway, job_id, query.wait)
        gateway.access.check(caller)  # who may have been shut out while this waited
        stored = await owned(gateway, job_id, caller)
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
            await owned(gateway, before, caller)
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
        JobPage([listed(each) for each in stored], stored[-1].job.id if more else None)
    )


async def _cancel(gateway: Gateway, enter: Enter, request: web.Request) -> web.Response:
    caller = await enter(request, Scope.USE)
    job_id = job_in(request)
    stored = await owned(gateway, job_id, caller)
    record_of(request).job_id = job_id
    if stored.state not in ENDED:
        await gateway.hub.tell(Withdrawn(job_id, BY_OWNER))
        stored = await owned(gateway, job_id, caller)
        if stored.state is JobState.CANCELLED:
            return await _shown(gateway, stored)
    raise AlreadyEnded(
        f"job {job_id} has ended already ({STATUSES[stored.state]}): there is nothing "
        "to cancel"
    )


def _json(
    status: int, value: msgspec.Struct, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(value),
        content_type=BODY_TYPE,
        headers=headers,
    )
