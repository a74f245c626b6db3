"""Whether the coordinator runs, and whether it takes work: for whatever watches it."""

from functools import partial

from aiohttp import web

from shoal import __version__
from shoal.gateway.loopback import is_local
from shoal.gateway.parts import Gateway
from shoal.runtime.door import Door


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the paths of this face; they need no key."""
    return [
        web.get("/healthz", partial(_healthz, gateway)),
        web.get("/readyz", partial(_readyz, gateway)),
    ]


async def _healthz(gateway: Gateway, request: web.Request) -> web.Response:
    # By the second word workers tell it from other coordinators, and by the third
    # they find the ports at which they need no HTTP.
    direct = gateway.door.direct if _reaches_ports(gateway.door, request) else {}
    return web.json_response({"status": "ok", "shoal": __version__, "direct": direct})


def _reaches_ports(door: Door, request: web.Request) -> bool:
    """Say whether whoever asks can have our other ports: not through a proxy."""
    return not door.only_here or is_local(request.remote or "", request.headers)


async def _readyz(gateway: Gateway, request: web.Request) -> web.Response:
    reason = gateway.hub.ready
    if reason is None:
        return web.json_response({"status": "ready"})
    return web.json_response({"status": "not ready", "reason": reason}, status=503)
