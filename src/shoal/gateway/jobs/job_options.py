"""Builds jobs from requests and their headers."""

import hashlib
import math
from collections.abc import Mapping, Sequence

from aiohttp import web
from msgspec.structs import replace

from shoal.domain.errors import InvalidRequest, UnknownModel
from shoal.domain.job import PRIORITIES, Job, JobTerms, Policy, Priority, TimeLimits
from shoal.domain.work import Work
from shoal.gateway.context import JobsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.request_record import record_of
from shoal.gateway.job_service import JobService
from shoal.pool.job_admission import unknown_model
from shoal.pool.roster import SPECIAL_QUEUES

KEY_MAX = 255  # characters of an idempotency key, as elsewhere
SESSION_MAX = 256  # characters

IDEMPOTENCY_KEY = "Idempotency-Key"
SESSION = "x-shoal-session"
PRIORITY = "x-shoal-priority"

LIMIT_HEADERS = {
    "queue": "x-shoal-queue-seconds",
    "first_output": "x-shoal-first-output-seconds",
    "silence": "x-shoal-silence-seconds",
    "total": "x-shoal-total-seconds",
    "unattended": "x-shoal-unattended-seconds",
}
"""The headers that shorten a job's time limits."""

SERVICE_TIER_PRIORITIES: Mapping[str, Priority] = {
    "flex": Priority.LOW,
    "priority": Priority.HIGH,
}
"""Priorities by OpenAI's service tiers; other tiers are ignored."""


def build_job(
    gateway: JobsGateway,
    request: web.Request,
    work: Work,
    caller: ApiCaller,
    *,
    session: str = "",
    tier: str = "",
    terms: JobTerms | None = None,
    left_out: Sequence[str] = (),
    whole: bool = False,
    end_user: str = "",
) -> Job:
    """Build the job of a request, and record it; of an alias, for the model it gets.

    The default terms are the policy FAST, public, at the listed price.  Only jobs with
    terms of their own may be for any model.  ``left_out`` and ``whole`` are as in
    ``JobTerms``, and ``end_user`` is the client's name for its user; tools that the
    model may call are left out if no worker with it can.

    Raises UnknownModel, InvalidRequest naming the invalid header, or Forbidden if the
    key may not give its jobs that priority.
    """
    headers, owner, record = request.headers, caller.key.name, record_of(request)
    jobs = gateway.jobs
    # Others must not leave the pool, and have a price of their own.
    hosted_after = caller.key.hosted_after if terms is None else None
    hosted = hosted_after is not None
    requested, work = work, jobs.with_real_model(work, owner, hosted=hosted)
    alias = "" if work is requested else requested.model
    work, tools = fitting_work(jobs, work, owner)
    agreed = replace(
        terms or JobTerms(price=gateway.prices.price(Policy.FAST, work.kind)),
        left_out=(*left_out, *tools),
        whole=whole,
        end_user=_digest(end_user) if end_user else "",
        trace=record.traceparent,
        alias=alias,
        hosted_after=hosted_after,
    )
    job = Job(
        jobs.new_id(),
        work,
        _limits(gateway.limits, headers),
        owner,
        caller.permitted_priority(_priority(headers.get(PRIORITY), tier)),
        _session_digest(headers.get(SESSION) or session, work, owner),
        _idempotency_key(headers.get(IDEMPOTENCY_KEY)),
        agreed,
    )
    if terms is None and job.model in SPECIAL_QUEUES:
        raise UnknownModel(unknown_model(jobs.models, job.model))
    record.set_job(job)
    return job


def fitting_work(
    jobs: JobService, work: Work, owner: str
) -> tuple[Work, Sequence[str]]:
    """Return work without tools that no worker calls, and ``JobTerms.left_out``."""
    fitting = jobs.without_tools(work, owner)
    left_out = f"tools: no worker with {work.model} calls functions"
    return fitting, () if fitting is work else (left_out,)


def _limits(limits: TimeLimits, headers: Mapping[str, str]) -> TimeLimits:
    """Return the limits, shortened as the client asks; it cannot extend them."""
    wanted: dict[str, float] = {}
    for name, header in LIMIT_HEADERS.items():
        if (text := headers.get(header)) is None:
            continue
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise InvalidRequest(
                f"{header}: expected seconds, got {text[:40]!r}", header
            )
        wanted[name] = min(seconds, getattr(limits, name))
    return replace(limits, **wanted) if wanted else limits


def _priority(header: str | None, tier: str) -> Priority | None:
    """Return the priority that a request names, if any."""
    if header is None:
        return SERVICE_TIER_PRIORITIES.get(tier)
    if header not in PRIORITIES:
        expected = ", ".join(PRIORITIES)
        raise InvalidRequest(f"{PRIORITY}: expected one of {expected}", PRIORITY)
    return PRIORITIES[header]


def _session_digest(given: str, work: Work, owner: str) -> str:
    """Return a name for the session that the client names; empty: it names none."""
    if len(given) > SESSION_MAX:
        raise InvalidRequest(f"{SESSION}: more than {SESSION_MAX} characters", SESSION)
    return _digest(owner, work.model, given) if given else ""


def _digest(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _idempotency_key(given: str | None) -> str:
    if given is None:
        return ""
    if (
        not given
        or len(given) > KEY_MAX
        or not (given.isascii() and given.isprintable())
    ):
        raise InvalidRequest(
            f"{IDEMPOTENCY_KEY}: expected 1 to {KEY_MAX} printable ASCII characters",
            IDEMPOTENCY_KEY,
        )
    return given
