"""Join tokens over HTTP: made, listed and revoked by those whose key is for that."""

from functools import partial
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from shoal.domain.credentials import JoinToken, Scope, digest_of
from shoal.gateway.admin_keys import ID, Lifetime, NewName
from shoal.gateway.decoding import decode
from shoal.gateway.parts import Gateway
from shoal.gateway.respond import json_answer

PREFIX = "jt-"
USES_MAX = 10_000  # workers of one token that are remembered
PATTERNS_MAX = 100
PATTERN_MAX = 256  # characters

Pattern = Annotated[str, Meta(min_length=1, max_length=PATTERN_MAX)]


class NewToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token that is wanted; ``expires_in`` is in seconds, and None: never.

    ``uses`` is how many workers may join by it, None: any number.  ``models`` are
    patterns as of a shell that their models have to match; empty: any model.
    """

    name: NewName
    uses: Annotated[int, Meta(ge=1, le=USES_MAX)] | None = None
    expires_in: Lifetime | None = None
    models: Annotated[list[Pattern], Meta(max_length=PATTERNS_MAX)] = []


class TokenShown(msgspec.Struct, frozen=True):
    """A join token, by all that is known of it.  Times are Unix seconds.

    ``workers`` are those that are bound to it, if ``uses`` says how many may be;
    ``present`` is how many connections there are now.  ``token`` is the token itself,
    and ``join`` the command for it, told only once, to whoever had it made.
    """

    id: str
    name: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    uses: int | None
    models: list[str]
    workers: list[str]
    present: int
    token: str | msgspec.UnsetType = msgspec.UNSET
    join: str | msgspec.UnsetType = msgspec.UNSET


class TokenList(msgspec.Struct, frozen=True):
    data: list[TokenShown]


_new_token = msgspec.json.Decoder(NewToken)


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the paths of this face."""
    return [
        web.get("/admin/tokens", partial(_list, gateway)),
        web.post("/admin/tokens", partial(_create, gateway)),
        web.delete("/admin/tokens/{name}", partial(_revoke, gateway)),
    ]


async def _list(gateway: Gateway, request: web.Request) -> web.Response:
    await gateway.access.admit(request, Scope.ADMIN)
    return json_answer(
        TokenList([_shown(gateway, token) for token in gateway.door.book])
    )


async def _create(gateway: Gateway, request: web.Request) -> web.Response:
    caller = await gateway.access.admit(request, Scope.ADMIN)
    wanted = decode(_new_token, await gateway.bodies.read(request))
    gateway.access.check(caller)  # else a body that comes slowly outlives its key
    secret = PREFIX + gateway.new_secret()
    now = gateway.clock.wall()
    token = JoinToken(
        f"token_{gateway.new_secret()[:ID]}",
        wanted.name,
        digest_of(secret),
        now,
        None if wanted.expires_in is None else now + wanted.expires_in,
        None,
        wanted.uses,
        tuple(wanted.models),
    )
    door = gateway.door
    await door.book.add(token)
    # Its one worker has to come back under the name that it first had.
    worker = token.name if token.uses_max == 1 else ""
    return json_answer(
        msgspec.structs.replace(
            _shown(gateway, token),
            token=door.shown(secret),
            join=door.invitation(secret, worker),
        ),
        secret=True,
    )


async def _revoke(gateway: Gateway, request: web.Request) -> web.Response:
    await gateway.access.admit(request, Scope.ADMIN)
    token = gateway.door.book.named(request.match_info["name"])
    return json_answer(_shown(gateway, await gateway.door.revoke(token)))


def _shown(gateway: Gateway, token: JoinToken) -> TokenShown:
    return TokenShown(
        token.id,
        token.name,
        token.created_at,
        token.expires_at,
        token.revoked_at,
        token.uses_max,
        list(token.models),
        sorted(token.workers),
        gateway.door.present(token),
    )
