"""OpenAI's files: the input of batches, and what they return.

Source: OpenAI's API reference, "Files".
"""

import asyncio
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest, NotFound
from shoal.gateway.context import BatchesGateway
from shoal.gateway.http import forms
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.decoding import required, unsupported
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.request_record import record_of
from shoal.gateway.http.responses import (
    BYTES_TYPE,
    ClientGone,
    ItemList,
    item_list,
    well_formed,
    write,
)
from shoal.store import batches

api = Operations()

EXPIRES_MIN, EXPIRES_MAX = 3600, 2_592_000  # seconds, as with OpenAI
ID_MAX = 64  # characters
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FIELDS = frozenset({"purpose", ANCHOR, SECONDS})

FileId = Annotated[str, Meta(max_length=ID_MAX)]


class FileObject(msgspec.Struct, frozen=True):
    id: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileDeleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class FileListQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A filter of files."""

    purpose: str | UnsetType = UNSET
    after: FileId | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=batches.FILES_MAX)] = 1000
    order: Literal["asc", "desc"] = "desc"


@api.post("/v1/files", "Upload a file", Scope.USE)
async def create_file(
    gateway: BatchesGateway, request: web.Request, caller: ApiCaller
) -> FileObject:
    at = gateway.clock.wall()
    async with gateway.files.uploading(caller.name) as uploaded:
        form = await forms.receive_form(request, uploaded)
        _check_fields(form)
        gateway.access.ensure_active(caller)  # an upload takes some time
        stored = await gateway.files.keep(
            uploaded,
            caller.name,
            well_formed(form.file_name),
            batches.FilePurpose.BATCH,
            at,
            _expires_at(form, at),
        )
    return _shown(stored)


@api.get("/v1/files", "List files", Scope.READ, lists=True)
async def list_files(
    gateway: BatchesGateway, caller: ApiCaller, query: FileListQuery
) -> ItemList[FileObject]:
    purposes = {each.value: each for each in batches.FilePurpose}
    purpose = None
    if query.purpose is not UNSET:
        if query.purpose not in purposes:
            return ItemList([])
        purpose = purposes[query.purpose]
    after = await find_place(gateway.store.files, query.after, caller)
    wanted = batches.FileFilter(caller.name, purpose, after, query.order == "desc")
    found = await gateway.files.listed(wanted, query.limit + 1)
    now = gateway.clock.wall()
    page = found[: query.limit]
    shown = [
        _shown(each)
        for each in page
        if each.expires_at is None or each.expires_at > now
    ]
    return item_list(shown, [each.id for each in page], len(found) > len(page))


@api.get("/v1/files/{file_id}", "Show a file", Scope.READ)
async def show_file(
    gateway: BatchesGateway, caller: ApiCaller, file_id: str
) -> FileObject:
    found = await owned_file(gateway, file_id, caller)
    return _shown(found)


@api.delete("/v1/files/{file_id}", "Delete a file", Scope.USE)
async def delete_file(
    gateway: BatchesGateway, caller: ApiCaller, file_id: str
) -> FileDeleted:
    found = await owned_file(gateway, file_id, caller)
    if not await gateway.files.remove(found.id):
        raise _not_found(found.id)
    return FileDeleted(found.id)


@api.get(
    "/v1/files/{file_id}/content",
    "Fetch the contents of a file",
    Scope.READ,
    media=BYTES_TYPE,
)
async def fetch_content(
    gateway: BatchesGateway, request: web.Request, caller: ApiCaller, file_id: str
) -> web.StreamResponse:
    found = await owned_file(gateway, file_id, caller)
    with await gateway.files.read(found.id) as content:
        response = web.StreamResponse()
        response.content_type = BYTES_TYPE
        response.content_length = found.size
        await response.prepare(request)
        try:
            while piece := await asyncio.to_thread(content.read, forms.PIECE):
                await write(request, response, piece, timeout=forms.PIECE_TIMEOUT)
            await write(request, response, b"", last=True, timeout=forms.PIECE_TIMEOUT)
        except ClientGone:
            record_of(request).error = "client_gone"
    return response


async def owned_file(
    gateway: BatchesGateway, file_id: str, caller: ApiCaller
) -> batches.StoredFile:
    """Return a file that the caller may read.  Raises NotFound."""
    found = await gateway.files.find(file_id, gateway.clock.wall())
    mine = found is not None and found.owner == caller.name
    if found is None or not (mine or caller.has_scope(Scope.MONITOR)):
        raise _not_found(file_id)
    return found


async def find_place(
    store: batches.FileStore | batches.BatchStore,
    id_: str | UnsetType,
    caller: ApiCaller,
) -> int | None:
    """Return the place of the file or batch that a page is after, if one is given.

    It may be deleted meanwhile: clients delete while they list.  Raises NotFound.
    """
    if id_ is UNSET:
        return None
    found = await store.place(id_)
    if found is None or not (
        found.owner == caller.name or caller.has_scope(Scope.MONITOR)
    ):
        raise NotFound(
            f"there is no {id_}, or it was deleted long ago: list from the beginning"
        )
    return found.number


def _check_fields(form: forms.ReceivedForm) -> None:
    for name in (form.fields.keys() | form.lists.keys()) - FIELDS:
        raise unsupported(name[:80])
    purpose = required(form.fields.get("purpose"), "purpose")
    if purpose != batches.FilePurpose.BATCH.value:
        raise InvalidRequest(
            f"purpose: expected {batches.FilePurpose.BATCH.value}, got "
            f"{purpose[:40]!r}: files are for batches",
            "purpose",
        )


def _expires_at(form: forms.ReceivedForm, at: float) -> float | None:
    """Return when a file expires, in Unix seconds; None: never."""
    anchor, seconds = form.fields.get(ANCHOR), form.fields.get(SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(f"{ANCHOR}: expected created_at", ANCHOR)
    given = seconds or ""
    short = (
        given.isascii() and given.isdigit() and len(given) < len(str(EXPIRES_MAX)) + 1
    )
    if not short or not EXPIRES_MIN <= int(given) <= EXPIRES_MAX:
        raise InvalidRequest(
            f"{SECONDS}: expected {EXPIRES_MIN} to {EXPIRES_MAX}", SECONDS
        )
    return at + int(given)


def _shown(stored: batches.StoredFile) -> FileObject:
    return FileObject(
        stored.id,
        stored.size,
        int(stored.created_at),
        None if stored.expires_at is None else int(stored.expires_at),
        stored.name,
        stored.purpose.value,
    )


def _not_found(file_id: str) -> NotFound:
    return NotFound(f"there is no file {file_id[:ID_MAX]}")
