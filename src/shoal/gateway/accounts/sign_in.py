"""Signs browsers in and out, and makes links that sign in once."""

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from shoal.domain.credentials import Key, Scope
from shoal.domain.errors import InvalidRequest
from shoal.gateway.accounts.credentials import ScopeName
from shoal.gateway.context import AccountsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.browser_sessions import set_cookie
from shoal.gateway.http.decoding import decode
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.responses import json_response

api = Operations()

BODY_MAX = 4096  # bytes; who signs in has no key yet
SECRET_MAX = 1024  # characters

Secret = Annotated[str, Meta(max_length=SECRET_MAX)]


class NewSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What signs a browser in: an API key, or the code of a one-time link."""

    api_key: Secret = ""
    code: Secret = ""


class SessionInfo(msgspec.Struct, frozen=True):
    """Who is signed in: the name and scope of the key.

    ``expires_at`` is the Unix time at which the session ends; None: it does not.
    """

    name: str
    scope: ScopeName
    expires_at: float | None


class DashboardLink(msgspec.Struct, frozen=True):
    """A link that signs a browser in once, until a Unix time."""

    url: str
    expires_at: float


_new_session = msgspec.json.Decoder(NewSession)


@api.get("/dashboard/session", "Show who is signed in", Scope.READ, secret=True)
async def show_session(caller: ApiCaller) -> SessionInfo:
    return _info(caller)


@api.post(
    "/dashboard/session", "Sign a browser in", answer=SessionInfo, body=NewSession
)
async def begin_session(gateway: AccountsGateway, request: web.Request) -> web.Response:
    access = gateway.access
    # Also here: a page could sign the user in as somebody else.
    access.sessions.check_page(request)
    body = decode(_new_session, await gateway.bodies.read(request, BODY_MAX))
    if bool(body.api_key) == bool(body.code):
        raise InvalidRequest("expected an api_key or a code")
    value = gateway.new_secret()
    caller = await access.sign_in(request, value, api_key=body.api_key, code=body.code)
    assert caller.session is not None, "it has just begun"
    ends = caller.session.expires_at
    response = json_response(_info(caller), secret=True)
    set_cookie(request, response, value, ends - gateway.clock.wall())
    return response


@api.delete("/dashboard/session", "Sign a browser out", status=204)
async def end_session(gateway: AccountsGateway, request: web.Request) -> web.Response:
    gateway.access.sessions.check_page(request)
    await gateway.access.sign_out(request)
    response = web.Response(status=204)
    set_cookie(request, response, "", 0)
    return response


@api.post(
    "/dashboard/links", "Create a link that signs in once", Scope.ADMIN, secret=True
)
async def create_link(gateway: AccountsGateway, caller: ApiCaller) -> DashboardLink:
    return await new_link(gateway, caller.key)


async def new_link(gateway: AccountsGateway, key: Key) -> DashboardLink:
    """Return a new link that signs in as a key.  Raises StoreError."""
    code = gateway.new_secret()
    at = gateway.clock.wall()
    expires_at = await gateway.access.sessions.add_code(code, key, at)
    # Browsers send no fragment: no log on the way has the code.
    url = f"{gateway.admission.urls()[0]}/#signin={code}"
    return DashboardLink(url, expires_at)


def _info(caller: ApiCaller) -> SessionInfo:
    expires_at = caller.key.expires_at
    if caller.session is not None:
        expires_at = caller.session.expires_at
    return SessionInfo(caller.name, caller.key.scope.value, expires_at)
