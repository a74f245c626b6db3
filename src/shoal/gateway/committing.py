"""Jobs as they are committed over HTTP: accepted, and paid for where that is asked."""

from functools import partial
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest, PaymentDue
from shoal.domain.ids import JobId
from shoal.domain.work import Job, Policy, Privacy, Task, Webhook
from shoal.gateway.access import OPEN, Caller
from shoal.gateway.asking import job_of
from shoal.gateway.body import BODY_MAX
from shoal.gateway.job_request import read_commit
from shoal.gateway.jobs import BASE, Enter
from shoal.gateway.parts import Gateway
from shoal.gateway.paying import alone, pay, to_the_end
from shoal.gateway.payments import NO_PAYMENTS
from shoal.gateway.problems import problem
from shoal.gateway.reach import Reach, is_beyond
from shoal.gateway.record import record_of
from shoal.gateway.respond import json_answer
from shoal.pool.react import NO_TRUSTED_WORKER

COMMIT = f"{BASE}/commit/{{tier}}"
BODY_TYPE = "application/json"


class Committed(msgspec.Struct, frozen=True):
    job_id: str


class Nothing(msgspec.Struct, frozen=True):
    """An empty object."""


NOTHING = Nothing()


class Untrusted(msgspec.Struct, frozen=True, kw_only=True):
    """That nobody may have a private job."""

    error: str = NO_TRUSTED_WORKER
    job_id: str


def routes(gateway: Gateway, enter: Enter) -> list[web.RouteDef]:
    """Return the paths of commits: one for each policy."""
    return [
        web.post(
            COMMIT.format(tier=policy.value), partial(_commit, gateway, enter, policy)
        )
        for policy in Policy
    ]


async def body_of(
    gateway: Gateway, request: web.Request, size_max: int = BODY_MAX
) -> bytes:
    """Return a body in JSON; of another type it counts as empty, as in the original.

    That also keeps web pages out, which send no JSON elsewhere without being let.
    Raises as ``Bodies.read`` does.
    """
    if request.content_type != BODY_TYPE:
        return b""
    return await gateway.bodies.read(request, size_max)


async def _commit(
    gateway: Gateway, enter: Enter, policy: Policy, request: web.Request
) -> web.Response:
    caller = await enter(request, Scope.USE)
    data = await body_of(gateway, request)
    work, terms = read_commit(data, policy, gateway.prices)
    if terms.webhook is not None:
        _check_webhook(gateway, caller, terms.webhook)
    moderation = gateway.moderation_for(caller.name)
    given = work.payload if isinstance(work, Task) else work.text
    if moderation is not None and moderation.refuses_value(given):
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
        answer = json_answer(NOTHING, 402)
        answer.headers.update(error.headers)
        return answer
    if terms.privacy is Privacy.PRIVATE:
        stored = await gateway.store.outline(job_id)
        if stored is not None and (stored.error or "").startswith(NO_TRUSTED_WORKER):
            return json_answer(Untrusted(job_id=job_id), 422)
    return json_answer(Committed(job_id), 201)


async def _accepted(
    gateway: Gateway, request: web.Request, caller: Caller, job: Job
) -> JobId:
    """Hand a job over; return its id, which is an earlier one's if that is the same."""
    paying = partial(pay, gateway, request, caller)
    with alone(gateway, job):
        async with gateway.access.answering(job, caller, paying) as reader:
            record_of(request).reading(reader)
    return reader.job_id


def _check_webhook(gateway: Gateway, caller: Caller, webhook: Webhook) -> None:
    if gateway.webhooks is Reach.OFF:
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
    host = urlsplit(webhook.url).hostname or ""
    if is_beyond(host, gateway.webhooks):
        raise InvalidRequest(
            f"webhook.url: {host} is no public address, and the coordinator calls no "
            "other (--webhooks public)",
            "webhook.url",
        )
