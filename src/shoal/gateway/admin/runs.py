"""Training runs for their owners and for operators: their course, and their end."""

from collections.abc import Sequence

from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.errors import Forbidden
from shoal.domain.job import GANG_MAX
from shoal.gateway.context import Gateway
from shoal.gateway.hosted_runs import RUNS, story_lines
from shoal.gateway.http.access import ApiCaller
from shoal.pool.explanation import explain, explain_remark
from shoal.pool.gang_rules import explain_gang
from shoal.store.port import StoredJob
from shoal.training.run_events import ID_SIZE, member_key

LINES_MAX = 2000  # of a run's course: the newest


async def find_members(
    gateway: Gateway, request: web.Request, run_id: str, caller: ApiCaller
) -> Sequence[StoredJob]:
    """Return the jobs of a run's members; none: there is no such run of the caller.

    Raises Forbidden if it is another key's and the caller may not see all.
    """
    if len(run_id) != ID_SIZE:
        return ()
    hosted = request.app[RUNS].find(run_id)
    owner = caller.name if hosted is None else hosted.owner
    if owner != caller.name and not caller.has_scope(Scope.MONITOR):
        raise Forbidden(
            f"run {run_id} belongs to another key: a key with the scope monitor sees "
            "it, and one with the scope admin cancels it"
        )
    found: list[StoredJob] = []
    for node in range(GANG_MAX):
        key = member_key(run_id, node)
        member = await gateway.store.by_idempotency_key(owner, key)
        if member is None:
            break
        found.append(member)
    return found


async def explain_run(
    gateway: Gateway, request: web.Request, run_id: str, members: Sequence[StoredJob]
) -> list[str]:
    """Return the course of a run in plain lines, from its members' facts and reports.

    What members reported is known until a while after the run, or a restart.
    """
    lines: list[str] = []
    for node, member in enumerate(members):
        for line in explain(await gateway.store.history(member.job.id)):
            at, _, text = line.partition("  ")
            lines.append(f"{at}  machine {node}: {text}")
    if (hosted := request.app[RUNS].find(run_id)) is not None:
        story = story_lines(hosted.events.story)
        lines += [explain_remark(at, text) for at, text in story]
    lines.sort(key=lambda line: line.partition("  ")[0])  # stable
    pool = gateway.hub.pool
    if (gang := pool.gangs.get(run_id)) is not None:
        lines += explain_gang(pool, gang, noun="machine")
    return lines[-LINES_MAX:]


def cancel_run(gateway: Gateway, members: Sequence[StoredJob], reason: str) -> bool:
    """Cancel the members of a run; return whether any was open."""
    cancelled = [gateway.hub.cancel(each.job.id, reason) for each in members]
    return any(cancelled)
