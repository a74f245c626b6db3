"""The operators' API of jobs: list, show, explain and cancel."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.errors import Forbidden, InvalidRequest, NotFound
from shoal.domain.facts import FACT_NAMES, JobCompleted, JobHedged, JobLeased
from shoal.domain.ids import JobId
from shoal.domain.job import Gang
from shoal.domain.outcome import Choice, Outcome, Usage
from shoal.gateway.context import OperatorsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.decoding import job_id_in
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.responses import without_keys
from shoal.gateway.jobs.endpoints import encode_place, find_cursor
from shoal.gateway.jobs.job_view import NULL, encode_value
from shoal.gateway.jobs.webhooks import describe_delivery
from shoal.gateway.operators.event_log import line_of, subjects
from shoal.gateway.runs.progress import cancel_run, explain_run, find_members
from shoal.pool.eligibility import no_worker_reason
from shoal.pool.explanation import explain
from shoal.pool.gangs.rules import explain_gang
from shoal.pool.lifecycle import JobState
from shoal.store import port

api = Operations()

LISTED_MAX = 1000
SEARCH_MAX = 200  # characters
CANCELLED = "cancelled by an operator"


class JobUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class JobSummary(msgspec.Struct, frozen=True):
    """A job with its last worker; times are Unix seconds."""

    id: JobId
    state: str
    kind: str
    model: str
    owner: str
    priority: str
    attempts: int
    submitted_at: float
    ended_at: float | None
    error: str | None
    worker: str | None


class JobListed(JobSummary, frozen=True):
    """A job in a list; ``usage`` is that of its receipt."""

    usage: JobUsage | None


class JobChoice(msgspec.Struct, frozen=True):
    fields: dict[str, Any]
    finish_reason: str
    logprobs: Any


class JobOutcome(msgspec.Struct, frozen=True):
    text: str
    finish_reason: str
    usage: JobUsage | None
    choices: list[JobChoice]
    value: msgspec.Raw  # a function's result, or null


class JobDetail(JobSummary, frozen=True):
    """A job with its outcome if it is done."""

    outcome: JobOutcome | None
    gang: Gang | None


class JobList(msgspec.Struct, frozen=True):
    """Jobs, newest first; ``next`` is the ``before`` of the next page.

    A page may be short, or empty, and have a next one.
    """

    data: list[JobListed]
    next: str | None


class ExplainedFact(msgspec.Struct, frozen=True):
    """A fact about a job; ``at`` is in Unix seconds.

    ``lease`` and ``worker`` are null where it is about none.
    """

    at: float
    fact: str
    lease: int | None
    worker: str | None
    text: str


class Explanation(msgspec.Struct, frozen=True):
    """The history of a job in plain lines, and its facts; of a run only the lines."""

    job: JobId
    lines: list[str]
    events: list[ExplainedFact]


class CancelledJob(msgspec.Struct, frozen=True):
    id: JobId
    cancelled: bool = True


class AdminJobQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A filter of jobs, newest first; the listed ones are older than ``before``.

    ``search`` is a job's id, or part of its id, model or key's name.
    """

    limit: Annotated[int, msgspec.Meta(ge=1, le=LISTED_MAX)] = 50
    state: JobState | msgspec.UnsetType = msgspec.UNSET
    owner: str | msgspec.UnsetType = msgspec.UNSET
    before: str | msgspec.UnsetType = msgspec.UNSET
    search: Annotated[str, msgspec.Meta(max_length=SEARCH_MAX)] = ""


@api.get("/admin/jobs", "List jobs, newest first", Scope.READ, lists=True)
async def list_jobs(
    gateway: OperatorsGateway, caller: ApiCaller, query: AdminJobQuery
) -> JobList:
    owner = query.owner or None
    if not caller.has_scope(Scope.MONITOR):
        if owner not in (None, caller.name):
            raise Forbidden(
                "jobs of other keys: this needs a key with the scope monitor"
            )
        owner = caller.name
    states = frozenset({query.state} if query.state else ())
    before = await find_cursor(gateway.store, query.before or None, caller)
    wanted = port.JobFilter(owner, states, before=before, text=query.search.strip())
    page = await gateway.store.recent(wanted, query.limit)
    runs = await gateway.store.runs([each.id for each in page.jobs])
    shown = [_listed(*each) for each in zip(page.jobs, runs, strict=True)]
    return JobList(shown, encode_place(page.before))


@api.get("/admin/jobs/{id}", "Show a job", Scope.READ)
async def show_job(
    gateway: OperatorsGateway, request: web.Request, caller: ApiCaller
) -> JobDetail:
    stored = await _visible_job(gateway, request, caller)
    outcome = None if stored.outcome is None else _outcome(stored.outcome)
    history = await gateway.store.history(stored.job.id)
    return JobDetail(
        **_summary(port.summarize(stored), history),
        outcome=outcome,
        gang=stored.job.terms.gang,
    )


