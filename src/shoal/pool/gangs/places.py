"""Places for the members of waiting gangs, and the machines reserved for them."""

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from heapq import nsmallest
from typing import NamedTuple

from shoal.domain.ids import WorkerId, peer_of
from shoal.pool.eligibility import ineligibility, unsuitability
from shoal.pool.free_workers import PromisedSlots
from shoal.pool.gangs.open_gangs import OpenGang
from shoal.pool.open_job import OpenJob
from shoal.pool.roster import remember
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker


class MemberPlace(NamedTuple):
    """A member of a gang, the worker that gets it, and why."""

    job: OpenJob
    worker: Worker
    reason: str


class GangPlaces:
    """The places of gangs, which come in their order, as a plan proceeds.

    A gang that finds too few machines reserves those that are free or will be soonest:
    they get no further jobs until it has what it needs.  Gangs behind it do not get the
    machines that it waits for, so that two of them never wait for each other's.  But a
    gang that cannot get enough machines from other jobs reserves none, and one for
    which there are too few machines in the pool lets the others pass.

    The time depends on the members, and on the machines that could run them.
    """

    def __init__(self, pool: PoolState, promised: PromisedSlots) -> None:
        self._pool = pool
        self._promised = promised
        self._claims: list[Collection[str]] = []  # machines that gangs wait for
        # The gangs that are like one that waits can only have the same machines.
        self._exhausted: set[Hashable] = set()
        self._members: Counter[WorkerId] = Counter()  # slots promised to members

    def assign(self, gang: OpenGang) -> list[MemberPlace]:
        """Promise slots to the members that can have them; reserve for the others.

        The members of a gang that has not begun get theirs all at once, or none.
        """
        if not gang.formed and gang.kind in self._exhausted:
            return []
        first = self._pool.jobs[next(iter(gang.waiting.values()))]
        if first.model not in self._pool.roster.available:
            return []  # all workers are busy, so there is nothing to reserve
        chosen = self._back(gang) if gang.returning else []
        ranks = gang.searching
        missing = len(ranks)
        if not missing:
            return chosen
        machines = suitable_machines(self._pool, gang)
        if len(machines) < missing and not gang.formed:
            return chosen
        taken = gang.taken
        ours = {
            machine: workers
            for machine, workers in machines.items()
            if machine not in taken
            and not any(machine in claim for claim in self._claims)
        }
        jobs = [self._pool.jobs[gang.waiting[rank]] for rank in ranks]
        found = self._match(jobs, self._free(gang, ours))
        if not gang.formed and len(found) < len(jobs):
            found = []
        for each in found:
            self._promise(gang, each.worker)
            machine = peer_of(each.worker.id)
            del ours[machine]
            taken.add(machine)
        missing -= len(found)
        if missing:
            self._reserve(gang, ours, missing)
            self._claims.append(machines.keys() - taken)
            if not gang.formed:
                self._exhausted.add(gang.kind)
        return [*chosen, *found]

    def _back(self, gang: OpenGang) -> list[MemberPlace]:
        """Return the members whose workers have reconnected, and may still run them."""
        found: list[MemberPlace] = []
        for rank, worker_id in gang.returning.items():
            job = self._pool.jobs[gang.waiting[rank]]
            worker = self._pool.workers.get(worker_id)
            if (
                worker is not None
                and not self._shortage(gang, worker)
                and ineligibility(job, worker) is None
            ):
                self._promise(gang, worker)
                reason = f"rank {rank} of {gang.size}, whose worker has reconnected"
                found.append(MemberPlace(job, worker, reason))
        return found

    def _promise(self, gang: OpenGang, worker: Worker) -> None:
        slots = worker.slots_of_member(gang.slots)
        self._promised.add_member(worker, slots)
        self._members[worker.id] += slots

    def _free(
        self, gang: OpenGang, machines: Mapping[str, list[Worker]]
    ) -> list[Worker]:
        """Return a worker of each machine that has the slots, the quickest first."""
        found: list[Worker] = []
        for workers in machines.values():
            for worker in workers:
                if not self._shortage(gang, worker):
                    found.append(worker)
                    break
        found.sort(key=lambda each: self._pool.cost(each.cost_level()))
        return found

    def _match(
        self, jobs: Sequence[OpenJob], workers: list[Worker]
    ) -> list[MemberPlace]:
        # The members need the same, so the order in which they choose has no effect,
        # except for two seconds after a worker has refused one of them.
        chosen: list[MemberPlace] = []
        for job in jobs:
            for index, worker in enumerate(workers):
                if ineligibility(job, worker) is None:
                    chosen.append(MemberPlace(job, worker, _reason(job)))
                    del workers[index]
                    break
        return chosen

    def _reserve(
        self, gang: OpenGang, machines: Mapping[str, list[Worker]], missing: int
    ) -> None:
        """Reserve the machines that lack the fewest slots, if there are enough."""
        shortages: list[tuple[int, str, Worker]] = []
        for workers in machines.values():
            lacking = [
                (self._shortage(gang, worker), worker.id, worker)
                for worker in workers
                if self._is_obtainable(gang, worker)
            ]
            if lacking:
                shortages.append(min(lacking, key=lambda each: each[:2]))
        if len(shortages) < missing and not gang.formed:
            return
        for _, _, worker in nsmallest(missing, shortages, key=lambda each: each[:2]):
            promised = self._promised.get(worker.id, 0)
            free = worker.offer.slots - worker.busy_slots - promised
            # Slots that its tasks lend stay free: these wait for calls.
            self._promised.add_member(worker, free)

    def _shortage(self, gang: OpenGang, worker: Worker) -> int:
        """Return how many jobs or slots have to become free there."""
        used = worker.busy_slots + self._promised.get(worker.id, 0)
        if not gang.slots:
            return used + worker.load.queued
        return max(0, used + gang.slots - worker.offer.slots)

    def _is_obtainable(self, gang: OpenGang, worker: Worker) -> bool:
        """Return whether it has the slots when all but the members of gangs end."""
        held = sum(
            sum(each.members.values()) + self._members[each.id]
            for each in worker.sharing
        )
        wanted = worker.slots_of_member(gang.slots)
        return held + wanted <= max(1, worker.offer.slots)


def suitable_machines(pool: PoolState, gang: OpenGang) -> Mapping[str, list[Worker]]:
    """Return the workers that may run a member as soon as they are free, by machine."""
    machines = pool.roster.findings.machines
    if (known := machines.get(gang.kind)) is not None:
        return known
    found: dict[str, list[Worker]] = {}
    for worker in _suitable(pool, pool.jobs[next(iter(gang.members.values()))]):
        found.setdefault(peer_of(worker.id), []).append(worker)
    return remember(machines, gang.kind, found)


def _suitable(pool: PoolState, job: OpenJob) -> Iterator[Worker]:
    owner = job.job.owner
    for worker in pool.roster.with_model.get(job.model, {}).values():
        only_for = worker.offer.only_for
        if (
            worker.accepts_jobs
            and worker.offer.slots > 0
            and (not only_for or owner in only_for)
            and unsuitability(job, worker) is None
        ):
            yield worker


def _reason(job: OpenJob) -> str:
    gang = job.gang
    assert gang is not None, "only members of gangs have places"
    together = "in the place of a lost worker" if gang.formed else "all ranks at once"
    return f"rank {job.rank} of {gang.size}, {together}"
