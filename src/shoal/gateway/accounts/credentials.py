"""The API of API keys and join tokens: create, list, show and revoke."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from shoal.domain import credentials
from shoal.domain.errors import InvalidRequest
from shoal.domain.job import PRIORITIES, Priority
from shoal.gateway.context import AccountsGateway
from shoal.gateway.http.access import RESERVED_NAMES
from shoal.gateway.http.authentication import KEY_PREFIX, shown_start
from shoal.gateway.http.operation import Operations

api = Operations()

C = TypeVar("C", credentials.Key, credentials.JoinToken)

ID_LENGTH = 12  # characters
LIMIT_MAX = 2**53 - 1  # what JavaScript can count to
LISTED_MAX = 1000  # keys or tokens in one response
LIFETIME_MAX = 100 * 365 * 86_400  # seconds: a century
HOSTED_AFTER_MAX = 86_400  # seconds

# Checked by the credential cache, which has clearer errors.
NewName = Annotated[
    str, Meta(extra_json_schema={"pattern": f"^{credentials.NAME_PATTERN.pattern}$"})
]
Lifetime = Annotated[float, Meta(gt=0, le=LIFETIME_MAX)]
KeyLimit = Annotated[int, Meta(ge=1, le=LIMIT_MAX)]
HostedAfter = Annotated[float, Meta(ge=0, le=HOSTED_AFTER_MAX)]
ScopeName = Literal["read", "use", "monitor", "admin"]
PriorityName = Literal["low", "normal", "high"]


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key to create; ``expires_in`` is in seconds, None: never.

    A limit of None does not limit.  ``priority_max`` is the highest priority of its
    jobs.  ``hosted_after`` is how many seconds they wait for a machine of the pool,
    until a hosted provider may do them; None: none may.
    """

    name: NewName
    scope: ScopeName = "use"
    expires_in: Lifetime | None = None
    requests_per_minute: KeyLimit | None = None
    tokens_per_minute: KeyLimit | None = None
    tokens_per_day: KeyLimit | None = None
    budget: KeyLimit | None = None
    priority_max: PriorityName = "high"
    hosted_after: HostedAfter | None = None


class KeyInfo(msgspec.Struct, frozen=True):
    """A key and its usage.  Times are Unix seconds.

    ``key`` is the secret, and ``pinned_key`` the same with the fingerprint of a
    coordinator with TLS, for Shoal's programs; only the response to the creation has
    them.
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
    priority_max: PriorityName
    hosted_after: float | None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    tokens_today: int
    key: str | msgspec.UnsetType = msgspec.UNSET
    pinned_key: str | msgspec.UnsetType = msgspec.UNSET


class CredentialQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many keys or tokens to list, the oldest first, ``after`` which.

    That is an id, or the ``next`` of the page before.
    """

    limit: Annotated[int, Meta(ge=1, le=LISTED_MAX)] = LISTED_MAX
    after: str = ""


class KeyList(msgspec.Struct, frozen=True):
    """Keys, the oldest first; ``next`` is the ``after`` of the next page.

    The first of all is the key of the coordinator itself, whose id is its name.
    """

    data: list[KeyInfo]
    next: str | None


_PRIORITY_NAMES: Mapping[Priority, PriorityName] = {
    Priority.LOW: "low",
    Priority.NORMAL: "normal",
    Priority.HIGH: "high",
}


@api.get("/admin/keys", "List the API keys", credentials.Scope.MONITOR, lists=True)
async def list_keys(gateway: AccountsGateway, query: CredentialQuery) -> KeyList:
    keyring = gateway.access.keyring
    first = [
        replace(each, id=each.name, created_at=gateway.created_at)
        for each in keyring.first
    ]
    page, more = _page([*first, *keyring.cache], query)
    used = await gateway.store.keys.usage_by_owner(
        credentials.day_of(gateway.clock.wall()), {key.name for key in page}
    )
    return KeyList(
        [_key_info(key, used.get(key.name, credentials.KeyUsage())) for key in page],
        more,
    )


@api.post("/admin/keys", "Create an API key", credentials.Scope.ADMIN, secret=True)
async def create_key(gateway: AccountsGateway, body: NewKey) -> KeyInfo:
    secret = KEY_PREFIX + gateway.new_secret()
    now = gateway.clock.wall()
    key = credentials.Key(
        f"key_{gateway.new_secret()[:ID_LENGTH]}",
        body.name,
        credentials.digest_of(secret),
        shown_start(secret),
        credentials.Scope(body.scope),
        now,
        _expiry(body, now),
        None,
        credentials.Quota(
            body.requests_per_minute,
            body.tokens_per_minute,
            body.tokens_per_day,
            body.budget,
        ),
        PRIORITIES[body.priority_max],
        body.hosted_after,
    )
    await gateway.access.keyring.cache.add(key)
    shown = await _key_with_usage(gateway, key)
    admission = gateway.admission
    pinned: str | msgspec.UnsetType = msgspec.UNSET
    if admission.fingerprint is not None:
        pinned = admission.with_fingerprint(secret)
    return msgspec.structs.replace(shown, key=secret, pinned_key=pinned)


@api.get("/admin/keys/{name}", "Show an API key", credentials.Scope.MONITOR)
async def show_key(gateway: AccountsGateway, name: str) -> KeyInfo:
    return await _key_with_usage(gateway, _key_named(gateway, name))


@api.delete("/admin/keys/{name}", "Revoke an API key", credentials.Scope.ADMIN)
async def revoke_key(gateway: AccountsGateway, name: str) -> KeyInfo:
    key = await gateway.access.revoke(_key_named(gateway, name))
    return await _key_with_usage(gateway, key)


