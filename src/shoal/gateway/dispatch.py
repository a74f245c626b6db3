"""Dispatch's HTTP face: its prices, jobs and pairing, and who may come in there.

Source: exchanges recorded with the original coordinator; ``docs/jobs.md`` has what is
different here, and what is more.
"""

from functools import partial

from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.errors import Unauthorized
from shoal.gateway import committing, job_events, jobs, quotes, trust
from shoal.gateway.access import OPEN, Caller
from shoal.gateway.parts import Gateway

WIRE = "dispatch"


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the paths of this face."""
    enter = partial(_enter, gateway)
    parts = (quotes, committing, jobs, job_events, trust)
    return [route for part in parts for route in part.routes(gateway, enter)]


async def _enter(gateway: Gateway, request: web.Request, needed: Scope) -> Caller:
    """Let callers in; the original's clients show no key."""
    stranger = OPEN if WIRE in gateway.anonymous else None
    try:
        return await gateway.access.admit(request, needed, stranger=stranger)
    except Unauthorized as error:
        if "Authorization" in request.headers:
            raise
        text = f"{error}; with `shoal serve --dispatch-open` no key is asked for here"
        raise Unauthorized(text) from error
