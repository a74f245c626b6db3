"""Decides which workers a user can trust with private jobs."""

from collections.abc import Iterable

from shoal.domain.job import Job, Privacy
from shoal.domain.worker import Offer
from shoal.pool.state import PoolState

NO_TRUSTED_WORKER = "no_trusted_worker"
"""The first word of the error of a private job without a trusted worker."""

UNPROVEN = "has not proved its key"


def pairing_rejection(pool: PoolState, public_key: str) -> str | None:
    """Return why the worker with a key cannot be paired; None if it can.

    A worker that is not connected can: it may prove its key later.
    """
    workers = pool.workers.values()
    offers = [each.offer for each in workers if each.offer.public_key == public_key]
    if not offers or any(offer.proven for offer in offers):
        return None
    return f"this worker {_remark(offers)}"


def trust_rejection(pool: PoolState, job: Job) -> str | None:
    """Return why no trusted worker can run a private job now; None if one can."""
    if job.terms.privacy is not Privacy.PRIVATE:
        return None
    trusted = pool.trusted_keys.get((job.owner, job.terms.user), set())
    workers = pool.roster.with_model.get(job.model, {}).values()
    offers = [each.offer for each in workers if each.offer.public_key in trusted]
    if any(offer.proven for offer in offers):
        return None
    unproven = [each.offer for each in workers if not each.offer.proven]
    if offers:
        problem = f"the paired worker {_remark(offers)}"
    elif trusted:
        problem = "none of the paired workers is connected"
    else:
        problem = "no worker is paired with the user"
        if any(offer.public_key for offer in unproven):
            problem += f"; one that is connected {_remark(unproven)}"
    return (
        f"{NO_TRUSTED_WORKER}: only paired workers may run a private job, and {problem}"
    )


def _remark(offers: Iterable[Offer]) -> str:
    """Return what a wire says of a worker that has not proved its key."""
    return next((offer.remark for offer in offers if offer.remark), UNPROVEN)
