"""Submits jobs over HTTP, and collects their payment where one is due."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from msgspec.structs import replace

from shoal.coordinator.bookkeeping import payer_of
from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest, PaymentDue, StillRunning
from shoal.domain.ids import JobId
from shoal.domain.job import Job, Policy, Privacy, Webhook
from shoal.domain.work import Task
from shoal.gateway.context import PaidJobsGateway
from shoal.gateway.http.access import ANONYMOUS_KEY, ApiCaller
from shoal.gateway.http.body import BODY_MAX
from shoal.gateway.http.errors import PLAIN_ERRORS, error_status
from shoal.gateway.http.job_quotas import Pay
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.request_record import record_of
from shoal.gateway.http.responses import json_response
from shoal.gateway.jobs.job_options import build_job
from shoal.gateway.jobs.job_request import CommitJob, decode_commit
from shoal.gateway.jobs.payments import NO_PAYMENTS, Charge
from shoal.gateway.jobs.webhooks import EgressPolicy, is_denied
from shoal.pool.inputs import AccountTopUp
from shoal.pool.trust import NO_TRUSTED_WORKER, trust_rejection
from shoal.store.run_to_end import run_to_end

api = Operations(PLAIN_ERRORS)

BODY_TYPE = "application/json"


log = logging.getLogger("shoal.gateway")


async def pay(
    gateway: PaidJobsGateway, request: web.Request, caller: ApiCaller, job: Job
) -> Job:
    """Collect the payment for ``job``, if one is due; return it with its reference.

    The payment is credited to the account that the job is charged to.  A repeated
    request with the same idempotency key is not paid for again.

    Raises PaymentDue, PaymentsDown, StoreError, or what ``Hub.rejection`` returns.
    """
    terms, hub = job.terms, gateway.hub
    if terms.price == 0 or await hub.is_duplicate(job):
        return job
    if terms.privacy is Privacy.PRIVATE and trust_rejection(hub.pool, job):
        return job  # it fails at once
    if (refusal := hub.rejection(job)) is not None:
        raise refusal
    offered = await gateway.payments.verify(_charge(request, job))
    if offered is None:
        return job
    settled = await offered.settle()
    reference = settled.reference
    log.info("settled job=%s price=%d reference=%r", job.id, terms.price, reference)
    at = gateway.clock.wall()
    names = (reference, offered.nonce)
    if not await gateway.store.ledger.claim_payment(names, job.id, at):
        raise offered.used
    caller.headers.update(settled.headers)
    account = payer_of(job)
    await hub.process(AccountTopUp(account, terms.price, f"payment {reference}"))
    return replace(job, terms=replace(terms, payment_ref=reference, settled=True))


@contextmanager
def exclusive_payment(gateway: PaidJobsGateway, job: Job) -> Iterator[None]:
    """Prevent a second payment for a job while one is in progress.

    A concurrent request with the same idempotency key gets StillRunning.
    """
    name = (job.owner, job.idempotency_key)
    if not job.idempotency_key:
        yield
        return
    if name in gateway.being_paid:
        raise StillRunning(
            "a payment under this Idempotency-Key is in progress: try again"
        )
    gateway.being_paid.add(name)
    try:
        yield
    finally:
        gateway.being_paid.remove(name)


def _charge(request: web.Request, job: Job) -> Charge:
    return Charge(
        str(request.url.with_query(None)),
        f"{job.terms.policy.name.capitalize()} compute job",
        job.terms.price,
        {name.lower(): value for name, value in request.headers.items()},
    )


class CommittedJob(msgspec.Struct, frozen=True):
    job_id: str


class EmptyObject(msgspec.Struct, frozen=True):
    """An empty object."""


EMPTY_OBJECT = EmptyObject()


class NoTrustedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a private job that no worker may run.

    ``error`` begins with ``no_trusted_worker``; the reason follows, because the
    original's SDK shows this field only.
    """

    error: str
    job_id: str


