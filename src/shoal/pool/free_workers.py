"""The workers with a free slot for a model, and the best of them for a job."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import TypeAlias

import msgspec

from shoal.domain.ids import WorkerId
from shoal.domain.job import Policy
from shoal.domain.money import dollars
from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import DeviceKind
from shoal.pool.context_limits import add_shortest
from shoal.pool.eligibility import ineligibility, unsuitability
from shoal.pool.open_job import CHARACTERS_PER_TOKEN, Need, OpenJob
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker

SESSION_COST_FACTOR = (
    1.5  # times the least cost that a worker with the session may have
)
PROMPT_PACE = 16  # tokens of a prompt that are read while one is written, about
READERS_EXAMINED_MAX = 8  # of one beginning
CONTEXT_MATTERS_FROM = (
    512  # tokens from which a worker with enough context is preferred
)

ASKS_MAX = 4  # prices that are compared: each costs a look at all free workers

PREFERRED_DEVICE: Mapping[tuple[Policy, bool], DeviceKind] = {
    (Policy.FAST, False): DeviceKind.DESKTOP,
    (Policy.FAST, True): DeviceKind.DESKTOP,
    (Policy.CHEAP, True): DeviceKind.PHONE,
}
"""The preferred kind of device, by the job's policy and for tasks."""


class PromisedSlots(defaultdict[WorkerId, int]):
    """Slots promised in the plan so far.

    ``streaming`` are the workers that get a stream or a member of a gang, which takes
    long.
    ``by_queue`` are the workers with promised slots, by ``Worker.queues``.  What one
    worker of an engine is promised, none of the others has.
    """

    def __init__(self) -> None:
        super().__init__(int)
        self.streaming: set[WorkerId] = set()
        self.by_queue: defaultdict[str, list[Worker]] = defaultdict(list)

    def add(self, worker: Worker, slots: int = 1) -> None:
        """Promise slots of a worker."""
        for each in worker.sharing:
            if not self[each.id] and each.indexed_as is not None:
                for queue in each.queues:
                    self.by_queue[queue].append(each)
            self[each.id] += slots

    def add_member(self, worker: Worker, slots: int) -> None:
        """Promise slots of a worker to a gang; no call is prefetched behind it."""
        self.streaming.add(worker.id)
        if slots > 0:
            self.add(worker, slots)


Preference: TypeAlias = Callable[[Worker], bool]


class _CostGroup(msgspec.Struct):
    """The free workers of one cost: those examined and left over, and the others.

    ``moved`` came here when they were promised a slot, so they come after the others.
    Each worker is stored with its promised slots at the time: if it has more by now, it
    is also stored under a higher cost.
    """

    rest: Iterator[Worker]
    exhausted: bool = False  # whether all of ``rest`` were examined
    seen: list[tuple[Worker, int]] = msgspec.field(default_factory=list)
    moved: list[tuple[Worker, int]] = msgspec.field(default_factory=list)

    def take(self, fits: Preference, promised: PromisedSlots) -> Worker | None:
        """Remove and return the first worker that fits."""
        return (
            (_first(self.seen, fits, promised) if self.seen else None)
            or self._next(fits, promised)
            or (_first(self.moved, fits, promised) if self.moved else None)
        )

    def _next(self, fits: Preference, promised: PromisedSlots) -> Worker | None:
        for worker in self.rest:
            if worker.id in promised:
                continue
            if fits(worker):
                return worker
            self.seen.append((worker, 0))
        self.exhausted = True
        return None

    @property
    def is_empty(self) -> bool:
        """Whether no worker is left in it."""
        return self.exhausted and not (self.seen or self.moved)


def _first(
    workers: list[tuple[Worker, int]], fits: Preference, promised: PromisedSlots
) -> Worker | None:
    index = 0
    while index < len(workers):
        worker, then = workers[index]
        if promised.get(worker.id, 0) != then:
            del workers[index]  # it is stored elsewhere by now
        elif fits(worker):
            del workers[index]
            return worker
        else:
            index += 1
    return None


