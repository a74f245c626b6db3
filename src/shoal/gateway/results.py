"""Results fetched by id: for clients whose connection broke before the answer came.

Source: OpenAI's API reference, "Get chat completion".
"""

import asyncio
from functools import partial

from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.errors import (
    Cancelled,
    JobError,
    NotFound,
    ShoalError,
    StillRunning,
    TimedOut,
)
from shoal.domain.ids import JobId
from shoal.domain.outcome import Outcome
from shoal.domain.work import Chat, Completion, Job
from shoal.gateway import chat_answer, completion_answer
from shoal.gateway.access import Caller
from shoal.gateway.openai import chat_form, completion_form
from shoal.gateway.parts import Gateway
from shoal.gateway.record import record_of
from shoal.gateway.respond import json_bytes
from shoal.pool.lifecycle import JobState
from shoal.store.port import StoredJob

WAIT = 55.0  # seconds for a job that still runs: less than proxies bear

PATHS: dict[str, tuple[str, type[Chat | Completion]]] = {
    "/v1/chat/completions/{id}": (chat_answer.PREFIX, Chat),
    "/v1/completions/{id}": (completion_answer.PREFIX, Completion),
}

ERRORS: dict[JobState, type[ShoalError]] = {
    JobState.FAILED: JobError,
    JobState.CANCELLED: Cancelled,
    JobState.EXPIRED: TimedOut,
}


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the paths of this face."""
    return [
        web.get(path, partial(_show, gateway, prefix, type_))
        for path, (prefix, type_) in PATHS.items()
    ]


async def _show(
    gateway: Gateway,
    prefix: str,
    type_: type[Chat | Completion],
    request: web.Request,
) -> web.Response:
    caller = await gateway.access.admit(request, Scope.READ)
    job_id = JobId(request.match_info["id"].removeprefix(prefix))
    stored = await _ended(gateway, job_id, caller)
    record_of(request).job_id = job_id
    work = stored.job.work
    if not isinstance(work, type_):
        raise NotFound(f"job {job_id} is of another kind: {stored.job.kind.value}")
    if stored.outcome is None:
        raise ERRORS[stored.state](stored.error or stored.state.value)
    return json_bytes(_written(stored.job, stored.outcome, int(stored.submitted_at)))


async def _ended(gateway: Gateway, job_id: JobId, caller: Caller) -> StoredJob:
    """Return a job of the caller's that has ended, waiting a while if it has not.

    Raises NotFound, or StillRunning.
    """
    stored = await _owned(gateway, job_id, caller)
    if stored.ended_at is not None:
        return stored
    try:
        with gateway.hub.watching(job_id) as reader:
            if reader is not None:
                async with asyncio.timeout(WAIT):
                    await reader.outcome()
    except TimeoutError:
        raise StillRunning(f"job {job_id} has not ended yet: ask again") from None
    except ShoalError:
        pass  # the store knows it better
    gateway.access.check(caller)  # who may have been shut out while this waited
    stored = await _owned(gateway, job_id, caller)
    if stored.ended_at is None:
        raise StillRunning(f"job {job_id} has not ended yet: ask again")
    return stored


async def _owned(gateway: Gateway, job_id: JobId, caller: Caller) -> StoredJob:
    stored = await gateway.store.job(job_id)
    mine = stored is not None and stored.job.owner == caller.name
    if stored is None or not (mine or caller.may(Scope.ADMIN)):
        raise NotFound(f"there is no job {job_id}: it never was, or was pruned")
    return stored


def _written(job: Job, outcome: Outcome, created: int) -> bytes:
    match job.work:
        case Chat() as chat:
            form = chat_form(chat, include_usage=False)
        case Completion() as completion:
            form = completion_form(completion, include_usage=False)
        case _:
            raise AssertionError(f"no such path for {job.kind}")
    return form.whole(job.id, outcome, created)
