"""Collects the payment for a job after all other checks, and before it is submitted.

So a rejected job is never paid for, no job runs unpaid, and the receipt names the
payment.  If the queue fills up or the coordinator is killed between payment and
submission, the payment is in the accounts and in the log.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from aiohttp import web

from shoal.coordinator.bookkeeping import payer_of
from shoal.domain.errors import StillRunning
from shoal.domain.job import Job, Privacy
from shoal.gateway.context import Gateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.jobs.payments import NO_PAYMENTS, Charge
from shoal.pool.inputs import AccountTopUp
from shoal.pool.trust import trust_rejection

log = logging.getLogger("shoal.gateway")


async def pay(
    gateway: Gateway, request: web.Request, caller: ApiCaller, job: Job
) -> Job:
    """Collect the payment for ``job``, if one is due; return it with its reference.

    The payment is credited to the account that the job is charged to.  A repeated
    request with the same idempotency key is not paid for again.

    Raises PaymentDue, PaymentsDown, StoreError, or what ``Hub.rejection`` returns.
    """
    terms, hub = job.terms, gateway.hub
    if (
        gateway.payments is NO_PAYMENTS
        or terms.price == 0
        or await hub.is_duplicate(job)
    ):
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
    if not await gateway.store.ledger.claim_payment(reference, job.id, at):
        raise offered.used
    caller.headers.update(settled.headers)
    account = payer_of(job)
    await hub.process(AccountTopUp(account, terms.price, f"payment {reference}"))
    return replace(job, terms=replace(terms, payment_ref=reference))


@contextmanager
def exclusive_payment(gateway: Gateway, job: Job) -> Iterator[None]:
    """Prevent a second payment for a job while one is in progress.

    A concurrent request with the same idempotency key gets StillRunning.
    """
    name = (job.owner, job.idempotency_key)
    if gateway.payments is NO_PAYMENTS or not job.idempotency_key:
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
