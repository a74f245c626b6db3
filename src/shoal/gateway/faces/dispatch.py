"""Health and quotes, for Dispatch's clients.

Source: exchanges recorded with the original coordinator; ``docs/protocols/dispatch.md``
lists the differences.  Its jobs and pairing are in ``jobs/``.
"""

from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest
from shoal.domain.job import Policy
from shoal.domain.money import dollars
from shoal.domain.work import JobKind
from shoal.gateway.context import PaidJobsGateway
from shoal.gateway.http.errors import PLAIN_ERRORS
from shoal.gateway.http.operation import Operations
from shoal.gateway.jobs.job_request import KINDS, CommitKind
from shoal.ledger.canonical import to_time

api = Operations(PLAIN_ERRORS)

NETWORK = "shoal"
INVALID_TYPE = "Invalid job_type. Use LLM_INFER or TASK"

AUTO = "AUTO"


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ok"] = "ok"
    workers_online: int
    network: str = NETWORK
    timestamp: str  # ISO 8601, in UTC


class QuoteQuery(msgspec.Struct, frozen=True):
    """The job to price; ``job_type`` is required."""

    job_type: Annotated[str, Meta(extra_json_schema={"enum": [*KINDS]})] | UnsetType = (
        UNSET
    )
    policy: Annotated[
        str, Meta(extra_json_schema={"enum": [*Policy.__members__, AUTO]})
    ] = AUTO


class Quote(msgspec.Struct, frozen=True):
    """A job's price, and the path to commit it at."""

    price: str
    endpoint: str
    policy_resolved: str
    network: str = NETWORK
    expires_at: None = None


@api.get("/v1/health", "Show the number of workers")
async def show_health(gateway: PaidJobsGateway) -> HealthReport:
    now = to_time(gateway.clock.wall())
    online = len(gateway.hub.pool.serving)
    return HealthReport(workers_online=online, timestamp=now)


@api.get("/v1/quote", "Price a job", Scope.READ, query=QuoteQuery)
async def show_quote(gateway: PaidJobsGateway, request: web.Request) -> Quote:
    types = request.query.getall("job_type", [])
    if len(types) != 1 or types[0] not in KINDS:
        raise InvalidRequest(INVALID_TYPE, "job_type")
    kind = KINDS[types[0]]
    policy = _policy(request.query.getall("policy", [AUTO]), kind)
    price = dollars(gateway.prices.price(policy, kind))
    return Quote(price, f"/v1/jobs/commit/{policy.value}", policy.name)


def _policy(given: list[str], kind: CommitKind) -> Policy:
    if given == [AUTO]:
        return _automatic_policy(kind)
    if len(given) != 1 or given[0] not in Policy.__members__:
        known = ", ".join([*Policy.__members__, AUTO])
        raise InvalidRequest(f"Invalid policy. Use one of {known}", "policy")
    return Policy[given[0]]


def _automatic_policy(kind: CommitKind) -> Policy:
    match kind:
        case JobKind.CHAT:
            return Policy.FAST
        case JobKind.TASK:
            return Policy.CHEAP
