"""Receipts: a worker signs one per job, and the coordinator decodes it.

Source: the WebSocket protocol document, "receipt_submit".  The signature covers the
receipt as JavaScript serializes it, with its keys in the order received.
"""

import base64
import binascii
import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Raw, UnsetType

from shoal.domain.errors import PeerError
from shoal.domain.ids import JobId
from shoal.domain.receipts import RECEIPT_SIZE_MAX, SignedReceipt
from shoal.protocols.dispatch.ecmascript_json import canonical
from shoal.protocols.dispatch.messages import JobIdText, ReceiptSubmit
from shoal.protocols.seam.document_fields import Unread

SIGNATURE_TEXT_MAX = 128  # characters; 64 bytes take 88

UNREADABLE = SignedReceipt(b"", b"")
"""Stands for a receipt that is present but invalid."""


class DispatchReceipt(msgspec.Struct, frozen=True):
    """The five fields of a receipt, in the order of the document."""

    job_id: JobIdText
    provider_pubkey: str
    output_hash: str
    completed_at: Annotated[
        str,
        Unread("the signature covers it; the pool's own time of the result counts"),
    ]
    payment_ref: Annotated[
        str | None,
        Unread("the signature covers it; the pool pays from its own accounts"),
    ]


class _ExactReceipt(DispatchReceipt, frozen=True, forbid_unknown_fields=True):
    """A receipt with the five fields and no other, to be encoded again."""


_receipts = msgspec.json.Decoder(DispatchReceipt)
_exact_receipts = msgspec.json.Decoder(_ExactReceipt)
_in_order = msgspec.json.Encoder(order="sorted")
_texts = msgspec.json.Decoder(str | None)


HASH = "sha256:"


def hash_of(output: bytes) -> str:
    """Return the hash of an output, given as JavaScript serializes it."""
    return HASH + hashlib.sha256(output).hexdigest()


def sign(
    job_id: str,
    public_key: bytes,
    output_hash: str,
    at: float,
    sign_with: Callable[[bytes], bytes],
) -> tuple[bytes, str]:
    """Return a receipt as it is signed and sent, and its signature in base64.

    Its keys are sorted: then "canonical JSON" is the same for coordinators that keep
    the order of the keys, as original ones do, and for those that sort them (RFC 8785).
    ``at`` is in seconds since the epoch.
    """
    time = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    receipt = DispatchReceipt(
        job_id, public_key.hex(), output_hash, time.replace("+00:00", "Z"), None
    )
    body = _in_order.encode(receipt)
    return body, base64.b64encode(sign_with(body)).decode()


def read_bundled(
    receipt: Raw | UnsetType, signature: Raw | UnsetType
) -> SignedReceipt | None:
    """Decode the receipt in an answer; None if it or its signature is missing.

    Returns ``UNREADABLE`` if it is invalid.
    """
    if isinstance(receipt, UnsetType) or isinstance(signature, UnsetType):
        return None
    try:
        text = _texts.decode(signature)
        if not text or bytes(receipt) == b"null":
            return None
        return SignedReceipt(_body(bytes(receipt)), signature_of(text))
    except (PeerError, msgspec.DecodeError):
        return UNREADABLE


def read_submitted(message: ReceiptSubmit) -> tuple[JobId, SignedReceipt]:
    """Decode a receipt that arrived separately; return its job and the receipt.

    Raises PeerError that names the invalid field.
    """
    body = _body(bytes(message.receipt))
    try:
        receipt = _receipts.decode(body)
    except msgspec.ValidationError as error:
        raise PeerError(f"receipt: {error}") from error
    except msgspec.DecodeError as error:
        raise PeerError("receipt: half a character in it") from error
    return JobId(receipt.job_id), SignedReceipt(body, signature_of(message.signature))


def _body(raw: bytes) -> bytes:
    """Return a receipt in its signed form.  Raises PeerError if it is invalid."""
    if len(raw) > RECEIPT_SIZE_MAX:
        raise PeerError(f"receipt of {len(raw)} bytes exceeds {RECEIPT_SIZE_MAX}")
    try:
        # Fast path: nearly all have just the five fields, in the signed form.
        if msgspec.json.encode(_exact_receipts.decode(raw)) == raw:
            return raw
    except (msgspec.DecodeError, UnicodeError):
        pass
    body = canonical(raw)
    if not body.startswith(b"{"):
        raise PeerError("receipt: expected an object")
    return body


def signature_of(text: str) -> bytes:
    """Decode base64 with or without padding; return b"" if it is invalid.

    That includes unused bits that are not zero: each signature has one spelling.
    """
    if len(text) > SIGNATURE_TEXT_MAX:
        return b""
    padded = text + "=" * (-len(text) % 4)
    try:
        data = binascii.a2b_base64(padded, strict_mode=True)
    except ValueError:
        return b""
    return data if base64.b64encode(data).decode() == padded else b""
