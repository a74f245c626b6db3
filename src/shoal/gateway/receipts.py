"""The API of receipts, of proofs about their log, and of the requests they name."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import UNSET
from msgspec.structs import replace

from shoal.domain.credentials import Scope
from shoal.domain.errors import ClientError, Forbidden, NotFound
from shoal.domain.ids import JobId
from shoal.domain.job import Policy
from shoal.domain.work import Chat, Completion, Embedding, Work
from shoal.gateway.batches.lines import decode_line
from shoal.gateway.chat.anthropic.message_request import decode_message_request
from shoal.gateway.chat.ollama import requests
from shoal.gateway.chat.ollama.embeddings import decode_embed, decode_embed_one
from shoal.gateway.chat.ollama.models import LATEST
from shoal.gateway.chat.openai.chat_request import decode_chat_request
from shoal.gateway.chat.openai.completion_request import decode_completion_request
from shoal.gateway.chat.openai.embeddings import decode_embedding_request
from shoal.gateway.chat.openai.rerank import decode_rerank_request
from shoal.gateway.chat.responses.request import decode_response_request
from shoal.gateway.context import ReceiptsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.decoding import job_id_in
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.responses import json_bytes_response
from shoal.gateway.jobs.job_request import decode_commit
from shoal.ledger import bundle, consistency, merkle
from shoal.ledger.accounts import PriceList
from shoal.ledger.bundle import ReceiptBundle, SaltedRequest
from shoal.ledger.checkpoint import origin_of
from shoal.ledger.consistency import ConsistencyProof
from shoal.ledger.keys import Signer
from shoal.ledger.receipts import output_of
from shoal.ledger.requests import request_hash_of, request_of, request_salt
from shoal.store.ledger import LoggedReceipt, LogHead
from shoal.store.port import StoredJob
from shoal.store.signing_keys import SigningKeys

api = Operations()

LISTED_MAX = 1000  # receipts in one response
SIZE_MAX = 2**53  # receipts in a log: more than possible, and valid in SQL

Size = Annotated[int, msgspec.Meta(ge=0, le=SIZE_MAX)]


class ReceiptQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many receipts to list, newest first; with an index below ``before``."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=LISTED_MAX)] = 50
    before: Size | msgspec.UnsetType = msgspec.UNSET


class ExportQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the bundle has the ``request`` as well: only for the job's owner."""

    request: bool = False


class GrowthQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two checkpoints by their sizes; ``to`` is the newest unless given."""

    since: Size
    to: Size | msgspec.UnsetType = msgspec.UNSET


class ReceiptInfo(msgspec.Struct, frozen=True):
    """A receipt.  Money is in micro-dollars, ``at`` in Unix seconds."""

    index: int
    job_id: JobId
    worker: str
    worker_key: str | None
    verdict: str
    output_hash: str
    request_hash: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    price: int
    fee: int
    payment_ref: str | None
    at: float


class ReceiptList(msgspec.Struct, frozen=True):
    """Receipts, newest first; ``next`` is the ``before`` of the next page."""

    data: list[ReceiptInfo]
    next: int | None


class EarlierLog(msgspec.Struct, frozen=True):
    """The log of an earlier key, which the next key went on from.

    Both checkpoints have the same size and root: ``public_key``, in hexadecimal, has
    signed ``checkpoint``, and the next key ``successor``.
    """

    public_key: str
    checkpoint: str
    successor: str | None


class ReceiptLog(msgspec.Struct, frozen=True):
    """The current log.  ``public_key``, in hexadecimal, verifies its signatures.

    ``earlier`` has the logs that it goes on from, the oldest first.
    """

    public_key: str
    size: int
    checkpoint: str | None
    earlier: list[EarlierLog]


@api.get("/v1/receipts", "List receipts, newest first", Scope.READ, lists=True)
async def list_receipts(
    gateway: ReceiptsGateway, caller: ApiCaller, query: ReceiptQuery
) -> ReceiptList:
    owner = None if caller.has_scope(Scope.MONITOR) else caller.name
    before = None if query.before is msgspec.UNSET else query.before
    filed = await gateway.store.ledger.recent_receipts(owner, query.limit, before)
    more = filed[-1].index if len(filed) == query.limit else None
    return ReceiptList([receipt_info(each) for each in filed], more)


@api.get(
    "/v1/receipts/{id}", "Export a job's receipt", Scope.READ, answer=ReceiptBundle
)
async def export_receipt(
    gateway: ReceiptsGateway,
    request: web.Request,
    caller: ApiCaller,
    query: ExportQuery,
) -> web.Response:
    exported = await export_bundle(
        gateway, job_id_in(request), caller, with_request=query.request
    )
    return json_bytes_response(bundle.write(exported))


@api.get("/v1/log", "Show the log of receipts")
async def show_log(gateway: ReceiptsGateway) -> ReceiptLog:
    head, signing = await gateway.store.ledger.head(), gateway.signing
    key = gateway.hub.public_key.hex()
    earlier = [
        EarlierLog(signer.public_key.hex(), each.checkpoint, each.successor)
        for each in signing.links
        if (signer := signing.signer_of(each.checkpoint)) is not None
    ]
    if head is None:
        return ReceiptLog(key, 0, None, earlier)
    await signing.show(head)
    # Until it signs the first receipt, a new key has only the one with which it began.
    note = signing.successor_of(head.note) or head.note
    return ReceiptLog(key, head.size, note, earlier)


@api.get("/v1/log/growth", "Prove that the log has only grown", answer=ConsistencyProof)
async def show_growth(gateway: ReceiptsGateway, query: GrowthQuery) -> web.Response:
    first = await _checkpoint(gateway, query.since)
    second = await _checkpoint(gateway, None if query.to is msgspec.UNSET else query.to)
    if first.size > second.size:
        raise NotFound(f"the log of {second.size} receipts came before {first.size}")
    await gateway.signing.show(second)
    notes = _of_one_key(gateway.signing, first.note, second.note)
    nodes = await gateway.store.ledger.nodes(
        merkle.nodes_for_consistency(first.size, second.size)
    )
    path = merkle.consistency_path(
        first.size, second.size, lambda level, position: nodes[level, position]
    )
    return json_bytes_response(consistency.write(ConsistencyProof(*notes, tuple(path))))


async def export_bundle(
    gateway: ReceiptsGateway,
    job_id: JobId,
    caller: ApiCaller,
    *,
    with_request: bool = False,
) -> ReceiptBundle:
    """Return a job's newest receipt with its proof, and the output if it is stored.

    ``with_request``: and what proves the request, for the owner of the job alone.

    Raises NotFound, Forbidden, StoreError.
    """
    ledger = gateway.store.ledger
    stored = await gateway.store.job(job_id)
    owner = await ledger.receipt_owner(job_id) if stored is None else stored.job.owner
    if not (owner == caller.name or caller.has_scope(Scope.MONITOR)):
        if owner is None:
            raise NotFound(f"there is no receipt for job {job_id}")
        raise Forbidden(
            f"job {job_id} belongs to another key: this needs one with the scope "
            "monitor"
        )
    filed = await ledger.receipts_of(job_id)
    if not filed:
        raise NotFound(
            f"there is no receipt for job {job_id}: only completed jobs have one"
        )
    if with_request and owner != caller.name:
        raise Forbidden(
            f"job {job_id} belongs to another key: only that key can export its request"
        )
    receipt = filed[-1]
    signer, head = await _signed_by(gateway, receipt)
    await gateway.signing.show(head)
    nodes = await ledger.nodes(merkle.nodes_for_inclusion(receipt.index, head.size))
    path = merkle.inclusion_path(
        receipt.index, head.size, lambda level, position: nodes[level, position]
    )
    output = None
    if stored is not None and stored.outcome is not None:
        output = output_of(stored.job.work, stored.outcome).decode()
    return ReceiptBundle(
        signer.public_key.hex(),
        receipt.body.decode(),
        receipt.signature,
        receipt.index,
        tuple(path),
        head.note,
        output,
        await _salted_request(signer, receipt, stored) if with_request else UNSET,
    )


async def _salted_request(
    signer: Signer, receipt: LoggedReceipt, stored: StoredJob | None
) -> SaltedRequest:
    """Return the salt of a request, and the request if it is stored as it was sent.

    Raises NotFound for a receipt that names none.
    """
    job_id, named = receipt.claims.job_id, receipt.claims.request_hash
    if named is None:
        raise NotFound(
            f"the receipt of job {job_id} is of an earlier version, which names no "
            "request"
        )
    salt = request_salt(signer, job_id)
    if stored is None:
        return SaltedRequest(salt)
    work = stored.job.work

    def encode() -> SaltedRequest:
        request = request_of(work)
        # Large arguments of calls may have been evicted since.
        same = request_hash_of(salt, request) == named
        return SaltedRequest(salt, request.decode() if same else None)

    return await asyncio.to_thread(encode)


def receipt_info(filed: LoggedReceipt) -> ReceiptInfo:
    """Return a receipt's claims, as JSON shows them."""
    claims = filed.claims
    return ReceiptInfo(
        filed.index,
        claims.job_id,
        claims.worker,
        claims.worker_key,
        claims.verdict.name.lower(),
        claims.output_hash,
        claims.request_hash,
        claims.prompt_tokens,
        claims.completion_tokens,
        claims.price,
        claims.fee,
        claims.payment_ref,
        filed.at,
    )