@api.delete("/admin/jobs/{id}", "Cancel a job", Scope.USE)
async def cancel_job(
    gateway: OperatorsGateway, request: web.Request, caller: ApiCaller
) -> CancelledJob:
    run_id = request.match_info["id"]
    if members := await find_members(gateway.store, request, run_id, caller):
        if not cancel_run(gateway.hub, members, CANCELLED):
            raise InvalidRequest(f"run {run_id} has ended")
        return CancelledJob(JobId(run_id))
    stored = await _visible_job(gateway, request, caller)
    job_id = stored.job.id
    if not gateway.jobs.cancel(job_id, CANCELLED):
        raise InvalidRequest(f"job {job_id} has ended: {stored.state.value}")
    return CancelledJob(job_id)


@api.get("/admin/jobs/{id}/explain", "Explain a job's history", Scope.READ)
async def explain_job(
    gateway: OperatorsGateway, request: web.Request, caller: ApiCaller
) -> Explanation:
    run_id = request.match_info["id"]
    if members := await find_members(gateway.store, request, run_id, caller):
        course = await explain_run(gateway.hub, gateway.store, request, run_id, members)
        if not caller.has_scope(Scope.MONITOR):
            course = [*map(without_keys, course)]
        return Explanation(JobId(run_id), course, [])
    stored = await _visible_job(gateway, request, caller)
    history = await gateway.store.history(stored.job.id)
    lines = explain(history)
    pool = gateway.hub.pool
    opened = pool.jobs.get(stored.job.id)
    if opened is not None and opened.gang is not None:
        lines += explain_gang(pool, opened.gang, opened.rank)
    elif opened is not None and opened.worker_id is None:
        lines.append(f"still waiting: {no_worker_reason(pool, opened)}")
    if (delivery := await gateway.store.webhooks.state_of(stored.job.id)) is not None:
        lines.append(describe_delivery(delivery))
    events = _explained_facts(history)
    if not caller.has_scope(Scope.MONITOR):
        lines = [*map(without_keys, lines)]  # of workers that did not get the job, too
        events = [*map(_without_keys, events)]
    return Explanation(stored.job.id, lines, events)


async def _visible_job(
    gateway: OperatorsGateway, request: web.Request, caller: ApiCaller
) -> port.StoredJob:
    """Return the requested job.

    Raises NotFound, or Forbidden if it is another key's and the caller may not see all.
    """
    job_id = job_id_in(request)
    stored = await gateway.store.job(job_id)
    if stored is None:
        raise NotFound(f"there is no job {job_id}: it never existed, or was pruned")
    if stored.job.owner != caller.name and not caller.has_scope(Scope.MONITOR):
        raise Forbidden(
            f"job {job_id} belongs to another key: a key with the scope monitor sees "
            "it, and one with the scope admin cancels it"
        )
    return stored


def _listed(job: port.StoredJobSummary, run: port.JobRun) -> JobListed:
    return JobListed(**_summary(job, run.facts), usage=_usage(run.usage))


def _summary(
    job: port.StoredJobSummary, history: Sequence[port.RecordedFact]
) -> dict[str, Any]:
    summary = JobSummary(
        job.id,
        job.state.value,
        job.kind.value,
        job.model,
        job.owner,
        job.priority.name.lower(),
        job.lease,
        job.submitted_at,
        job.ended_at,
        job.error,
        _last_worker(history),
    )
    return msgspec.structs.asdict(summary)


def _explained_facts(history: Sequence[port.RecordedFact]) -> list[ExplainedFact]:
    return [
        ExplainedFact(
            each.at,
            FACT_NAMES[type(each.fact)],
            subject.lease,
            subject.worker,
            line_of(each.fact),
        )
        for each, subject in zip(history, subjects(history), strict=True)
    ]


def _without_keys(event: ExplainedFact) -> ExplainedFact:
    worker = None if event.worker is None else without_keys(event.worker)
    return msgspec.structs.replace(event, worker=worker, text=without_keys(event.text))


def _last_worker(history: Sequence[port.RecordedFact]) -> str | None:
    """Return the worker that ended a job, or else the last one that ran it."""
    described = zip(history, subjects(history), strict=True)
    workers = [
        subject.worker
        for each, subject in described
        if isinstance(each.fact, JobLeased | JobHedged | JobCompleted)
    ]
    return workers[-1] if workers else None


def _outcome(outcome: Outcome) -> JobOutcome:
    return JobOutcome(
        outcome.text,
        outcome.finish_reason,
        _usage(outcome.usage),
        [_choice(choice) for choice in outcome.choices],
        msgspec.Raw(encode_value(outcome)) if outcome.value or outcome.blobs else NULL,
    )


def _usage(usage: Usage | None) -> JobUsage | None:
    if usage is None:
        return None
    return JobUsage(usage.prompt_tokens, usage.completion_tokens)


def _choice(choice: Choice) -> JobChoice:
    return JobChoice({**choice.fields}, choice.finish_reason, choice.logprobs)
