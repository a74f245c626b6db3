"""The offers and the load of the whole pool, for other pools."""

from collections import defaultdict
from collections.abc import Collection, Iterable

from shoal.domain.ids import peer_of
from shoal.domain.job import Privacy
from shoal.domain.job_kinds import INFERENCE_KINDS, SHARED_KINDS
from shoal.domain.work import Feature
from shoal.domain.worker import Offer, WorkerLoad
from shoal.pool.eligibility import POINTS_MAX
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker

MODELS_MAX = 256  # models that are offered; of more, the first by name
SLOTS_MAX = 4096  # the most slots that the pool declares

NAMED_KINDS = SHARED_KINDS - INFERENCE_KINDS
"""Kinds that run without a model, by a name of their own."""

NOT_OFFERED = frozenset({Feature.CONTINUE})
"""Features of some workers but not of the pool: an answer here starts empty."""


def own_offers(pool: PoolState, without: Collection[str] = ()) -> tuple[Offer, ...]:
    """Return an offer for each model of this pool's own workers, by name.

    ``without`` names peers whose models are left out, as in ``peer_of``.

    Tasks without a model are offered as the model ''.  Models of other pools are left
    out, because their use would be forwarded; so are offers for certain keys only.  A
    worker that is temporarily unfit still counts: otherwise all peers would get the
    offers again whenever a worker's load changes.
    """
    offers: defaultdict[str, list[Offer]] = defaultdict(list)
    for worker in pool.workers.values():
        if _is_unrestricted(worker) and peer_of(worker.id) not in without:
            for model in worker.offer.models or ("",):
                offers[model].append(worker.offer)
    return tuple(_merged(model, offers[model]) for model in sorted(offers)[:MODELS_MAX])


def own_slots(pool: PoolState) -> int:
    """Return the slots of the workers in ``own_offers``."""
    workers = filter(_is_unrestricted, pool.workers.values())
    return sum(worker.counted_slots for worker in workers)


def offering_peers(pool: PoolState) -> frozenset[str]:
    """Return the peers, as in ``peer_of``, whose workers are in ``own_offers``."""
    return frozenset(
        peer_of(worker.id)
        for worker in pool.workers.values()
        if _is_unrestricted(worker)
    )


def own_load(pool: PoolState, without: Collection[str] = ()) -> WorkerLoad:
    """Return the load of the pool: all jobs, those that wait, and whether it is full.

    It is full if none of the workers in ``own_offers`` has a free slot.
    """
    free = [
        worker.accepts_jobs and worker.busy_slots < worker.offer.slots
        for worker in pool.workers.values()
        if _is_unrestricted(worker) and peer_of(worker.id) not in without
    ]
    full = bool(free) and not any(free)
    return WorkerLoad(queued=len(pool.jobs), waiting=pool.queued, full=full)


def _is_unrestricted(worker: Worker) -> bool:
    offer = worker.offer
    if offer.neighbour or offer.only_for or offer.slots <= 0:
        return False
    if offer.last_resort is not None:  # it is for keys of this pool
        return False
    if offer.privacy is Privacy.PRIVATE:  # jobs of peers are public
        return False
    if not (offer.models or offer.kinds & NAMED_KINDS):
        return False
    leaving = worker.draining or worker.suspension
    return not leaving and worker.points < POINTS_MAX


def _merged(model: str, offers: list[Offer]) -> Offer:
    """Return an offer that holds for whichever of the workers gets a job."""
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
        pythons=_pythons(offer for offer in offers if Feature.CODE in offer.features),
    )


def _tasks(offers: Iterable[Offer]) -> frozenset[str]:
    """Return the names of the tasks that workers offer; empty: any, or none at all."""
    named = [offer.tasks for offer in offers]
    return frozenset().union(*named) if all(named) else frozenset()


def _pythons(offers: Iterable[Offer]) -> frozenset[str]:
    """Return the versions of Python that run code; empty if some are unknown."""
    stated = [offer.pythons for offer in offers]
    return frozenset().union(*stated) if all(stated) else frozenset()
