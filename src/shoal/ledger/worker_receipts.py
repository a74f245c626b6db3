"""Verifies a worker's receipt: ordered checks, one verdict, the bytes as signed.

Source: the receipts' document, and the receipts of real workers: the output's hash with
or without the prefix ``sha256:``, fields in any order, and unknown fields.
"""

import hashlib
import json

from shoal.domain.ids import JobId
from shoal.domain.json_limits import may_be_too_deep
from shoal.domain.receipts import RECEIPT_SIZE_MAX, SignedReceipt, Verdict
from shoal.ledger import canonical, keys

HASH = "sha256:"
_decoder = json.JSONDecoder(parse_int=float)


def output_hash_of(output_json: bytes) -> str:
    """Return an output's hash in the form of the coordinator's receipts."""
    return HASH + hashlib.sha256(output_json).hexdigest()


def verify(
    receipt: SignedReceipt, *, job_id: JobId, public_key: bytes, output_json: bytes
) -> Verdict:
    """Decide whether ``receipt`` proves that this worker made this output.

    Args:
        public_key: the 32-byte Ed25519 key the worker registered with, never the one
            named in the receipt: a receipt must not vouch for itself.
        output_json: the output's JSON text exactly as received.
    """
    return verify_output_hash(
        receipt,
        job_id=job_id,
        public_key=public_key,
        output_hash=output_hash_of(output_json),
    )


def verify_output_hash(
    receipt: SignedReceipt, *, job_id: JobId, public_key: bytes, output_hash: str
) -> Verdict:
    """Do the same with only the hash of the output."""
    if (claims := _claims(receipt.body)) is None:
        return Verdict.MALFORMED
    named_job, named_worker, named_output = claims
    if named_job != job_id:
        return Verdict.WRONG_JOB
    if keys.public_key_of(named_worker) != public_key:
        return Verdict.WRONG_WORKER
    # The document writes "sha256:<hex>", its own workers send bare hex: accept both.
    if named_output.removeprefix(HASH) != output_hash.removeprefix(HASH):
        return Verdict.WRONG_OUTPUT
    # The document says "canonical JSON" and not whose.  Its own workers keep the order
    # of the keys; other implementations of the document sort them (RFC 8785).
    if keys.verify(public_key, receipt.signature, receipt.body):
        return Verdict.VALID
    try:
        in_order = canonical.encode(_decoder.decode(receipt.body.decode("utf-8")))
    except ValueError:  # without a canonical form
        return Verdict.BAD_SIGNATURE
    sorted_by_worker = in_order != receipt.body and keys.verify(
        public_key, receipt.signature, in_order
    )
    return Verdict.VALID if sorted_by_worker else Verdict.BAD_SIGNATURE


def _claims(body: bytes) -> tuple[str, str, str] | None:
    """Read which job, worker and output are named; None if that cannot be read."""
    if len(body) > RECEIPT_SIZE_MAX:
        return None
    try:
        # As text, since json would also detect UTF-16.
        text = body.decode("utf-8")
        # Every verifier must reach the same verdict, whatever depth and number of
        # digits its parser supports.
        if may_be_too_deep(text):
            return None
        # The last of repeated names counts, as in JavaScript.
        claims = _decoder.decode(text)
        named = claims["job_id"], claims["provider_pubkey"], claims["output_hash"]
    except (ValueError, KeyError, TypeError):
        return None
    job_id, worker, output_hash = named
    if not (
        isinstance(job_id, str)
        and isinstance(worker, str)
        and isinstance(output_hash, str)
    ):
        return None
    return job_id, worker, output_hash