async def read_json_body(
    gateway: PaidJobsGateway, request: web.Request, size_max: int = BODY_MAX
) -> bytes:
    """Return the body of a JSON request; empty for other types, as in the original.

    This also rejects web pages: browsers send JSON to other origins only if these allow
    it.  Raises what ``BodyReader.read`` does.
    """
    if request.content_type != BODY_TYPE:
        return b""
    return await gateway.bodies.read(request, size_max)


async def commit_job(
    gateway: PaidJobsGateway, request: web.Request, caller: ApiCaller, *, policy: Policy
) -> web.Response:
    decode = partial(decode_commit, policy=policy, prices=gateway.prices)
    if request.content_type != BODY_TYPE:
        work, terms = decode(b"")
    else:
        work, terms = await gateway.bodies.decode(request, caller.name, decode)
    if terms.webhook is not None:
        _check_webhook(gateway, caller, terms.webhook)
    moderation = gateway.moderation_for(caller.name)
    given = work.payload if isinstance(work, Task) else work.text
    if moderation is not None and moderation.blocks_value(given):
        raise InvalidRequest("the payload matches the moderation list", "payload")
    job = build_job(gateway, request, work, caller, terms=terms)
    accepting = _submit(gateway, request, caller, job)
    if gateway.payments is not NO_PAYMENTS:
        accepting = run_to_end(accepting)
    try:
        job_id = await accepting
    except PaymentDue as error:
        record_of(request).error = error_status(error).code
        # Clients read the header; the original's body is empty as well.
        answer = json_response(EMPTY_OBJECT, 402)
        answer.headers.update(error.headers)
        return answer
    if terms.privacy is Privacy.PRIVATE:
        stored = await gateway.store.summary(job_id)
        reason = (stored.error if stored is not None else None) or ""
        if reason.startswith(NO_TRUSTED_WORKER):
            return json_response(NoTrustedWorker(error=reason, job_id=job_id), 422)
    return json_response(CommittedJob(job_id), 201)


for policy in Policy:
    api.post(
        f"/v1/jobs/commit/{policy.value}",
        f"Commit a {policy.value} job",
        Scope.USE,
        by_calls=True,
        answer=CommittedJob,
        body=CommitJob,
        status=201,
    )(partial(commit_job, policy=policy))


async def _submit(
    gateway: PaidJobsGateway, request: web.Request, caller: ApiCaller, job: Job
) -> JobId:
    """Submit a job; return its id, or that of the job with its idempotency key."""
    if gateway.payments is NO_PAYMENTS:
        return await _accept(gateway, request, caller, job)
    with exclusive_payment(gateway, job):
        paying = partial(pay, gateway, request, caller)
        return await _accept(gateway, request, caller, job, paying)


async def _accept(
    gateway: PaidJobsGateway,
    request: web.Request,
    caller: ApiCaller,
    job: Job,
    paying: Pay | None = None,
) -> JobId:
    async with gateway.access.submit(job, caller, paying) as reader:
        record_of(request).set_reader(reader)
    return reader.job_id


def _check_webhook(
    gateway: PaidJobsGateway, caller: ApiCaller, webhook: Webhook
) -> None:
    if gateway.egress_policy is EgressPolicy.OFF:
        raise InvalidRequest(
            "webhook: the coordinator sends no webhooks (--webhooks off): poll the job "
            "with ?wait=",
            "webhook",
        )
    if caller.key is ANONYMOUS_KEY:
        raise InvalidRequest(
            "webhook: only for clients with a key: send the header `Authorization: "
            "Bearer KEY`",
            "webhook",
        )
    host = urlsplit(webhook.url).hostname or ""
    if is_denied(host, gateway.egress_policy):
        raise InvalidRequest(
            f"webhook.url: {host} is not a public address, and the coordinator calls "
            "only public ones (--webhooks public)",
            "webhook.url",
        )
