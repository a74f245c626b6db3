"""Whether the coordinator runs, and whether it takes work: for whatever watches it."""

from functools import partial

from aiohttp import web

from shoal import __version__
from shoal.gateway.parts import Gateway


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the paths of this face; they need no key."""
    return [
        web.get("/healthz", _healthz),
        web.get("/readyz", partial(_readyz, gateway)),
    ]


async def _healthz(request: web.Request) -> web.Response:
    # By the second word workers tell it from other coordinators.
    return web.json_response({"status": "ok", "shoal": __version__})


async def _readyz(gateway: Gateway, request: web.Request) -> web.Response:
    reason = gateway.hub.ready
    if reason is None:
        return web.json_response({"status": "ready"})
    return web.json_response({"status": "not ready", "reason": reason}, status=503)
