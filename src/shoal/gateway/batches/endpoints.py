"""OpenAI's batches: requests in a file, done when the pool has nothing better to do.

Source: OpenAI's API reference, "Batch".
"""

import re
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from shoal.domain.credentials import DAY, Scope
from shoal.domain.errors import AlreadyEnded, InvalidRequest, NotFound
from shoal.gateway.batches.files import FileId, find_place, owned_file
from shoal.gateway.batches.lines import DIALECTS
from shoal.gateway.context import BatchesGateway
from shoal.gateway.http import decoding
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.ids import new_id
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.responses import ItemList, item_list
from shoal.store.batches import BatchStatus, StoredBatch

api = Operations()
overview = Operations()  # for operators: the batches of all keys

LISTED_MAX = 100  # batches in one response
WINDOW_MAX = 7 * DAY  # seconds
HOUR = 3600

_WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])", re.ASCII)


class CreateBatch(msgspec.Struct, frozen=True):
    """The body.  Fields that are not here are ignored, as OpenAI's clients expect."""

    input_file_id: FileId
    endpoint: str
    completion_window: str
    metadata: decoding.Metadata | None = None
    output_expires_after: decoding.Ignored | UnsetType = UNSET


class BatchErrorObject(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrorList(msgspec.Struct, frozen=True):
    data: list[BatchErrorObject]
    object: Literal["list"] = "list"


class BatchRequestCounts(msgspec.Struct, frozen=True):
    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, frozen=True):
    id: str
    endpoint: str
    model: str | None
    errors: BatchErrorList | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchRequestCounts
    metadata: dict[str, str] | None
    object: Literal["batch"] = "batch"


class BatchListQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A page of batches."""

    after: FileId | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=LISTED_MAX)] = 20


_decoder = msgspec.json.Decoder(CreateBatch)


@api.post("/v1/batches", "Create a batch", Scope.USE, body=CreateBatch)
async def create_batch(
    gateway: BatchesGateway, request: web.Request, caller: ApiCaller
) -> BatchObject:
    def decode_body(data: bytes) -> CreateBatch:
        return decoding.decode(_decoder, data)

    body = await gateway.bodies.decode(request, caller.name, decode_body)
    if decoding.is_given(body.output_expires_after):
        raise decoding.unsupported("output_expires_after")
    if body.endpoint not in DIALECTS:
        expected = ", ".join(DIALECTS)
        raise InvalidRequest(f"endpoint: expected one of {expected}", "endpoint")
    seconds = _window(body.completion_window)
    found = await owned_file(gateway, body.input_file_id, caller)
    if found.owner != caller.name:
        raise NotFound(f"there is no file {found.id} of this key")
    at = gateway.clock.wall()
    new = StoredBatch(
        f"batch_{new_id()}",
        caller.name,
        body.endpoint,
        found.id,
        body.completion_window,
        at,
        at + seconds,
        body.metadata,
    )
    await gateway.batches.add(new)
    return shown_batch(new)


@api.get("/v1/batches", "List batches, newest first", Scope.READ, lists=True)
async def list_batches(
    gateway: BatchesGateway, caller: ApiCaller, query: BatchListQuery
) -> ItemList[BatchObject]:
    after = await find_place(gateway.store.batches, query.after, caller)
    found = await gateway.store.batches.listed(caller.name, after, query.limit + 1)
    page = [shown_batch(each) for each in found[: query.limit]]
    return item_list(page, [each.id for each in page], len(found) > len(page))


@api.get("/v1/batches/{batch_id}", "Show a batch", Scope.READ)
async def show_batch(
    gateway: BatchesGateway, caller: ApiCaller, batch_id: str
) -> BatchObject:
    batch = await visible_batch(gateway, batch_id, caller)
    return shown_batch(batch)


@api.post("/v1/batches/{batch_id}/cancel", "Cancel a batch", Scope.USE)
async def cancel_batch(
    gateway: BatchesGateway, caller: ApiCaller, batch_id: str
) -> BatchObject:
    batch = await visible_batch(gateway, batch_id, caller)
    if batch.status is not BatchStatus.CANCELLING:
        cancelled = await gateway.batches.cancel(batch.id)
        batch = await visible_batch(gateway, batch.id, caller)
        if not cancelled and batch.status is not BatchStatus.CANCELLING:
            raise AlreadyEnded(f"the batch is {batch.status.value}")
    return shown_batch(batch)


async def visible_batch(
    gateway: BatchesGateway, batch_id: str, caller: ApiCaller
) -> StoredBatch:
    """Return a batch that the caller may see.  Raises NotFound."""
    found = await gateway.store.batches.find(batch_id)
    mine = found is not None and found.owner == caller.name
    if found is None or not (mine or caller.has_scope(Scope.MONITOR)):
        raise NotFound(f"there is no batch {batch_id[:64]}")
    return found


def _window(given: str) -> float:
    """Return the seconds of a completion window.  Raises InvalidRequest."""
    found = _WINDOW.fullmatch(given)
    seconds = 0.0
    if found is not None:
        seconds = int(found[1]) * (HOUR if found[2] == "h" else DAY)
    if not 0 < seconds <= WINDOW_MAX:
        raise InvalidRequest(
            f"completion_window: expected 1h to 7d, such as 24h, got {given[:40]!r}",
            "completion_window",
        )
    return seconds


def shown_batch(batch: StoredBatch) -> BatchObject:
    """Return a batch in OpenAI's form."""

    def at(status: BatchStatus) -> int | None:
        time = batch.times.get(status)
        return None if time is None else int(time)

    errors = [
        BatchErrorObject(each.code, each.message, each.line, each.param)
        for each in batch.errors
    ]
    return BatchObject(
        id=batch.id,
        endpoint=batch.endpoint,
        model=batch.model or None,
        errors=BatchErrorList(errors) if errors else None,
        input_file_id=batch.input_file,
        completion_window=batch.window,
        status=batch.status.value,
        output_file_id=batch.output_file,
        error_file_id=batch.error_file,
        created_at=int(batch.created_at),
        in_progress_at=at(BatchStatus.IN_PROGRESS),
        expires_at=int(batch.expires_at),
        finalizing_at=at(BatchStatus.FINALIZING),
        completed_at=at(BatchStatus.COMPLETED),
        failed_at=at(BatchStatus.FAILED),
        expired_at=at(BatchStatus.EXPIRED),
        cancelling_at=at(BatchStatus.CANCELLING),
        cancelled_at=at(BatchStatus.CANCELLED),
        request_counts=BatchRequestCounts(batch.lines, batch.completed, batch.failed),
        metadata=None if batch.metadata is None else {**batch.metadata},
    )


OWNED_LISTED_MAX = 1000


class OwnedBatch(BatchObject, frozen=True, kw_only=True):
    """A batch, and the name of the key that created it."""

    owner: str


class OwnedBatchQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many batches to list, newest first, created ``before`` the one of an id."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=OWNED_LISTED_MAX)] = 50
    before: FileId | msgspec.UnsetType = msgspec.UNSET


class OwnedBatchList(msgspec.Struct, frozen=True):
    """Batches, newest first; ``next`` is the ``before`` of the next page."""

    data: list[OwnedBatch]
    next: str | None


@overview.get(
    "/admin/batches",
    "List the batches of all keys, newest first",
    Scope.READ,
    lists=True,
)
async def list_all_batches(
    gateway: BatchesGateway, caller: ApiCaller, query: OwnedBatchQuery
) -> OwnedBatchList:
    before = await find_place(gateway.store.batches, query.before, caller)
    owner = None if caller.has_scope(Scope.MONITOR) else caller.name
    found = await gateway.store.batches.listed(owner, before, query.limit + 1)
    page = [
        OwnedBatch(**msgspec.structs.asdict(shown_batch(each)), owner=each.owner)
        for each in found[: query.limit]
    ]
    return OwnedBatchList(page, page[-1].id if len(found) > len(page) else None)
