"""The open orders to load and unload models, and those that have failed lately."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shoal.domain.facts import JobCancelled, JobCompleted, JobEnd
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.work import ModelAction, ModelOrder

FAILURE_PAUSE = 60.0  # seconds until a machine is asked again to load what it could not
FAILURE_PAUSE_MAX = 3600.0  # seconds: doubled by each failure until then
FAILURES_MAX = 4096  # that are remembered
GROUP_PAUSE = 2.0  # seconds after a group's load: another group may have no such fault
OFFER_PAUSE = 5.0  # seconds until a machine that loaded a model is asked again for it


@dataclass(frozen=True, slots=True)
class OpenOrder:
    """An order that has not ended."""

    job_id: JobId
    order: ModelOrder


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """Why a machine could not load a model, and until when it is not asked again.

    Without a reason, it has said that it loaded it: the model is offered in a moment.
    ``count`` is how often that has happened, one after the other.
    """

    reason: str
    until: float
    pause: float
    count: int = 1


@dataclass(slots=True)
class OpenOrders:
    """The orders, by machine (the worker with its library) and model."""

    _open: dict[tuple[str, str], OpenOrder] = field(default_factory=dict)
    _failed: dict[tuple[str, str], FailedLoad] = field(default_factory=dict)

    def __iter__(self) -> Iterator[OpenOrder]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)

    def find(self, machine: str, model: str) -> OpenOrder | None:
        """Return the open order of a machine about a model, or None."""
        return self._open.get((machine, model))

    @property
    def is_loading(self) -> bool:
        """Whether a machine is loading any model."""
        orders = (each.order for each in self._open.values())
        return any(each.action is ModelAction.LOAD for each in orders)

    def loading(self, model: str) -> list[OpenOrder]:
        """Return the open orders to load a model."""
        return [
            each
            for each in self._open.values()
            if each.order.name == model and each.order.action is ModelAction.LOAD
        ]

    def concern(self, model: str) -> bool:
        """Return whether a machine loads or unloads a model, or makes room for it."""
        return any(
            each.order.room_for == model or each.order.name == model
            for each in self._open.values()
        )

    def of_machine(self, machine: str) -> Mapping[str, ModelOrder]:
        """Return the open orders of a machine, by model."""
        return {
            model: each.order
            for (where, model), each in self._open.items()
            if where == machine
        }

    def failures(self, machine: str, now: float) -> Mapping[str, tuple[float, str]]:
        """Return until when a machine is not asked again for which models, and why."""
        return {
            model: (each.until, each.reason)
            for (where, model), each in self._failed.items()
            if where == machine and each.until > now
        }

    def doubts(self, machine: str) -> Mapping[str, int]:
        """Return how often a machine could not load models, since it last could."""
        return {
            model: each.count
            for (where, model), each in self._failed.items()
            if where == machine and each.reason
        }

    def has_failed(self, machine: str, model: str, now: float) -> bool:
        """Return whether a machine could lately not load a model."""
        known = self._failed.get((machine, model))
        return known is not None and bool(known.reason) and known.until > now

    def open(self, job: Job) -> None:
        """Note an order that was submitted."""
        if isinstance(order := job.work, ModelOrder):
            self._open[order.machine, order.name] = OpenOrder(job.id, order)

    def end(self, job: Job, fact: JobEnd, now: float) -> None:
        """Note the end of an order."""
        if not isinstance(order := job.work, ModelOrder):
            return
        key = (order.machine, order.name)
        known = self._open.get(key)
        if known is not None and known.job_id == job.id:
            del self._open[key]
        before = self._failed.pop(key, None)
        loaded = isinstance(fact, JobCompleted)
        if isinstance(fact, JobCancelled) or (
            loaded and order.action is ModelAction.UNLOAD
        ):
            return
        reason = "" if isinstance(fact, JobCompleted) else fact.error or "no reason"
        pause = OFFER_PAUSE if loaded else FAILURE_PAUSE
        if order.group:
            pause = GROUP_PAUSE
        # A machine that lost the model later is asked at once, unlike one that never
        # offers it.
        count = 1
        if (
            before is not None
            and bool(before.reason) != loaded
            and (not loaded or now - before.until < before.pause)
        ):
            pause = min(FAILURE_PAUSE_MAX, 2 * before.pause)
            count = before.count + 1
        self._failed[key] = FailedLoad(reason, now + pause, pause, count)
        if len(self._failed) > FAILURES_MAX:
            del self._failed[next(iter(self._failed))]
