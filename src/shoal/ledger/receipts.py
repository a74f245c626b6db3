"""The coordinator's receipt of a job: its contents, and the bytes that are signed.

Each completed job has one, whatever the wire.  It includes the worker's receipt, or
states that the worker sent none, and the hash of the job's output.
"""

import re
from dataclasses import dataclass
from typing import Literal

import msgspec

from shoal.domain import work as works
from shoal.domain.errors import InvalidRequest
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.outcome import Outcome
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.work import JSON, Call
from shoal.ledger import canonical, keys
from shoal.ledger.canonical import encode_any, without_surrogates
from shoal.ledger.merkle import HASH_SIZE

PREFIX = b"shoal receipt v1\n"
"""Prefix of the signed bytes, so that no other signed data can pass for a receipt.

A checkpoint, which the same key signs, begins with ``shoal/``.
"""

TYPE = "shoal/receipt"


def has_receipt(job: Job) -> bool:
    """Return whether a job gets a receipt when it is completed.

    A free function call gets none: a signature takes longer than many functions do, and
    there is nothing to settle.
    """
    terms = job.terms
    return terms.kept and (terms.price > 0 or not isinstance(job.work, Call))


_HASH = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


class Claims(msgspec.Struct, frozen=True):
    """The coordinator's claims about a completed job.

    ``output_hash`` is ``sha256:`` and the hash of the output's JSON text, ``at`` the
    time in ISO 8601, UTC, with milliseconds.  ``price`` and ``fee``, which is part of
    it, are the amounts charged, in micro-dollars.  Tokens are None if they were not
    counted.  ``verdict`` is about ``worker_receipt``.  ``request_hash`` is as in
    ``request_hash_of``; None in receipts of earlier versions.  ``shards`` are the
    machines that ran the model together, the worker's last; empty: it ran there alone.
    """

    job_id: JobId
    worker: str
    worker_key: str | None  # hexadecimal
    output_hash: str
    prompt_tokens: int | None
    completion_tokens: int | None
    price: int
    fee: int
    payment_ref: str | None
    at: str
    verdict: Verdict
    worker_receipt: SignedReceipt | None
    request_hash: str | None = None
    shards: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """The contents of a receipt: the claims, and the last checkpoint before it."""

    claims: Claims
    checkpoint_size: int
    checkpoint_root: bytes


_VERDICTS = {each: each.name.lower() for each in Verdict}


def body(claims: Claims, checkpoint_size: int, checkpoint_root: bytes) -> bytes:
    """Encode a receipt in canonical JSON: version 2, or 1 without a request's hash.

    External data never prevents it: lone surrogates in a text become U+FFFD, and an
    invalid worker key is left out.
    """
    key = keys.public_key_of(claims.worker_key or "")
    ref = claims.payment_ref
    later_fields: dict[str, JSON] = {"version": 1}
    if claims.request_hash is not None:
        later_fields = {"version": 2, "request_hash": claims.request_hash}
    if claims.shards:
        shards = map(canonical.without_surrogates, claims.shards)
        later_fields["shards"] = list(shards)
    return canonical.encode(
        {
            "type": TYPE,
            **later_fields,
            "job_id": canonical.without_surrogates(claims.job_id),
            "worker": canonical.without_surrogates(claims.worker),
            "worker_key": None if key is None else key.hex(),
            "output_hash": claims.output_hash,
            "prompt_tokens": claims.prompt_tokens,
            "completion_tokens": claims.completion_tokens,
            "price": claims.price,
            "fee": claims.fee,
            "payment_ref": None if ref is None else canonical.without_surrogates(ref),
            "at": claims.at,
            "verdict": _VERDICTS[claims.verdict],
            "worker_receipt": _signed(claims.worker_receipt),
            "checkpoint": {
                "size": checkpoint_size,
                "root": canonical.to_base64(checkpoint_root),
            },
        }
    )


def _signed(receipt: SignedReceipt | None) -> JSON:
    if receipt is None:
        return None
    signature = canonical.to_base64(receipt.signature)
    try:
        return {"body": receipt.body.decode("utf-8"), "signature": signature}
    except UnicodeDecodeError:
        inside = canonical.to_base64(receipt.body)
        return {"body_base64": inside, "signature": signature}


