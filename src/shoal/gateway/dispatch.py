"""Dispatch's HTTP face: its prices, jobs and pairing, and who may come in there.

Source: exchanges recorded with the original coordinator; ``docs/jobs.md`` has what is
different here, and what is more.
"""

from functools import partial

from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.errors import Unauthorized
from shoal.gateway.context import Gateway
from shoal.gateway.http.access import ANONYMOUS_KEY, ApiCaller
from shoal.gateway.jobs import endpoints, events, pairing, quotes, submit_job

WIRE = "dispatch"


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the paths of this face."""
    enter = partial(_authorize, gateway)
    parts = (quotes, submit_job, endpoints, events, pairing)
    return [route for part in parts for route in part.routes(gateway, enter)]


async def _authorize(
    gateway: Gateway, request: web.Request, needed: Scope
) -> ApiCaller:
    """Let callers in; the original's clients show no key."""
    stranger = ANONYMOUS_KEY if WIRE in gateway.anonymous else None
    try:
        return await gateway.access.authorize(request, needed, anonymous=stranger)
    except Unauthorized as error:
        if "Authorization" in request.headers:
            raise
        text = f"{error}; with `shoal serve --dispatch-open` no key is asked for here"
        raise Unauthorized(text) from error