def _key_named(gateway: AccountsGateway, name: str) -> credentials.Key:
    if name in RESERVED_NAMES:
        raise InvalidRequest(
            f"{name} is not a key that can be revoked here: to change the first key, "
            "give `shoal serve` another --api-key, or delete the file api-key in its "
            "data folder"
        )
    return gateway.access.keyring.cache.find(name)


async def _key_with_usage(gateway: AccountsGateway, key: credentials.Key) -> KeyInfo:
    today = credentials.day_of(gateway.clock.wall())
    return _key_info(key, await gateway.store.keys.usage_of(key.name, today))


def _key_info(key: credentials.Key, used: credentials.KeyUsage) -> KeyInfo:
    return KeyInfo(
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
        _PRIORITY_NAMES[key.priority_max],
        key.hosted_after,
        used.requests,
        used.prompt_tokens,
        used.completion_tokens,
        used.tokens_today,
    )


TOKEN_PREFIX = "jt-"
USES_MAX = 10_000  # workers bound to one token
PATTERNS_MAX = 100
PATTERN_MAX = 256  # characters

ModelPattern = Annotated[str, Meta(min_length=1, max_length=PATTERN_MAX)]


class NewToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token to create; ``expires_in`` is in seconds, None: never.

    ``uses`` is how many workers may join with it, None: any number.  ``models`` are
    shell patterns that their models must match; empty: any model.
    """

    name: NewName
    uses: Annotated[int, Meta(ge=1, le=USES_MAX)] | None = None
    expires_in: Lifetime | None = None
    models: Annotated[list[ModelPattern], Meta(max_length=PATTERNS_MAX)] = []


class TokenInfo(msgspec.Struct, frozen=True):
    """A join token.  Times are Unix seconds.

    ``workers`` are bound to the token, if ``uses`` limits it; ``present`` is the number
    of their connections.  ``token`` is the secret and ``join`` the command to join
    with; only the response to its creation has them.
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
    """Tokens, the oldest first; ``next`` is the ``after`` of the next page."""

    data: list[TokenInfo]
    next: str | None


@api.get("/admin/tokens", "List the join tokens", credentials.Scope.MONITOR, lists=True)
async def list_tokens(gateway: AccountsGateway, query: CredentialQuery) -> TokenList:
    page, more = _page(gateway.admission.tokens, query)
    return TokenList([_token_info(gateway, token) for token in page], more)


@api.post("/admin/tokens", "Create a join token", credentials.Scope.ADMIN, secret=True)
async def create_token(gateway: AccountsGateway, body: NewToken) -> TokenInfo:
    secret, token = await add_token(gateway, body)
    admission = gateway.admission
    # A token's only worker must rejoin with the same name.
    worker = token.name if token.uses_max == 1 else ""
    return msgspec.structs.replace(
        _token_info(gateway, token),
        token=admission.with_fingerprint(secret),
        join=admission.invitation(secret, worker),
    )


async def add_token(
    gateway: AccountsGateway, wanted: NewToken
) -> tuple[str, credentials.JoinToken]:
    """Store a new token; return its secret, and the token.

    Raises InvalidRequest, StoreError.
    """
    secret = TOKEN_PREFIX + gateway.new_secret()
    now = gateway.clock.wall()
    token = credentials.JoinToken(
        f"token_{gateway.new_secret()[:ID_LENGTH]}",
        wanted.name,
        credentials.digest_of(secret),
        now,
        _expiry(wanted, now),
        None,
        wanted.uses,
        tuple(wanted.models),
    )
    await gateway.admission.tokens.add(token)
    return secret, token


@api.delete("/admin/tokens/{name}", "Revoke a join token", credentials.Scope.ADMIN)
async def revoke_token(gateway: AccountsGateway, name: str) -> TokenInfo:
    token = gateway.admission.tokens.find(name)
    return _token_info(gateway, await gateway.admission.revoke(token))


def _token_info(gateway: AccountsGateway, token: credentials.JoinToken) -> TokenInfo:
    return TokenInfo(
        token.id,
        token.name,
        token.created_at,
        token.expires_at,
        token.revoked_at,
        token.uses_max,
        list(token.models),
        sorted(map(credentials.without_key, token.workers)),
        gateway.admission.count_connected(token),
    )


# Of both.


def _page(found: Iterable[C], query: CredentialQuery) -> tuple[list[C], str | None]:
    """Return the requested page, and the ``after`` of the next one.

    Raises InvalidRequest.
    """
    listed, first = list(found), 0
    if query.after:
        ids = [each.id for each in listed]
        id_, place = query.after, _PLACE.fullmatch(query.after)
        if place is not None:
            id_, at = place[1], float(place[2])
        if id_ in ids:
            first = ids.index(id_) + 1
        elif place is not None:  # it was deleted meanwhile
            older = (n for n, each in enumerate(listed, 1) if each.created_at <= at)
            first = max(older, default=0)
        else:
            raise InvalidRequest(f"after: there is no {id_}", "after")
    page = listed[first : first + query.limit]
    if first + query.limit >= len(listed):
        return page, None
    return page, f"{page[-1].id}@{page[-1].created_at:.6f}"


_PLACE = re.compile(r"(.+)@([0-9]{1,12}\.[0-9]{6})", re.ASCII)


def _expiry(wanted: NewKey | NewToken, now: float) -> float | None:
    return None if wanted.expires_in is None else now + wanted.expires_in
