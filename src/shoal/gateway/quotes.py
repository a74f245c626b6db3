"""What jobs cost, and whether there is anybody to do them."""

from functools import partial
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest
from shoal.domain.money import dollars
from shoal.domain.work import Kind, Policy
from shoal.gateway.committing import COMMIT
from shoal.gateway.job_request import KINDS
from shoal.gateway.jobs import Enter
from shoal.gateway.parts import Gateway
from shoal.gateway.respond import json_answer
from shoal.ledger.canonical import to_time

NETWORK = "shoal"
INVALID_TYPE = "Invalid job_type. Use LLM_INFER or TASK"

AUTO = "AUTO"
AUTOMATIC = {Kind.CHAT: Policy.FAST, Kind.TASK: Policy.CHEAP}
"""What AUTO means, by the kind of job."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ok"] = "ok"
    workers_online: int
    network: str = NETWORK
    timestamp: str  # ISO 8601, in UTC


class QuoteQuery(msgspec.Struct, frozen=True):
    """What is to be priced; ``job_type`` is required."""

    job_type: Annotated[str, Meta(extra_json_schema={"enum": [*KINDS]})] | UnsetType = (
        UNSET
    )
    policy: Annotated[
        str, Meta(extra_json_schema={"enum": [*Policy.__members__, AUTO]})
    ] = AUTO


class Quote(msgspec.Struct, frozen=True):
    """What a job costs, and where to commit it."""

    price: str
    endpoint: str
    policy_resolved: str
    network: str = NETWORK
    expires_at: None = None


def routes(gateway: Gateway, enter: Enter) -> list[web.RouteDef]:
    """Return the paths of this face."""
    return [
        web.get("/v1/health", partial(_health, gateway)),
        web.get("/v1/quote", partial(_quote, gateway, enter)),
    ]


async def _health(gateway: Gateway, request: web.Request) -> web.Response:
    now = to_time(gateway.clock.wall())
    online = len(gateway.hub.pool.workers)
    return json_answer(Health(workers_online=online, timestamp=now))


async def _quote(gateway: Gateway, enter: Enter, request: web.Request) -> web.Response:
    await enter(request, Scope.READ)
    types = request.query.getall("job_type", [])
    if len(types) != 1 or types[0] not in KINDS:
        raise InvalidRequest(INVALID_TYPE, "job_type")
    kind = KINDS[types[0]]
    policy = _policy(request.query.getall("policy", [AUTO]), kind)
    price = dollars(gateway.prices.price(policy, kind))
    return json_answer(Quote(price, COMMIT.format(tier=policy.value), policy.name))


def _policy(given: list[str], kind: Kind) -> Policy:
    if given == [AUTO]:
        return AUTOMATIC[kind]
    if len(given) != 1 or given[0] not in Policy.__members__:
        known = ", ".join([*Policy.__members__, AUTO])
        raise InvalidRequest(f"Invalid policy. Use one of {known}", "policy")
    return Policy[given[0]]