class FreeWorkers:
    """The workers with a free slot for one model, as a plan proceeds.

    A worker moves to a higher cost with each slot it is promised for, so the first that
    can take a job, from the lowest cost on, is the best.  Workers are examined only as
    far as jobs need: a pool may have thousands of idle ones.
    """

    def __init__(self, pool: PoolState, model: str, promised: PromisedSlots) -> None:
        self._pool = pool
        self._promised = promised
        self._model = model
        self._count = 0
        self._stream_waits = False  # then no call is prefetched, or it would starve
        # The shortest jobs that exceeded every worker, among those that are alike.  A
        # thousand may wait while workers are free for others only.
        self._unassignable: dict[tuple[str, Need], list[OpenJob]] = {}
        self._lengths_matter = bool(pool.roster.refused_lengths[model])
        # One worker has read all that the pool has.
        self._has_choice = len(pool.roster.with_model.get(model, ())) > 1
        self._promises = 0
        # Results of ``owners_served``, and the number of promises before each.
        self._owners: dict[Need, tuple[int, frozenset[str] | None]] = {}
        self._groups: dict[float, _CostGroup] = {}
        for level, workers in pool.roster.available.get(model, {}).items():
            self._count += len(workers)
            cost = pool.cost(level)
            if (group := self._groups.get(cost)) is None:
                self._groups[cost] = _CostGroup(iter(workers.values()))
            else:
                group.rest = chain(group.rest, workers.values())
        # A worker with several models may have been promised to a job of another.
        for worker in promised.by_queue.get(model, ()):
            self._count -= 1
            self._file(worker)

    def __bool__(self) -> bool:
        return self._count > 0

    def assign(self, job: OpenJob) -> tuple[Worker, str] | None:
        """Promise a slot of the best worker for ``job``; return why it is best."""
        alike = job.job.owner, job.need
        longer = self._unassignable.get(alike)
        if longer and any(self._reaches(job, each) for each in longer):
            return None
        if (worker := self._session_worker(job)) is not None:
            return worker, self._promise(worker, "has served the conversation before")
        for wish, reason in _preferences(job, self._pool):
            if (worker := self._find(job, wish)) is not None:
                if self._has_choice and (read := self._reader(job, worker, wish)):
                    self._put_back(worker)
                    worker, tokens = read
                    reason = (
                        "has the beginning of the conversation "
                        f"(about {tokens:,} tokens) in its cache"
                    )
                if job.kind is JobKind.CALL_STREAM:
                    self._promised.streaming.add(worker.id)
                return worker, self._promise(worker, reason)
        self._stream_waits |= job.kind is JobKind.CALL_STREAM
        if not job.last_lease:  # no worker has refused it or runs it
            shortest = self._unassignable.setdefault(alike, [])
            add_shortest(shortest, job, self._reaches)
        return None

    def _reaches(self, job: OpenJob, other: OpenJob) -> bool:
        """Return whether a job is too long for all workers for which another is."""
        if job.tokens_min < other.tokens_min:
            return False
        return not self._lengths_matter or job.length.reaches(other.length)

    def owners_served(self, job: OpenJob) -> frozenset[str] | None:
        """Return the owners whose jobs may get a slot if they need what ``job`` does.

        None: any may.
        """
        need = job.need
        promises, found = self._owners.get(need, (-1, None))
        if promises != self._promises:
            found = self._served_by(self._suitable(job))
            self._owners[need] = self._promises, found
        return found

    def assign_idle(self, job: OpenJob) -> tuple[Worker, str] | None:
        """Promise a slot of the best worker for ``job`` that is idle."""

        def idle(worker: Worker) -> bool:
            at_work = worker.busy_slots or worker.load.queued
            return not at_work and worker.id not in self._promised

        worker = self._find(job, idle)
        return None if worker is None else (worker, self._promise(worker, "idle"))

    def _session_worker(self, job: OpenJob) -> Worker | None:
        """Return the worker that had the session before, unless it is much busier.

        It has the beginning in its cache, which is worth a wait behind other jobs.  If
        a job of the session still runs there, the session is no sequential
        conversation: its jobs are better run in parallel.
        """
        known, last = self._pool.sessions.get(job.job.session, (None, None))
        if known is None or last in self._pool.jobs:
            return None
        worker = self._pool.workers.get(known)
        if worker is None or job.started or ineligibility(job, worker) is not None:
            return None
        if not self._has_room(job, worker):
            return None
        dearest = SESSION_COST_FACTOR * min(self._groups)
        return worker if self._cost(worker) <= dearest else None

    def _reader(
        self, job: OpenJob, choice: Worker, wish: Preference | None
    ) -> tuple[Worker, int] | None:
        """Return the worker with the longest beginning of a chat, and its tokens.

        None if each is so much busier than ``choice`` that reading all of the prompt
        there takes less time.
        """
        known = self._pool.beginnings.readers
        if job.started or not known or job.kind is not JobKind.CHAT:
            return None
        if job.job.terms.policy is Policy.CHEAP and self._pool.roster.asks:
            return None  # its price matters more
        # In the time that a written token takes.
        prompt = job.characters / CHARACTERS_PER_TOKEN / PROMPT_PACE
        wanted = getattr(job.job.work, "max_tokens", None) or math.inf
        answer = min(wanted, self._pool.speeds.answer_tokens)
        dearest = self._cost(choice) * (prompt + answer)
        for key, characters in reversed(job.beginnings):
            if (readers := known.get(key)) is None:
                continue
            tokens = characters // CHARACTERS_PER_TOKEN
            left = max(0.0, prompt - tokens / PROMPT_PACE) + answer
            costs = [
                (self._cost(worker), number, worker)
                for number, worker_id in enumerate(
                    islice(reversed(readers), READERS_EXAMINED_MAX)
                )
                if (worker := self._pool.workers[worker_id])
                and (wish is None or wish(worker))
                and ineligibility(job, worker) is None
                and self._has_room(job, worker)
            ]
            if costs and (best := min(costs))[0] * left <= dearest:
                return best[2], tokens
        return None

    def _put_back(self, worker: Worker) -> None:
        """Undo that a worker was found, before it was promised a slot."""
        group = self._groups.setdefault(self._cost(worker), _CostGroup(iter(())))
        group.seen.insert(0, (worker, self._promised.get(worker.id, 0)))

    def _promise(self, worker: Worker, reason: str) -> str:
        """Promise a slot; return the reason with the worker's previous state."""
        share = worker.utilization(self._promised[worker.id])
        moved = [*filter(self._is_counted, worker.sharing)]
        self._promised.add(worker)
        self._promises += 1
        self._count -= len(moved)
        for each in moved:
            self._file(each)
        pace = "" if worker.pace is None else f", about {worker.pace:.0f} tokens/s"
        return f"{reason}: {share:.0%} of its slots in use{_other_load(worker)}{pace}"

    def _find(self, job: OpenJob, wish: Preference | None) -> Worker | None:
        def fits(worker: Worker) -> bool:
            wished = wish is None or wish(worker)
            return (
                wished
                and ineligibility(job, worker) is None
                and self._has_room(job, worker)
            )

        for cost in sorted(self._groups):
            group = self._groups[cost]
            worker = group.take(fits, self._promised)
            if worker is not None:
                return worker
            if group.is_empty:
                del self._groups[cost]
        return None

    def _suitable(self, job: OpenJob) -> Iterator[Worker]:
        levels = self._pool.roster.available.get(self._model, {}).values()
        for worker in chain.from_iterable(level.values() for level in levels):
            if (
                worker.free_slots > self._promised.get(worker.id, 0)
                and unsuitability(job, worker) is None
                and self._has_room(job, worker)
            ):
                yield worker

    @staticmethod
    def _served_by(workers: Iterable[Worker]) -> frozenset[str] | None:
        owners: set[str] = set()
        for worker in workers:
            if not worker.offer.only_for:
                return None
            owners |= worker.offer.only_for
        return frozenset(owners)

    def _has_room(self, job: OpenJob, worker: Worker) -> bool:
        """Return whether a slot is free, or the job may be prefetched."""
        promised = self._promised.get(worker.id, 0)
        if worker.busy_slots + promised < worker.slots:
            return True
        behind_stream = self._stream_waits or worker.id in self._promised.streaming
        return job.kind is JobKind.CALL and not behind_stream

    def _cost(self, worker: Worker) -> float:
        return self._pool.cost(worker.cost_level(self._promised.get(worker.id, 0)))

    def _is_counted(self, worker: Worker) -> bool:
        """Return whether it is among the workers of the model with a free slot."""
        known = worker.indexed_as is not None and self._model in worker.queues
        return known and worker.free_slots > self._promised.get(worker.id, 0)

    def _file(self, worker: Worker) -> None:
        promised = self._promised[worker.id]
        if worker.free_slots > promised:
            self._count += 1
            cost = self._cost(worker)
            if (group := self._groups.get(cost)) is None:
                group = self._groups[cost] = _CostGroup(iter(()))
            group.moved.append((worker, promised))


