"""HTTP operations: a method at a path, with its handler, access and description."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.errors import Unauthorized
from shoal.gateway.context import Gateway
from shoal.gateway.http.access import ANONYMOUS_KEY, ApiCaller
from shoal.gateway.http.authentication import carries_key
from shoal.gateway.http.media_types import JSON_TYPE, SSE_TYPE

Handler: TypeAlias = Callable[
    [Gateway, web.Request, ApiCaller], Awaitable[web.StreamResponse]
]
PublicHandler: TypeAlias = Callable[
    [Gateway, web.Request], Awaitable[web.StreamResponse]
]


@dataclass(frozen=True, slots=True)
class Authorized:
    """A handler for callers with an API key of a scope.

    ``open_wire`` names the protocol or API whose ``open`` setting admits requests
    without a key as well.  ``lists``: it reads a list, of which a key may read few at a
    time.  ``by_calls``: the credential of a running call will do.
    """

    scope: Scope
    handler: Handler
    open_wire: str = ""
    lists: bool = False
    by_calls: bool = False

    async def __call__(
        self, gateway: Gateway, request: web.Request
    ) -> web.StreamResponse:
        # Authorize first: reading the body of a request without a key costs memory.
        caller = await self._authorize(gateway, request)
        if not self.lists:
            return await self.handler(gateway, request, caller)
        async with gateway.access.reading_list(caller):
            return await self.handler(gateway, request, caller)

    async def _authorize(self, gateway: Gateway, request: web.Request) -> ApiCaller:
        is_open = self.open_wire in gateway.anonymous
        if is_open and not carries_key(request.headers):
            gateway.pages.check_keyless(request.headers)
        try:
            return await gateway.access.authorize(
                request,
                self.scope,
                anonymous=ANONYMOUS_KEY if is_open else None,
                by_calls=self.by_calls,
            )
        except Unauthorized as error:
            if not self.open_wire or carries_key(request.headers):
                raise
            raise Unauthorized(
                f"{error}; with `shoal serve --{self.open_wire}-open` these paths "
                "need no key"
            ) from error


@dataclass(frozen=True, slots=True)
class Operation:
    """A method at a path.

    ``endpoint`` is ``Authorized``, or a handler that answers requests without a key.
    ``answer``, ``body`` and ``query`` are the types of the answer, the request's body
    and its query; ``parts`` are types that raw fields of the body refer to.  An
    operation that ``streams`` may answer with a stream of the type ``stream_media``,
    as the body asks, and one with a ``text_media`` with a text of that type, as the
    query asks.  An operation that is not ``documented`` is
    left out of ``/openapi.json``.
    """

    method: str
    path: str
    summary: str
    endpoint: Authorized | PublicHandler
    answer: type[Any] | None = None
    body: type[Any] | None = None
    parts: tuple[type[Any], ...] = ()
    query: type[Any] | None = None
    status: int = 200
    media: str = JSON_TYPE
    streams: bool = False
    stream_media: str = SSE_TYPE
    text_media: str = ""
    documented: bool = True
    pattern: str = "[^{}/]+"  # regular expression of the last parameter
    allow_head: bool = True  # whether GET also answers HEAD: not if it writes a stream

    @property
    def scope(self) -> Scope | None:
        """The scope of the key that it needs; None if it needs no key."""
        return self.endpoint.scope if isinstance(self.endpoint, Authorized) else None

    def route(self, gateway: Gateway) -> web.RouteDef:
        """Return the route for aiohttp's router."""
        path = self.path
        if path.endswith("}"):
            path = f"{path.removesuffix('}')}:{self.pattern}}}"

        async def handler(request: web.Request) -> web.StreamResponse:
            return await self.endpoint(gateway, request)

        if self.method == "GET":
            return web.get(path, handler, allow_head=self.allow_head)
        return web.route(self.method, path, handler)


def opened(operation: Operation, wire: str) -> Operation:
    """Return an operation that needs no key where ``wire`` is open."""
    if not isinstance(operation.endpoint, Authorized):
        return operation
    return replace(operation, endpoint=replace(operation.endpoint, open_wire=wire))
