"""The operators' API of aliases: names that stand for models, in order."""

import msgspec

from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest, NotFound
from shoal.domain.facts import AliasSet
from shoal.gateway.context import ModelsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.operation import ANYTHING, Operations
from shoal.gateway.models.listing import seen_by
from shoal.pool.inputs import AliasOrder
from shoal.pool.models.aliases import alias_rejection, served_model
from shoal.pool.roster import suggest_names

api = Operations()


class AliasInfo(msgspec.Struct, frozen=True):
    """A name, or a pattern with one ``*``, and the models that it stands for.

    ``serves`` is the one that requests get now; null if no worker serves any of them,
    or has a model of that very name, which hides the alias.
    """

    name: str
    models: tuple[str, ...]
    serves: str | None


class AliasList(msgspec.Struct, frozen=True):
    data: list[AliasInfo]


class SetAlias(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The models that a name stands for, the preferred one first."""

    models: list[str]


class RemovedAlias(msgspec.Struct, frozen=True):
    name: str
    removed: bool = True


@api.get("/admin/aliases", "List the aliases of models", Scope.READ, lists=True)
async def list_aliases(gateway: ModelsGateway, caller: ApiCaller) -> AliasList:
    aliases = gateway.hub.pool.aliases
    listed = [_info(gateway, caller, aliases[name]) for name in sorted(aliases)]
    return AliasList(listed)


@api.put(
    "/admin/aliases/{name}",
    "Let a name stand for models",
    Scope.ADMIN,
    pattern=ANYTHING,
)
async def set_alias(
    gateway: ModelsGateway, caller: ApiCaller, name: str, body: SetAlias
) -> AliasInfo:
    if (reason := alias_rejection(gateway.hub.pool, name, body.models)) is not None:
        raise InvalidRequest(reason)
    alias = AliasSet(name, tuple(body.models), caller.name)
    await gateway.hub.process(AliasOrder(name, alias.models, alias.by))
    return _info(gateway, caller, alias)


@api.delete("/admin/aliases/{name}", "Remove an alias", Scope.ADMIN, pattern=ANYTHING)
async def remove_alias(
    gateway: ModelsGateway, caller: ApiCaller, name: str
) -> RemovedAlias:
    aliases = gateway.hub.pool.aliases
    if name not in aliases:
        suggestion = suggest_names(name, aliases, "`shoal models alias ls` lists all")
        raise NotFound(
            f"there is no alias {name[:80]!r}: {suggestion or 'there are none'}"
        )
    await gateway.hub.process(AliasOrder(name, (), caller.name))
    return RemovedAlias(name)


def _info(gateway: ModelsGateway, caller: ApiCaller, alias: AliasSet) -> AliasInfo:
    serves = served_model(gateway.hub.pool, alias, seen_by(caller).owner)
    return AliasInfo(alias.name, alias.models, serves)