def _preferences(
    job: OpenJob, pool: PoolState
) -> Iterator[tuple[Preference | None, str]]:
    """Yield the preferences for a worker, the best first, with their descriptions.

    A CHEAP job prefers the workers that ask the least, and comes to those that ask more
    than its price only if no other worker can take it: again to those that ask least.
    """
    terms, asks = job.job.terms, pool.roster.asks
    if terms.policy is not Policy.CHEAP or not asks:
        return _preferences_beside_price(job, pool)
    return _preferences_by_price(job, pool)


def _preferences_by_price(
    job: OpenJob, pool: PoolState
) -> Iterator[tuple[Preference | None, str]]:
    terms, asks = job.job.terms, pool.roster.asks
    ascending = [] if job.started else sorted(asks)
    above = bisect_right(ascending, terms.price)
    for ask in ascending[:above][:ASKS_MAX]:
        yield partial(_asks, ask), f"asks the lowest price, {dollars(ask)}"
    for wish, reason in _preferences_beside_price(job, pool):
        yield partial(_is_affordable, terms.price, wish), reason
    for ask in ascending[above:][:ASKS_MAX]:
        yield partial(_asks, ask), f"asks the least above the price, {dollars(ask)}"
    yield from _preferences_beside_price(job, pool)


def _asks(ask: int, worker: Worker) -> bool:
    return worker.offer.ask == ask


