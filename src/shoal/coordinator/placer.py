"""Orders machines to load and unload models, as the pool's placement decides.

A deployment with a timetable asks for something only at some times of the week.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache

from msgspec import structs

from shoal.config.schedule import is_open, parse_window
from shoal.coordinator.hub import Hub
from shoal.domain import facts
from shoal.domain.errors import ShoalError
from shoal.domain.facts import DeploymentSet
from shoal.domain.ids import JobId
from shoal.domain.job import Job, JobTerms, TimeLimits
from shoal.domain.work import MODEL_QUEUE, ModelOrder
from shoal.pool.inputs import ModelUnplaced
from shoal.pool.models.demand import present_placement
from shoal.pool.models.machine import Described, DescribeMachine, PlacementRules
from shoal.pool.models.placement import DEFAULT_RULES
from shoal.transports.clock import Clock, Timer

LOOK_EVERY = 30.0  # seconds between looks at timetables, whose unit is a minute


_window = lru_cache(1024)(parse_window)  # with each placement


def local_time(clock: Clock) -> datetime:
    """Return the local time, as an operator at this machine sees it."""
    return datetime.fromtimestamp(clock.wall(), UTC).astimezone()


def is_due(deployment: DeploymentSet, local: datetime) -> bool:
    """Return whether a deployment keeps its model loaded at a local time."""
    return is_open([_window(each) for each in deployment.schedule], local)


def deployments_at(
    deployments: Mapping[str, DeploymentSet], local: datetime, rules: PlacementRules
) -> Mapping[str, DeploymentSet]:
    """Return what deployments ask for at a local time.

    Outside of its times one keeps nothing loaded: its model is loaded for requests, as
    it says, and unloaded when it was idle for as long as it says, or as any model.
    """
    if not any(each.schedule for each in deployments.values()):
        return deployments
    return {
        name: each
        if is_due(each, local)
        else structs.replace(
            each,
            replicas=0,
            most=0,
            pinned=False,
            idle=rules.idle if each.idle is None else each.idle,
        )
        for name, each in deployments.items()
    }


SOON = 0.01  # seconds from a change to a placement: it is for all that changed by then
INTERVAL = 2.0  # seconds between placements while jobs come and go: demand changes
UNPLACED_AFTER = 120.0  # seconds for room to appear, before jobs for a model are ended
"""More than a load of another model takes, and the time that this stays."""
DAY = 86_400.0  # seconds
LIMITS = TimeLimits(DAY, 120.0, 120.0, DAY, without_worker=10.0)
"""Of an order: progress of a load counts as output."""

TERMS = JobTerms(detached=True)

RELEVANT: Collection[type[facts.Fact]] = {
    facts.WorkerJoined,
    facts.WorkerLeft,
    facts.WorkerDraining,
    facts.WorkerSuspended,
    facts.WorkerResumed,
    facts.DeploymentSet,
    facts.DeploymentRemoved,
    facts.JobFailed,
    facts.JobExpired,
    facts.JobCancelled,
}
"""Facts after which something else may have to be loaded; the last are of orders."""

log = logging.getLogger("shoal.coordinator")


def submit_order(hub: Hub, order: ModelOrder) -> JobId:
    """Give an order to its machine; return its job.  Raises as ``Hub.submit``."""
    job = Job(hub.new_id(), order, LIMITS, terms=TERMS)
    hub.submit(job)
    return job.id


class Placer:
    """Decides after each change, and from time to time, what is loaded where.

    Args:
        describe: returns what a machine says about itself, by its peer's name.
        rules: when and where models are loaded and unloaded.
    """

    def __init__(
        self,
        hub: Hub,
        clock: Clock,
        describe: DescribeMachine = Described,
        rules: PlacementRules = DEFAULT_RULES,
    ) -> None:
        self._hub = hub
        self._clock = clock
        self._describe = describe
        self._rules = rules
        self._timer: Timer | None = None
        self._due = 0.0
        self._submitted: set[JobId] = set()
        hub.subscribe(self._on_facts)

    def _on_facts(self, batch: Sequence[facts.Fact]) -> None:
        roster = self._hub.pool.roster
        if MODEL_QUEUE not in roster.with_model:
            return  # as in most pools: no machine loads models, or lends memory
        # With each batch: no function is called where nothing is to be done.
        due = bool(roster.wanted - roster.with_model.keys())
        for each in batch:
            due |= type(each) in RELEVANT
        self._place_at(self._clock.now() + (SOON if due else INTERVAL))

    def _place_at(self, at: float) -> None:
        if self._timer is not None:
            if self._due <= at:
                return
            self._timer.cancel()
        self._due = at
        self._timer = self._clock.call_at(at, self._place)

    def _place(self) -> None:
        self._timer = None
        pool, answers = self._hub.pool, self._hub.answers
        if MODEL_QUEUE not in pool.roster.with_model:
            return
        self._submitted = {
            each
            for each in self._submitted
            if each in answers and each not in pool.jobs
        }
        if self._submitted:  # the pool does not know them yet
            self._place_at(self._clock.now() + SOON)
            return
        now, rules, local = self._clock.now(), self._rules, local_time(self._clock)
        deployments = deployments_at(pool.deployments, local, rules)
        _, placement = present_placement(pool, now, self._describe, rules, deployments)
        for each in placement.orders:
            log.info(
                "%s model=%s machine=%s: %s",
                *(each.work.action.value, each.work.name, each.work.machine),
                each.reason,
            )
            try:
                self._submitted.add(submit_order(self._hub, each.work))
            except ShoalError as error:  # the store fails, or the coordinator stops
                log.warning("not ordered model=%s: %s", each.work.name, error)
        for model, reason in placement.unplaced.items():
            self._end_waiting(model, reason, at_once=True)
        for model, reason in placement.pending.items():
            self._end_waiting(model, reason, at_once=False)
        again = self._clock.now() + INTERVAL
        if not self._hub.pool.queues:
            again = max(again, placement.again)
        if deployments is not pool.deployments:
            again = min(again, self._clock.now() + LOOK_EVERY)
        if again < math.inf:
            self._place_at(again)

    def _end_waiting(self, model: str, reason: str, *, at_once: bool) -> None:
        """End the jobs that wait for a model in vain."""
        pool, now = self._hub.pool, self._clock.now()
        queue = pool.queues.get(model)
        if queue is not None and (at_once or now - queue.since >= UNPLACED_AFTER):
            self._hub.post(ModelUnplaced(model, reason))
