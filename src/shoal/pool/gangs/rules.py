"""What holds for all members of a gang: who may join, when it ends, why it waits."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from shoal.domain.facts import Fact, JobCancelled, JobCompleted, JobExpired, JobFailed
from shoal.domain.job import Job
from shoal.pool.eligibility import LISTED_MAX, passed_over
from shoal.pool.explanation import describe_workers, last_line
from shoal.pool.gangs.open_gangs import OpenGang
from shoal.pool.gangs.places import suitable_machines
from shoal.pool.open_job import OpenJob
from shoal.pool.state import PoolState

FREE = "free"


def gang_rejection(pool: PoolState, job: Job) -> str | None:
    """Return why a job cannot be a member of its gang, or None if it can."""
    if job.terms.gang is None:
        return None
    reason = pool.gangs.rejection(job, OpenJob(job, 0.0, 0.0, 0.0).requirement)
    return None if reason is None else f"gang: {reason}"


def gang_ends(pool: PoolState, new: Sequence[Fact]) -> Iterator[JobCancelled]:
    """Cancel the other members of gangs that cannot go on after ``new`` facts.

    A gang that has begun goes on while at least ``least`` members have not failed.  One
    that has not needs all of them.  Once a member is done, those that have lost their
    workers get no others: they would begin alone.
    """
    superfluous = list(_superfluous(pool, new))
    yield from superfluous
    ended: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for fact in (*new, *superfluous):
        if isinstance(fact, JobFailed | JobCancelled | JobExpired):
            job = pool.jobs.get(fact.job_id)
            if job is not None and job.gang is not None:
                ended[job.gang.id][job.rank] = _describe_end(fact)
    done = {fact.job_id for fact in new if isinstance(fact, JobCompleted)}
    for gang_id, ranks in ended.items():
        gang = pool.gangs.get(gang_id)
        assert gang is not None, "its members are open"
        left = gang.size - gang.failed - len(ranks)
        if gang.formed and left >= gang.least:
            continue
        rank, end = next(iter(ranks.items()))
        reason = f"rank {rank} {end}; {_too_few(gang, left)}"
        for other, job_id in gang.members.items():
            if other not in ranks and job_id not in done:
                yield JobCancelled(job_id, reason)


def _superfluous(pool: PoolState, new: Sequence[Fact]) -> Iterator[JobCancelled]:
    for fact in new:
        if isinstance(fact, JobCompleted):
            job = pool.jobs.get(fact.job_id)
            if job is None or job.gang is None or not job.gang.formed:
                continue
            reason = f"rank {job.rank} is done, and this one has no worker"
            for rank in job.gang.searching:
                yield JobCancelled(job.gang.waiting[rank], reason)


def waiting_reason(pool: PoolState, gang: OpenGang) -> str:
    """Return in one line why members of a gang wait."""
    if not gang.is_complete:
        missing = sorted(set(range(gang.size)) - gang.members.keys())
        return f"{_ranks(missing)} of {gang.size} not submitted"
    if not gang.searching:
        return f"waits for {', '.join(gang.returning.values())} to reconnect"
    return f"{_needed(pool, gang)}: {', '.join(_machine_reasons(pool, gang))}"


def explain_gang(
    pool: PoolState, gang: OpenGang, own: int | None = None, noun: str = "rank"
) -> list[str]:
    """Return where the members of a gang run, and why others wait.

    ``own`` is the rank of the job that is explained, and ``noun`` what ranks are
    called.  Names workers, but not the jobs of other members.
    """
    lines = []
    for rank in sorted(gang.members)[:LISTED_MAX]:
        whose = " (this job)" if rank == own else ""
        lines.append(f"{noun} {rank} of {gang.size}{whose}: {_place(gang, rank)}")
    if (more := len(gang.members) - LISTED_MAX) > 0:
        waiting = len(gang.waiting)
        lines.append(f"and {more} more; in all, {waiting} of {gang.size} wait")
    if not gang.waiting:
        return lines
    if gang.searching and gang.is_complete:
        lines.append(f"the group {_needed(pool, gang)}")
        lines += [f"  {reason}" for reason in _machine_reasons(pool, gang)]
    elif gang.searching:
        lines.append(f"the group waits: {waiting_reason(pool, gang)}")
    return lines


def _describe_end(fact: JobFailed | JobCancelled | JobExpired) -> str:
    match fact:
        case JobFailed(error=error):
            return f"failed: {last_line(error)}"
        case JobCancelled(reason=reason):
            return f"was cancelled: {reason}"
        case JobExpired(error=error):
            return f"was given up: {error}"


def _too_few(gang: OpenGang, left: int) -> str:
    if not gang.formed:
        return f"the group of {gang.size} had not begun"
    return f"{left} of {gang.size} members left, and the group needs {gang.least}"


def _place(gang: OpenGang, rank: int) -> str:
    if (worker := gang.workers.get(rank)) is not None:
        return f"runs on {worker}"
    if (worker := gang.returning.get(rank)) is not None:
        return f"waits for {worker} to reconnect"
    return "waits"


def _needed(pool: PoolState, gang: OpenGang) -> str:
    count = len(gang.searching)
    more = " more" if gang.workers else ""
    slots = "1 free slot" if gang.slots == 1 else f"{gang.slots} free slots"
    needed = f"needs {count}{more} {'machine' if count == 1 else 'machines'} " + (
        f"with {slots} each" if gang.slots else "without other jobs"
    )
    suitable = suitable_machines(pool, gang).keys() - gang.taken
    if not suitable:
        return f"{needed}, and none that is connected is suitable"
    waiting = pool.jobs[gang.waiting[gang.searching[0]]]
    groups = passed_over(pool, waiting, otherwise=FREE)
    free = sum(group.count for group in groups if group.reason == FREE)
    are = "is" if free == 1 else "are"
    return f"{needed}, {free} of {len(suitable)} suitable ones {are} free"


def _machine_reasons(pool: PoolState, gang: OpenGang) -> list[str]:
    waiting = pool.jobs[gang.waiting[gang.searching[0]]]
    return [
        f"{describe_workers(group)}: {group.reason}"
        for group in passed_over(pool, waiting, otherwise=FREE)
    ]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = ", ".join(map(str, ranks[:LISTED_MAX]))
    others = len(ranks) - LISTED_MAX
    return f"ranks {listed}" + (f" and {others} more" if others > 0 else "")