async def _signed_by(
    gateway: ReceiptsGateway, receipt: LoggedReceipt
) -> tuple[Signer, LogHead]:
    """Return the key that has signed a receipt, and a checkpoint of it that has it.

    Of the present key, it is the newest.  Raises NotFound if the key is gone.
    """
    ledger, signing = gateway.store.ledger, gateway.signing
    first = await ledger.head_after(receipt.index)
    assert first is not None, "each batch has a checkpoint"
    signer = signing.signer_of(first.note)
    if signer is None:
        raise NotFound(
            f"the receipt of job {receipt.claims.job_id} is in the log "
            f"{origin_of(first.note)}, whose signing key is gone"
        )
    if signer.public_key != signing.signer.public_key:
        return signer, first
    return signer, await _checkpoint(gateway, None)


def _of_one_key(signing: SigningKeys, first: str, second: str) -> tuple[str, str]:
    """Return two checkpoints as one key has signed them.

    Raises NotFound if none has signed both.
    """
    origin = origin_of(second)
    if origin_of(first) == origin:
        return first, second
    successor = signing.successor_of(first)
    if successor is not None and origin_of(successor) == origin:
        return successor, second
    raise NotFound(
        f"the first of these checkpoints is of {origin_of(first)}, and the second of "
        f"{origin}, which continued with another key: `earlier` of /v1/log has the "
        "last of each key"
    )


async def _checkpoint(gateway: ReceiptsGateway, size: int | None) -> LogHead:
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


def works_of(body: bytes) -> Iterator[Work]:
    """Yield the works that a body may mean; also the line of a batch that has it.

    Not those that depend on more than the body: on earlier responses, on the texts of
    token ids, or on a file.
    """
    with suppress(ClientError):
        body = bytes(decode_line(body).body)
    for decode in _DECODERS:
        with suppress(ClientError):  # it is of another dialect
            yield from decode(body)


def _embedding(body: bytes) -> Iterator[Work]:
    decoded = decode_embedding_request(body)
    if not decoded.tokens:
        yield decoded.work(())


def _response(body: bytes) -> Iterator[Work]:
    decoded = decode_response_request(body, created=0)
    if not (decoded.references or decoded.fields.previous_response_id):
        yield decoded.chat()


def _ollama(decoded: requests.OllamaRequest) -> Iterator[Work]:
    if not isinstance(decoded, requests.ModelLoad):
        yield from _named(decoded.work)


def _named(work: Chat | Completion | Embedding | None) -> Iterator[Work]:
    """Yield work by both names that its model may have in a pool."""
    if work is not None:
        bare = work.model.removesuffix(LATEST)
        yield from (replace(work, model=name) for name in (bare, bare + LATEST))


_DECODERS: tuple[Callable[[bytes], Iterator[Work]], ...] = (
    lambda body: iter([decode_chat_request(body).work]),
    lambda body: iter([decode_completion_request(body).work]),
    lambda body: iter([decode_message_request(body).generation.work]),
    lambda body: iter([decode_rerank_request(body).work]),
    lambda body: iter([decode_commit(body, Policy.FAST, PriceList())[0]]),
    lambda body: _ollama(requests.decode_ollama_chat(body)),
    lambda body: _ollama(requests.decode_ollama_prompt(body)),
    lambda body: _named(decode_embed(body).work),
    lambda body: _named(decode_embed_one(body).work),
    _embedding,
    _response,
)
