"""HTTP operations: a method at a path, with its handler, access and description."""

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.errors import Unauthorized
from shoal.gateway.context import Gateway
from shoal.gateway.http.access import ANONYMOUS_KEY, ApiCaller
from shoal.gateway.http.authentication import carries_key
from shoal.gateway.http.decoding import decode, read_query
from shoal.gateway.http.errors import OPENAI_ERRORS, ErrorForm
from shoal.gateway.http.responses import BYTES_TYPE, JSON_TYPE, SSE_TYPE, json_response

GIVEN = ("gateway", "request", "caller", "query", "body")
SWITCHING_PROTOCOLS = 101
ANYTHING = ".+"  # a pattern: also slashes

Answer: TypeAlias = web.StreamResponse | msgspec.Struct
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Answer]])


@dataclass(frozen=True, slots=True)
class Operation:
    """A method at a path.

    Its ``handler`` gets what it names of ``GIVEN`` and of the path's parameters.  The
    caller has a key of the ``scope``; without a scope, there is no caller, and no key
    is needed.  ``errors`` is the form of its errors.  ``sees`` has the parts of the
    gateway that the handler gets.  ``answer``, ``body`` and ``query`` are the types of
    the answer, the request's body and its query.
    """

    method: str
    path: str
    summary: str
    handler: Callable[..., Awaitable[Answer]]
    takes: Sequence[str]
    sees: type[Any] | None
    scope: Scope | None
    errors: ErrorForm
    lists: bool = False  # it reads a list, of which a key may read few at a time
    by_calls: bool = False  # the credential of a running call will do
    open_wire: str = ""  # whose ``open`` setting admits requests without a key as well
    answer: type[Any] | None = None
    body: type[Any] | None = None
    parts: tuple[type[Any], ...] = ()  # what raw fields of the body refer to
    query: type[Any] | None = None
    status: int = 200
    media: str = JSON_TYPE
    streams: str = ""  # it may answer with a stream of this type, as the body asks
    text_media: str = ""  # it may answer with a text of this type, as the query asks
    secret: bool = False  # the answer has a secret: caches do not store it
    documented: bool = True  # in ``/openapi.json``
    pattern: str = "[^{}/]+"  # regular expression of the last parameter

    @property
    def allow_head(self) -> bool:
        """Whether a GET also answers HEAD: not if it writes a stream."""
        written = self.streams or self.media in (SSE_TYPE, BYTES_TYPE)
        return not written and self.status != SWITCHING_PROTOCOLS

    def route(self, gateway: Gateway) -> web.RouteDef:
        """Return the route for aiohttp's router."""
        path = self.path
        if path.endswith("}"):
            path = f"{path.removesuffix('}')}:{self.pattern}}}"

        seen = None if self.sees is None else gateway.select(self.sees)
        respond = partial(
            self._respond_to_list if self.lists else self._respond, gateway, seen
        )
        if self.method == "GET":
            return web.get(path, respond, allow_head=self.allow_head)
        return web.route(self.method, path, respond)

    async def _respond_to_list(
        self, gateway: Gateway, seen: object, request: web.Request
    ) -> web.StreamResponse:
        assert self.scope is not None, "lists are read with a key"
        caller = await self._authorize(gateway, request, self.scope)
        async with gateway.access.reading_list(caller):
            return await self._respond(gateway, seen, request, caller)

    async def _respond(
        self,
        gateway: Gateway,
        seen: object,
        request: web.Request,
        caller: ApiCaller | None = None,
    ) -> web.StreamResponse:
        # Authorize first: reading the body of a request without a key costs memory.
        if caller is None and self.scope is not None:
            caller = await self._authorize(gateway, request, self.scope)
        given = {"gateway": seen, "request": request, "caller": caller}
        given |= request.match_info
        if "query" in self.takes and self.query is not None:
            given["query"] = read_query(request, self.query)
        if "body" in self.takes and self.body is not None:
            data = await gateway.bodies.read(request)
            given["body"] = decode(msgspec.json.Decoder(self.body), data)
            if caller is not None:  # the key may have been revoked meanwhile
                gateway.access.ensure_active(caller)
        taken = map(given.__getitem__, self.takes)
        answered = await self.handler(**dict(zip(self.takes, taken, strict=True)))
        if isinstance(answered, web.StreamResponse):
            return answered
        return json_response(answered, self.status, secret=self.secret)

    async def _authorize(
        self, gateway: Gateway, request: web.Request, scope: Scope
    ) -> ApiCaller:
        is_open = self.open_wire in gateway.anonymous
        if is_open and not carries_key(request.headers):
            gateway.pages.check_keyless(request.headers)
        try:
            return await gateway.access.authorize(
                request,
                scope,
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


class Details(TypedDict, total=False):
    """The fields of an operation that most have by default."""

    lists: bool
    by_calls: bool
    answer: type[Any]
    body: type[Any]
    parts: tuple[type[Any], ...]
    query: type[Any]
    status: int
    media: str
    streams: str
    text_media: str
    secret: bool
    documented: bool
    pattern: str


class Operations(list[Operation]):
    """The operations of a module, which stand above their handlers.

    ``errors`` is the form of their errors.
    """

    def __init__(self, errors: ErrorForm = OPENAI_ERRORS) -> None:
        super().__init__()
        self.errors = errors
        self.get = partial(self.add, "GET")
        self.post = partial(self.add, "POST")
        self.put = partial(self.add, "PUT")
        self.delete = partial(self.add, "DELETE")

    def add(
        self,
        method: str,
        path: str,
        summary: str,
        scope: Scope | None = None,
        **details: Unpack[Details],
    ) -> Callable[[Handler], Handler]:
        """Return a decorator that adds the operation of a handler.

        What the handler returns, if that is not a response, is the answer; the types of
        the query and of the body are those of the parameters of these names.
        """

        def decorate(handler: Handler) -> Handler:
            has = signature(handler)
            known = {*GIVEN, *re.findall(r"{(\w+)}", path)}
            takes = [name for name in has.parameters if name in known]
            assert scope is not None or "caller" not in takes, (
                "without a key, no caller"
            )
            sees = has.parameters["gateway"].annotation if "gateway" in takes else None
            described: Details = {**details}
            if has.return_annotation not in (web.Response, web.StreamResponse):
                described["answer"] = has.return_annotation
            if "query" in takes:
                described["query"] = has.parameters["query"].annotation
            if "body" in takes:
                described["body"] = has.parameters["body"].annotation
            self.append(
                Operation(
                    *(method, path, summary, handler, takes, sees, scope, self.errors),
                    **described,
                )
            )
            return handler

        return decorate


def opened(operations: Iterable[Operation], wire: str) -> list[Operation]:
    """Return operations that need no key where ``wire`` is open."""
    return [replace(each, open_wire=wire) for each in operations]


def below(prefix: str, operations: Iterable[Operation]) -> list[Operation]:
    """Return operations at the paths below ``prefix``."""
    return [replace(each, path=prefix + each.path) for each in operations]


def error_form_finder(operations: Iterable[Operation]) -> Callable[[str], ErrorForm]:
    """Return the function from a path to the form of errors there.

    An unknown path has the form of the first operation that begins as it does.
    """
    forms: dict[str, ErrorForm] = {}
    for operation in operations:
        for each in accumulate(operation.path.split("/"), "{}/{}".format):
            forms.setdefault(each, operation.errors)

    def error_form(path: str) -> ErrorForm:
        while path not in forms:
            path = path.rpartition("/")[0]
        return forms[path]

    return error_form
