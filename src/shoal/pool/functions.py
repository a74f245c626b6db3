"""Which functions the workers have, and why none of them can ever call one."""

import difflib
from collections.abc import Sequence
from itertools import islice

from shoal.domain.errors import CannotDo, Forbidden, ShoalError, UnknownTask
from shoal.domain.work import CALLS, Feature, Job, sought
from shoal.domain.worker import Offer
from shoal.pool.match import has
from shoal.pool.open_job import task_of
from shoal.pool.state import Pool

LOOKED_AT_MAX = 256  # workers asked what they can do
NAMED_MAX = 5  # functions named where none comes near
NEAR_AMONG = 100  # names that a wrong one is compared with, which takes time

ALL = "`shoal tasks ls`, pool.tasks() or GET /v1/tasks lists all"
NO_CODE = (
    "workers here run no code that is sent along: give the function a name with "
    "@shoal.task where a worker finds it, or start one with `shoal join --trust-code` "
    "for a fleet that has a token"
)
PLAIN_ONLY = (
    "{sought} is at workers that take plain values only, such as numbers, texts, lists "
    "and dictionaries: convert the arguments, or start `shoal join` with the function"
)


def uncallable(pool: Pool, job: Job, now: float) -> ShoalError | None:
    """Say why nobody in the pool can ever make a call as it is, or None.

    While there is no worker that calls functions it may wait for one, as it may for a
    function that a worker had a short while ago.
    """
    workers = pool.roster.with_model.get(CALLS, {})
    for worker in islice(workers.values(), LOOKED_AT_MAX):
        if _may_have(worker.offer, job):
            return None  # nearly always, so the rest may take its time
    offers = [worker.offer for worker in islice(workers.values(), LOOKED_AT_MAX)]
    if job.terms.near:
        offers = [offer for offer in offers if not offer.neighbour]
    if not offers or len(workers) > LOOKED_AT_MAX:
        return None
    name, needs = task_of(job.work), job.work.needs
    if Feature.CODE in needs:
        offers = [offer for offer in offers if Feature.CODE in offer.features]
        if not offers:
            return CannotDo(NO_CODE, "code")
    if name is not None:
        named = [offer for offer in offers if has(offer, name)]
        if not named:
            known = pool.roster.remembers(name, now)
            return None if known else UnknownTask(_unknown(offers, job))
        offers = named
    if all(offer.only_for and job.owner not in offer.only_for for offer in offers):
        return Forbidden(
            f"the workers with {sought(job.work)} work for other keys only"
        )
    if not any(needs <= offer.features for offer in offers):
        return CannotDo(PLAIN_ONLY.format(sought=sought(job.work)), "values")
    return None


def _may_have(offer: Offer, job: Job) -> bool:
    name = task_of(job.work)
    return (
        (name is None or has(offer, name))
        and job.work.needs <= offer.features
        and (not offer.only_for or job.owner in offer.only_for)
        and not (job.terms.near and offer.neighbour)
    )


def _unknown(offers: Sequence[Offer], job: Job) -> str:
    """Say that nobody has the function, and which name may have been meant."""
    name = task_of(job.work) or ""
    every = frozenset[str]().union(*(offer.tasks for offer in offers))
    names = sorted(islice(every, NEAR_AMONG))
    lacking = f"no worker has {sought(job.work)}"
    if not names:
        return f"{lacking}: none of those that are there has any function"
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"{lacking}: did you mean {' or '.join(near)}?"
    more = f"; {ALL}" if len(every) > NAMED_MAX else ""
    return f"{lacking}: there is {', '.join(names[:NAMED_MAX])}{more}"
