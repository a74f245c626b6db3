"""Receipts over HTTP, and proofs about the log that they stand in."""

from functools import partial
from typing import Annotated

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.errors import Forbidden, NotFound
from shoal.domain.ids import JobId
from shoal.gateway.access import Caller
from shoal.gateway.parts import Gateway
from shoal.gateway.query import job_in, read_query
from shoal.gateway.respond import json_answer, json_bytes
from shoal.ledger import bundle, growth
from shoal.ledger.bundle import Bundle
from shoal.ledger.growth import Growth
from shoal.ledger.merkle import (
    consistency_path,
    inclusion_path,
    nodes_for_consistency,
    nodes_for_inclusion,
)
from shoal.ledger.outputs import output_of
from shoal.store.entries import Filed, Head

LISTED_MAX = 1000  # receipts in one answer
SIZE_MAX = 2**53  # receipts in a log: more than there can be, and fewer than SQL bears

Size = Annotated[int, msgspec.Meta(ge=0, le=SIZE_MAX)]


class ReceiptQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many receipts to list, the newest first."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=LISTED_MAX)] = 50


class GrowthQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Between which checkpoints, by their sizes; ``to`` is the newest unless given."""

    since: Size
    to: Size | msgspec.UnsetType = msgspec.UNSET


class ReceiptShown(msgspec.Struct, frozen=True):
    """What a receipt says.  Money is in micro-dollars, ``at`` in Unix seconds."""

    index: int
    job_id: JobId
    worker: str
    worker_key: str | None
    verdict: str
    output_hash: str
    prompt_tokens: int | None
    completion_tokens: int | None
    price: int
    fee: int
    payment_ref: str | None
    at: float


class ReceiptList(msgspec.Struct, frozen=True):
    data: list[ReceiptShown]


class Log(msgspec.Struct, frozen=True):
    """The log as it is now.  ``public_key`` is hexadecimal, and what to verify with."""

    public_key: str
    size: int
    checkpoint: str | None


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the paths of this face."""
    return [
        web.get("/v1/receipts", partial(_list, gateway)),
        web.get("/v1/receipts/{id}", partial(_export, gateway)),
        web.get("/v1/log", partial(_log, gateway)),
        web.get("/v1/log/growth", partial(_growth, gateway)),
    ]


async def _list(gateway: Gateway, request: web.Request) -> web.Response:
    caller = await gateway.access.admit(request, Scope.READ)
    query = read_query(request, ReceiptQuery)
    owner = None if caller.may(Scope.ADMIN) else caller.name
    filed = await gateway.store.ledger.recent_receipts(owner, query.limit)
    return json_answer(ReceiptList([shown(each) for each in filed]))


async def _export(gateway: Gateway, request: web.Request) -> web.Response:
    caller = await gateway.access.admit(request, Scope.READ)
    made = await bundle_of(gateway, job_in(request), caller)
    return json_bytes(bundle.write(made))


async def _log(gateway: Gateway, request: web.Request) -> web.Response:
    # No key is asked for: it is for those who do not take our word for it.
    head = await gateway.store.ledger.head()
    key = gateway.hub.public_key.hex()
    if head is None:
        return json_answer(Log(key, 0, None))
    return json_answer(Log(key, head.size, head.note))


async def _growth(gateway: Gateway, request: web.Request) -> web.Response:
    query = read_query(request, GrowthQuery)
    first = await _head(gateway, query.since)
    second = await _head(gateway, None if query.to is msgspec.UNSET else query.to)
    if first.size > second.size:
        raise NotFound(f"the log of {second.size} receipts came before {first.size}")
    nodes = await gateway.store.ledger.nodes(
        nodes_for_consistency(first.size, second.size)
    )
    path = consistency_path(
        first.size, second.size, lambda level, position: nodes[level, position]
    )
    return json_bytes(growth.write(Growth(first.note, second.note, tuple(path))))


async def bundle_of(gateway: Gateway, job_id: JobId, caller: Caller) -> Bundle:
    """Return a job's newest receipt with its proof, and the output if it is still kept.

    Raises NotFound, Forbidden, StoreError.
    """
    ledger = gateway.store.ledger
    stored = await gateway.store.job(job_id)
    owns = stored is not None and stored.job.owner == caller.name
    if not (owns or caller.may(Scope.ADMIN)):
        if stored is None:
            raise NotFound(f"there is no receipt for job {job_id}")
        raise Forbidden(
            f"job {job_id} belongs to another key: this takes one with the scope admin"
        )
    filed = await ledger.receipts_of(job_id)
    if not filed:
        raise NotFound(
            f"there is no receipt for job {job_id}: only jobs that were done have one"
        )
    receipt, head = filed[-1], await _head(gateway, None)
    nodes = await ledger.nodes(nodes_for_inclusion(receipt.index, head.size))
    path = inclusion_path(
        receipt.index, head.size, lambda level, position: nodes[level, position]
    )
    output = None
    if stored is not None and stored.outcome is not None:
        output = output_of(stored.job.work, stored.outcome).decode()
    return Bundle(
        gateway.hub.public_key.hex(),
        receipt.body.decode(),
        receipt.signature,
        receipt.index,
        tuple(path),
        head.note,
        output,
    )


def shown(filed: Filed) -> ReceiptShown:
    """Return what a receipt says, for people and programs to read."""
    claims = filed.claims
    return ReceiptShown(
        filed.index,
        claims.job_id,
        claims.worker,
        claims.worker_key,
        claims.verdict.name.lower(),
        claims.output_hash,
        claims.prompt_tokens,
        claims.completion_tokens,
        claims.price,
        claims.fee,
        claims.payment_ref,
        filed.at,
    )


async def _head(gateway: Gateway, size: int | None) -> Head:
    head = await gateway.store.ledger.head(size)
    if head is not None:
        return head
    newest = await gateway.store.ledger.head()
    if newest is None:
        raise NotFound("there is no checkpoint yet: no job was done")
    raise NotFound(
        f"there is no checkpoint of size {size}: one is made for each batch of "
        f"receipts, and the newest has size {newest.size}"
    )
