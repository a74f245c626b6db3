"""What the pool as a whole can run for another pool."""

from collections import defaultdict
from collections.abc import Iterable

from shoal.domain.job_kinds import INFERENCE_KINDS, SHARED_KINDS
from shoal.domain.work import Feature
from shoal.domain.worker import Offer, WorkerLoad
from shoal.pool.eligibility import POINTS_MAX
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker

MODELS_MAX = 256  # models that are offered; of more, the first by name
SLOTS_MAX = 4096  # more jobs at a time are believed of nobody

NAMED_KINDS = SHARED_KINDS - INFERENCE_KINDS
"""Kinds that run without a model, by a name of their own."""

NOT_OFFERED = frozenset({Feature.CONTINUE})
"""What some workers can do, and the pool cannot: an answer here begins empty."""


def own_offers(pool: PoolState) -> tuple[Offer, ...]:
    """Return an offer for each model that workers of our own have, by name.

    Tasks without a model are offered as the model ''.  What other pools have is left
    out, for they would be asked on our behalf; so is what is for certain keys only.  A
    worker that is unfit for a while still counts: else every hot afternoon would have
    all peers learn the models anew.
    """
    offers: defaultdict[str, list[Offer]] = defaultdict(list)
    for worker in pool.workers.values():
        if _is_unrestricted(worker):
            for model in worker.offer.models or ("",):
                offers[model].append(worker.offer)
    return tuple(_merged(model, offers[model]) for model in sorted(offers)[:MODELS_MAX])


def own_load(pool: PoolState) -> WorkerLoad:
    """Return how busy the pool is: with all jobs that wait, or that a worker has."""
    return WorkerLoad(queued=len(pool.jobs))


def _is_unrestricted(worker: Worker) -> bool:
    offer = worker.offer
    if offer.neighbour or offer.only_for or offer.slots <= 0:
        return False
    if not (offer.models or offer.kinds & NAMED_KINDS):
        return False
    return not worker.draining and worker.points < POINTS_MAX


def _merged(model: str, offers: list[Offer]) -> Offer:
    """Return what can be relied on, whichever of the workers gets a job."""
    return Offer(
        kinds=frozenset().union(*(offer.kinds for offer in offers)) & SHARED_KINDS,
        models=frozenset({model}) if model else frozenset(),
        slots=min(sum(offer.slots for offer in offers), SLOTS_MAX),
        features=frozenset.intersection(*(offer.features for offer in offers))
        - NOT_OFFERED,
        context=min((each.context for each in offers if each.context), default=0),
        tasks=_tasks(offer for offer in offers if offer.kinds & NAMED_KINDS),
        streams=all(offer.streams for offer in offers),
        neighbour=True,
    )


def _tasks(offers: Iterable[Offer]) -> frozenset[str]:
    """Return the names of tasks that somebody does; none: any, or none at all."""
    named = [offer.tasks for offer in offers]
    return frozenset().union(*named) if all(named) else frozenset()