def _is_affordable(price: int, wish: Preference | None, worker: Worker) -> bool:
    """Return whether a worker asks no more than ``price`` and meets the ``wish``."""
    ask = worker.offer.ask
    return (ask is None or ask <= price) and (wish is None or wish(worker))


def _preferences_beside_price(
    job: OpenJob, pool: PoolState
) -> Iterator[tuple[Preference | None, str]]:
    device = PREFERRED_DEVICE.get((job.job.terms.policy, job.kind is JobKind.TASK))
    if device is not None and 0 < pool.roster.devices[device] < len(pool.workers):
        kind = f"is a {device.value}, as the job's policy prefers"
        yield (lambda worker: worker.offer.device is device), kind
    if job.started:
        yield _can_continue, "can continue the answer"
    if job.tokens > CONTEXT_MATTERS_FROM:
        key, tokens = job.context_key, job.tokens
        yield (lambda worker: worker.context_of(key) >= tokens), "has enough context"
    yield None, "expected to be fastest"


def _other_load(worker: Worker) -> str:
    """Describe the worker's load besides this pool's jobs."""
    condition = worker.load
    others = f", other jobs there: {condition.queued}" if condition.queued else ""
    slow = f", at {condition.speed:.0%} of its speed" if condition.speed < 1 else ""
    return others + slow


def _can_continue(worker: Worker) -> bool:
    return Feature.CONTINUE in worker.offer.features