def read(body: bytes) -> Receipt:
    """Decode a receipt without verifying its signature.

    Raises InvalidRequest for anything that ``body`` would not write.
    """
    try:
        receipt = _typed(_reader.decode(body))
        # Unknown or repeated fields, and another order or spelling, do not survive
        # this: a receipt has one encoding.
        if _rewritten(receipt) != body:
            raise ValueError("it is not in its one canonical form")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the receipt cannot be read: {error}") from error
    return receipt


def _rewritten(receipt: Receipt) -> bytes:
    return body(receipt.claims, receipt.checkpoint_size, receipt.checkpoint_root)


@dataclass(frozen=True, slots=True)
class _Signed:
    signature: str
    body: str | None = None
    body_base64: str | None = None


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    size: int
    root: str


@dataclass(frozen=True, slots=True)
class _Body:
    type: Literal["shoal/receipt"]
    version: Literal[1, 2]
    job_id: JobId
    worker: str
    worker_key: str | None
    output_hash: str
    prompt_tokens: int | None
    completion_tokens: int | None
    price: int
    fee: int
    payment_ref: str | None
    at: str
    verdict: str
    worker_receipt: _Signed | None
    checkpoint: _Checkpoint
    request_hash: str | None = None
    shards: tuple[str, ...] = ()


_reader = msgspec.json.Decoder(_Body)


def _typed(body: _Body) -> Receipt:
    """Check constraints beyond the types; raises ValueError."""
    for name in ("prompt_tokens", "completion_tokens", "price", "fee"):
        if (getattr(body, name) or 0) < 0:
            raise ValueError(f"{name} is below zero")
    if body.fee > body.price:
        raise ValueError("the fee is more than the price")
    for name, digest in (
        ("output_hash", body.output_hash),
        ("request_hash", body.request_hash),
    ):
        if digest is not None and _HASH.fullmatch(digest) is None:
            raise ValueError(f"{name} is not sha256: and 64 hexadecimal digits")
    canonical.from_time(body.at)
    root = canonical.from_base64(body.checkpoint.root)
    if len(root) != HASH_SIZE or body.checkpoint.size < 0:
        raise ValueError("checkpoint is none")
    claims = Claims(
        body.job_id,
        body.worker,
        body.worker_key,
        body.output_hash,
        body.prompt_tokens,
        body.completion_tokens,
        body.price,
        body.fee,
        body.payment_ref,
        body.at,
        _verdict(body.verdict),
        None if body.worker_receipt is None else _as_signed(body.worker_receipt),
        body.request_hash,
        body.shards,
    )
    return Receipt(claims, body.checkpoint.size, root)


def _verdict(name: str) -> Verdict:
    try:
        return Verdict[name.upper()]
    except KeyError as error:
        raise ValueError(f"there is no verdict {name!r}") from error


def _as_signed(written: _Signed) -> SignedReceipt:
    if written.body is not None:
        body = written.body.encode("utf-8")
    else:
        body = canonical.from_base64(written.body_base64 or "")
    return SignedReceipt(body, canonical.from_base64(written.signature))


def output_of(work: works.Work, outcome: Outcome) -> bytes:
    """Return a job's output as JSON text in UTF-8.

    It is the worker's own text, where its wire has a form for it; else canonical JSON
    (RFC 8785) with the ``text`` and the ``model``, and the ``choices`` if the answer is
    more than its text, with what ``encode_any`` replaces.
    """
    if outcome.output:
        return outcome.output.encode()
    match work:
        case works.Call() | works.CallStream():
            # The value is the result, so the receipt is about its digest.
            return outcome.value
        case works.Task() | works.ModelOrder():
            return without_surrogates(outcome.text).encode()
        case (
            works.Chat(model=model)
            | works.Completion(model=model)
            | works.Embedding(model=model)
            | works.Rerank(model=model)
            | works.Transcription(model=model)
        ):
            output: dict[str, works.JSON] = {"model": model, "text": outcome.text}
            if outcome.choices:
                output["choices"] = [
                    {
                        "fields": choice.fields,
                        "finish_reason": choice.finish_reason,
                        "logprobs": choice.logprobs,
                    }
                    for choice in outcome.choices
                ]
            return encode_any(output)
