"""API keys over HTTP: made, listed and revoked by those whose key is for that."""

from functools import partial
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from shoal.domain.credentials import NAME, Key, Quota, Scope, Used, day_of, digest_of
from shoal.domain.errors import InvalidRequest
from shoal.gateway.access import RESERVED
from shoal.gateway.decoding import decode
from shoal.gateway.parts import Gateway
from shoal.gateway.respond import json_answer

PREFIX = "sk-shoal-"
START = len(PREFIX) + 4  # characters by which a key can be told from others
ID = 12  # characters
LIMIT_MAX = 2**53 - 1  # what JavaScript can count to
LIFETIME_MAX = 100 * 365 * 86_400  # seconds: a century is as good as for ever

# Checked by the book of keys, which says better what is wrong.
NewName = Annotated[str, Meta(extra_json_schema={"pattern": f"^{NAME.pattern}$"})]
Lifetime = Annotated[float, Meta(gt=0, le=LIFETIME_MAX)]
Limit = Annotated[int, Meta(ge=1, le=LIMIT_MAX)]
ScopeName = Literal["read", "use", "admin"]


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key that is wanted; ``expires_in`` is in seconds, and None: never.

    Limits that are None do not limit.
    """

    name: NewName
    scope: ScopeName = "use"
    expires_in: Lifetime | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    tokens_per_day: Limit | None = None
    budget: Limit | None = None


class KeyShown(msgspec.Struct, frozen=True):
    """A key, by all that is known of it.  Times are Unix seconds.

    ``key`` is the key itself, and told only once, to whoever had it made.
    """

    id: str
    name: str
    start: str
    scope: ScopeName
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    tokens_per_day: int | None
    budget: int | None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    tokens_today: int
    key: str | msgspec.UnsetType = msgspec.UNSET


class KeyList(msgspec.Struct, frozen=True):
    data: list[KeyShown]


_new_key = msgspec.json.Decoder(NewKey)


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the paths of this face."""
    return [
        web.get("/admin/keys", partial(_list, gateway)),
        web.post("/admin/keys", partial(_create, gateway)),
        web.get("/admin/keys/{name}", partial(_show, gateway)),
        web.delete("/admin/keys/{name}", partial(_revoke, gateway)),
    ]


async def _list(gateway: Gateway, request: web.Request) -> web.Response:
    await gateway.access.admit(request, Scope.ADMIN)
    used = await gateway.keys.used_by_all(day_of(gateway.clock.wall()))
    book = gateway.access.keyring.book
    return json_answer(
        KeyList([_shown(key, used.get(key.name, Used())) for key in book])
    )


async def _create(gateway: Gateway, request: web.Request) -> web.Response:
    caller = await gateway.access.admit(request, Scope.ADMIN)
    wanted = decode(_new_key, await gateway.bodies.read(request))
    gateway.access.check(caller)  # else a body that comes slowly outlives its key
    secret = PREFIX + gateway.new_secret()
    now = gateway.clock.wall()
    key = Key(
        f"key_{gateway.new_secret()[:ID]}",
        wanted.name,
        digest_of(secret),
        secret[:START],
        Scope(wanted.scope),
        now,
        None if wanted.expires_in is None else now + wanted.expires_in,
        None,
        Quota(
            wanted.requests_per_minute,
            wanted.tokens_per_minute,
            wanted.tokens_per_day,
            wanted.budget,
        ),
    )
    await gateway.access.keyring.book.add(key)
    shown = await _with_usage(gateway, key)
    return json_answer(msgspec.structs.replace(shown, key=secret), secret=True)


async def _show(gateway: Gateway, request: web.Request) -> web.Response:
    await gateway.access.admit(request, Scope.ADMIN)
    return json_answer(await _with_usage(gateway, _named(gateway, request)))


async def _revoke(gateway: Gateway, request: web.Request) -> web.Response:
    await gateway.access.admit(request, Scope.ADMIN)
    key = await gateway.access.revoke(_named(gateway, request))
    return json_answer(await _with_usage(gateway, key))


def _named(gateway: Gateway, request: web.Request) -> Key:
    name = request.match_info["name"]
    if name in RESERVED:
        raise InvalidRequest(
            f"{name} is no key that was made here: for another first key, give "
            "`shoal serve` another --api-key, or delete the file api-key in its "
            "data folder"
        )
    return gateway.access.keyring.book.named(name)


async def _with_usage(gateway: Gateway, key: Key) -> KeyShown:
    today = day_of(gateway.clock.wall())
    return _shown(key, await gateway.keys.used(key.name, today))


def _shown(key: Key, used: Used) -> KeyShown:
    return KeyShown(
        key.id,
        key.name,
        key.start,
        key.scope.value,
        key.created_at,
        key.expires_at,
        key.revoked_at,
        key.quota.requests_per_minute,
        key.quota.tokens_per_minute,
        key.quota.tokens_per_day,
        key.quota.budget,
        used.requests,
        used.prompt_tokens,
        used.completion_tokens,
        used.tokens_today,
    )
