"""Training runs for their owners and for operators: pace, ranks, course and end."""

from collections.abc import Sequence

import msgspec
from aiohttp import web

from shoal.coordinator.hub import Hub
from shoal.domain.credentials import Scope
from shoal.domain.errors import Forbidden, NotFound
from shoal.domain.job import GANG_MAX
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.responses import without_keys
from shoal.gateway.runs.hosted_runs import RUNNING, RUNS, HostedRun, history_lines
from shoal.pool.explanation import explain, explain_remark
from shoal.pool.gangs.rules import explain_gang
from shoal.store.port import Store, StoredJob
from shoal.training import run_events

api = Operations()

ENDED, WAITING = "ended", "waiting"
NOTHING = run_events.RankProgress(running=False)


class RunSummary(msgspec.Struct, frozen=True):
    """A run of ``size`` ranks; times are Unix seconds.

    ``step`` and ``loss`` are the latest that were reported, or null.
    """

    id: str
    owner: str
    state: str
    size: int
    started_at: float | None
    ended_at: float | None
    step: int | None
    loss: float | None


class RunList(msgspec.Struct, frozen=True):
    """The open runs, and those that ended last, the newest first."""

    data: list[RunSummary]


class RunRank(msgspec.Struct, frozen=True):
    """A rank, as far as it has reported; ``step_seconds`` is the time of a step.

    ``hash`` is that of its parameters, after the same step as those of other ranks;
    null: it has reported none yet.
    """

    rank: int
    worker: str | None
    state: str
    step: int | None
    step_seconds: float | None
    hash: str | None


class RunPoint(msgspec.Struct, frozen=True):
    """A step that was reported; ``seconds`` are those of one step."""

    step: int
    loss: float | None
    seconds: float | None
    at: float


class RunDetail(RunSummary, frozen=True):
    """A run with its ranks, and at most 2000 of the points that were reported."""

    ranks: list[RunRank]
    points: list[RunPoint]


@api.get("/admin/runs", "List training runs", Scope.READ, lists=True)
async def list_runs(request: web.Request, caller: ApiCaller) -> RunList:
    sees_all = caller.has_scope(Scope.MONITOR)
    runs = request.app[RUNS].newest_first()
    return RunList(
        [_summary(run) for run in runs if sees_all or run.owner == caller.name]
    )


@api.get("/admin/runs/{id}", "Show a training run", Scope.READ)
async def show_run(request: web.Request, caller: ApiCaller) -> RunDetail:
    run_id = request.match_info["id"]
    run = request.app[RUNS].find(run_id)
    if run is None:
        raise NotFound(
            f"there is no run {run_id[:64]}: it ended before the coordinator's last "
            "start, or many have ended since"
        )
    sees_all = caller.has_scope(Scope.MONITOR)
    if run.owner != caller.name and not sees_all:
        raise Forbidden(
            f"run {run.id} belongs to another key: this needs one with the scope "
            "monitor"
        )
    return RunDetail(
        **msgspec.structs.asdict(_summary(run)),
        ranks=_ranks(run, names_machines=sees_all),
        points=[RunPoint(*each) for each in run.events.progress.points],
    )


def _summary(run: HostedRun) -> RunSummary:
    last = run.events.progress.last
    return RunSummary(
        run.id,
        run.owner,
        run.state,
        run.size,
        run.started_at,
        run.ended_at,
        None if last is None else last.step,
        None if last is None else last.loss,
    )


def _ranks(run: HostedRun, *, names_machines: bool) -> list[RunRank]:
    known = run.events.progress.ranks
    ranks = []
    for rank in sorted({*range(min(run.size, run_events.RANKS_KEPT)), *known}):
        progress = known.get(rank, NOTHING)
        worker: str | None = run.worker_of(rank)
        if worker is not None and not names_machines:
            worker = without_keys(worker)
        ranks.append(
            RunRank(
                rank,
                worker,
                _state(run, rank),
                progress.step,
                progress.step_seconds,
                run.events.progress.hash_of(rank),
            )
        )
    return ranks


def _state(run: HostedRun, rank: int) -> str:
    progress = run.events.progress.ranks.get(rank)
    if run.ended_at is None and progress is None:
        return WAITING
    running = run.ended_at is None and progress is not None and progress.running
    return RUNNING if running else ENDED


LINES_MAX = 2000  # of a run's course: the newest


async def find_members(
    store: Store, request: web.Request, run_id: str, caller: ApiCaller
) -> Sequence[StoredJob]:
    """Return the jobs of a run's members; none: there is no such run of the caller.

    Raises Forbidden if it is another key's and the caller may not see all.
    """
    if len(run_id) != run_events.ID_SIZE:
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
        key = run_events.member_key(run_id, node)
        member = await store.by_idempotency_key(owner, key)
        if member is None:
            break
        found.append(member)
    return found


async def explain_run(
    hub: Hub,
    store: Store,
    request: web.Request,
    run_id: str,
    members: Sequence[StoredJob],
) -> list[str]:
    """Return the history of a run in plain lines, from its members' facts and reports.

    Members' reports are kept for some time after the run, or until a restart.
    """
    lines: list[str] = []
    for node, member in enumerate(members):
        for line in explain(await store.history(member.job.id)):
            at, _, text = line.partition("  ")
            lines.append(f"{at}  machine {node}: {text}")
    if (hosted := request.app[RUNS].find(run_id)) is not None:
        history = history_lines(hosted.events.history)
        lines += [explain_remark(at, text) for at, text in history]
    lines.sort(key=lambda line: line.partition("  ")[0])  # stable
    pool = hub.pool
    if (gang := pool.gangs.get(run_id)) is not None:
        lines += explain_gang(pool, gang, noun="machine")
    return lines[-LINES_MAX:]


def cancel_run(hub: Hub, members: Sequence[StoredJob], reason: str) -> bool:
    """Cancel the members of a run; return whether any was open."""
    cancelled = [hub.cancel(each.job.id, reason) for each in members]
    return any(cancelled)
