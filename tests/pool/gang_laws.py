"""What holds for gangs, and for what waits beside them, in any pool."""

from collections import Counter
from collections.abc import Sequence

from shoal.domain.facts import JobLeased
from shoal.domain.ids import peer_of
from shoal.pool.eligibility import ineligibility, unsuitability
from shoal.pool.gangs.open_gangs import OpenGang
from shoal.pool.open_job import OpenJob
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker


def check_plan(pool: PoolState, planned: Sequence[JobLeased]) -> None:
    """Check, before a plan is applied, that it begins no gang by a part."""
    jobs = [pool.jobs[each.job_id] for each in planned]
    leased = Counter(each.gang.id for each in jobs if each.gang is not None)
    for gang in open_gangs(pool):
        assert gang.formed or leased[gang.id] in (0, gang.size), "begun by a part"


def check_waiting(pool: PoolState) -> None:
    """Check, after a plan was applied, that nothing waits for what it could have."""
    wanted: set[str] = set()  # the machines that gangs wait for
    workers = pool.workers.values()
    for gang in pool.gangs.in_order():
        waiting = [pool.jobs[gang.waiting[rank]] for rank in gang.searching]
        for rank, worker_id in gang.returning.items():
            found = pool.workers.get(worker_id)
            back = found is not None and takes(found, pool.jobs[gang.waiting[rank]])
            assert not back, f"rank {rank} of {gang} waits for a worker that is back"
        if not waiting:
            continue
        suitable = {
            peer_of(worker.id) for worker in workers if suits(worker, waiting[0])
        } - gang.taken
        free = (
            {
                peer_of(worker.id)
                for worker in workers
                if all(takes(worker, each) for each in waiting)
            }
            - wanted
            - gang.taken
        )
        enough = 1 if gang.formed else len(waiting)
        assert len(free) < enough, f"{gang} waits for nothing"
        if len(suitable) >= enough:
            wanted |= suitable
    for opened in pool.jobs.values():
        if opened.worker_id is None and opened.gang is None:
            idle = [
                worker.id
                for worker in workers
                if takes(worker, opened) and peer_of(worker.id) not in wanted
            ]
            assert not idle, f"{opened.job.id} waits for nothing"


def check_gangs(pool: PoolState) -> None:
    """Check that members are apart, and that all that is known of them is right."""
    held = Counter[str]()
    gangs = open_gangs(pool)
    for gang in gangs:
        by_rank = {
            opened.rank: opened for opened in pool.jobs.values() if opened.gang is gang
        }
        running = {
            rank: each.worker_id
            for rank, each in by_rank.items()
            if each.worker_id is not None
        }
        machines = {peer_of(each): rank for rank, each in running.items()}
        assert len(machines) == len(running), "two members on one machine"
        assert pool.gangs.get(gang.id) is gang
        assert gang.machines == machines
        assert gang.workers == running
        assert gang.members == {rank: each.job.id for rank, each in by_rank.items()}
        assert gang.waiting.keys() == by_rank.keys() - running.keys()
        assert gang.returning.keys() <= gang.waiting.keys()
        assert not gang.machines.keys() & set(map(peer_of, gang.returning.values()))
        assert gang.formed or not running, "begun by a part"
        left = gang.size - gang.failed
        least = gang.least if gang.formed else gang.size
        assert left >= least, "goes on with too few"
        complete = gang.formed or len(by_rank) == gang.size
        waits = complete and len(running) < len(by_rank)
        assert (gang.id in pool.gangs.waiting) == waits
        held.update(machines.keys())
    assert pool.gangs.held == held
    for worker in pool.workers.values():
        others = len(worker.leases) - len(worker.members)
        assert worker.members.keys() <= worker.leases.keys()
        assert worker.used_slots == others + sum(worker.members.values())
        assert worker.used_slots <= worker.slots + worker.prefetch
        if any(slots == worker.offer.slots for slots in worker.members.values()):
            assert len(worker.leases) == 1, "a whole machine is shared"


def open_gangs(pool: PoolState) -> list[OpenGang]:
    gangs = [each.gang for each in pool.jobs.values() if each.gang is not None]
    assert bool(gangs) == bool(pool.gangs.by_id)
    return list({id(gang): gang for gang in gangs}.values())


def takes(worker: Worker, opened: OpenJob) -> bool:
    return ineligibility(opened, worker) is None


def suits(worker: Worker, opened: OpenJob) -> bool:
    """Return whether a worker could run a member of a gang if it were idle."""
    offer = worker.offer
    return (
        worker.accepts_jobs
        and offer.slots > 0
        and (not offer.only_for or opened.job.owner in offer.only_for)
        and unsuitability(opened, worker) is None
    )
