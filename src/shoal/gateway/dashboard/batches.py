"""The batches of all keys, for operators; of one's own key for others."""

from typing import Annotated

import msgspec

from shoal.domain.credentials import Scope
from shoal.gateway.batches.endpoints import (
    BatchObject,
    shown_batch,
    visible_batch,
)
from shoal.gateway.batches.files import FileId
from shoal.gateway.context import Gateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.operation import Operations

api = Operations()

LISTED_MAX = 1000


class OwnedBatch(BatchObject, frozen=True, kw_only=True):
    """A batch, and the name of the key that created it."""

    owner: str


class OwnedBatchQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many batches to list, newest first, created ``before`` the one of an id."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=LISTED_MAX)] = 50
    before: FileId | msgspec.UnsetType = msgspec.UNSET


class OwnedBatchList(msgspec.Struct, frozen=True):
    """Batches, newest first; ``next`` is the ``before`` of the next page."""

    data: list[OwnedBatch]
    next: str | None


@api.get(
    "/admin/batches",
    "List the batches of all keys, newest first",
    Scope.READ,
    lists=True,
)
async def list_batches(
    gateway: Gateway, caller: ApiCaller, query: OwnedBatchQuery
) -> OwnedBatchList:
    before = None
    if query.before is not msgspec.UNSET:
        before = (await visible_batch(gateway, query.before, caller)).id
    owner = None if caller.has_scope(Scope.MONITOR) else caller.name
    found = await gateway.store.batches.listed(owner, before, query.limit + 1)
    page = [
        OwnedBatch(**msgspec.structs.asdict(shown_batch(each)), owner=each.owner)
        for each in found[: query.limit]
    ]
    return OwnedBatchList(page, page[-1].id if len(found) > len(page) else None)
