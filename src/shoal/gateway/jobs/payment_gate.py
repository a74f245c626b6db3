"""Has a job paid for, after all else was checked and before it is handed over.

So nobody pays for what is refused, no work is done that is not paid for, and the
receipt names the payment.  Between the two lie moments in which a burst may fill the
queue, or the coordinator be killed: what was taken then stands in the accounts and in
the log.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from aiohttp import web

from shoal.coordinator.bookkeeping import payer_of
from shoal.domain.errors import StillRunning
from shoal.domain.work import Job, Privacy
from shoal.gateway.context import Gateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.jobs.payments import NO_PAYMENTS, Charge
from shoal.pool.inputs import AccountTopUp
from shoal.pool.react import why_untrusted

T = TypeVar("T")

log = logging.getLogger("shoal.payments")


async def pay(
    gateway: Gateway, request: web.Request, caller: ApiCaller, job: Job
) -> Job:
    """Have ``job`` paid for, if that is asked; return it with what the payment is.

    The payment is credited to the account that the job is charged to.  A job that was
    asked for before under the same idempotency key is not paid for again.

    Raises PaymentDue, PaymentsDown, StoreError, or what ``Hub.why_refused`` returns.
    """
    terms, hub = job.terms, gateway.hub
    if (
        gateway.payments is NO_PAYMENTS
        or terms.price == 0
        or await hub.is_duplicate(job)
    ):
        return job
    if terms.privacy is Privacy.PRIVATE and why_untrusted(hub.pool, job):
        return job  # it will fail at once
    if (refusal := hub.why_refused(job)) is not None:
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
    """Keep a job from being paid twice while it is paid for and handed over.

    Whoever asks meanwhile under the same idempotency key gets StillRunning.
    """
    name = (job.owner, job.idempotency_key)
    if gateway.payments is NO_PAYMENTS or not job.idempotency_key:
        yield
        return
    if name in gateway.being_paid:
        raise StillRunning(
            "the same is just being paid for under this Idempotency-Key: ask again"
        )
    gateway.being_paid.add(name)
    try:
        yield
    finally:
        gateway.being_paid.remove(name)


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Do ``work`` to its end even if the client leaves, whose money is on its way."""
    # In no task group, for that would cancel it; but nobody goes before it has ended.
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _charge(request: web.Request, job: Job) -> Charge:
    return Charge(
        str(request.url.with_query(None)),
        f"{job.terms.policy.name.capitalize()} compute job",
        job.terms.price,
        {name.lower(): value for name, value in request.headers.items()},
    )
