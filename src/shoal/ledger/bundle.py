"""A receipt with everything needed to verify it offline, as a file.

The verifier must know the coordinator's public key from elsewhere: the key in the file
only identifies the coordinator.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Literal

from msgspec import UNSET, UnsetType

from shoal.domain.receipts import Verdict
from shoal.ledger import checkpoint, keys, merkle, receipts, verification
from shoal.ledger.requests import request_hash_of
from shoal.ledger.worker_receipts import output_hash_of, verify_output_hash

_WITHOUT_RECEIPT = frozenset({Verdict.UNSIGNED, Verdict.MISSING})


@dataclass(frozen=True, slots=True)
class SaltedRequest:
    """What the owner of a job gets to prove its request, beside the receipt.

    ``text`` is the request as ``request_of`` writes it; None: it is no longer stored.
    """

    salt: bytes
    text: str | None = None


@dataclass(frozen=True, slots=True)
class ReceiptBundle:
    """A receipt and its proof; the fields of the file have these names.

    ``receipt`` is its body as text, and ``path`` proves that it is leaf ``index`` of
    the log of the ``checkpoint``.  ``output`` is the JSON text of the job's output, if
    it is included.  The ``request`` is left out unless its owner asks for it.
    """

    coordinator_key: str  # hexadecimal, lower case
    receipt: str
    signature: bytes
    index: int
    path: tuple[bytes, ...]
    checkpoint: str
    output: str | None = None
    request: SaltedRequest | UnsetType = UNSET
    type: Literal["shoal/bundle"] = "shoal/bundle"
    version: Literal[1] = 1


def write(bundle: ReceiptBundle) -> bytes:
    """Encode a bundle as a file."""
    return verification.encode_file(bundle)


def read(data: bytes) -> ReceiptBundle:
    """Decode a bundle without verifying it.

    Raises InvalidRequest for anything that ``write`` would not have written.
    """
    return verification.decode_file(data, ReceiptBundle)


def verify(
    data: bytes, public_key: bytes, readings: Collection[bytes] | None = None
) -> list[verification.StepResult]:
    """Verify a bundle's file with the coordinator's key, which is known from elsewhere.

    With ``readings``, one of them has to be the request, as ``request_of`` writes it: a
    body may mean different things in different dialects.

    Returns the steps taken, in order; a failed step is the last.  An invalid worker
    receipt is not a failure if the coordinator's receipt reports it as invalid.
    """
    steps = partial(_steps, readings=readings)
    return verification.verify_file(data, ReceiptBundle, steps, public_key)


def _steps(
    bundle: ReceiptBundle, readings: Collection[bytes] | None
) -> verification.Steps[ReceiptBundle]:
    yield verification.VerificationStep.KEY, _key
    yield verification.VerificationStep.SIGNATURE, _signature
    yield verification.VerificationStep.RECEIPT, _receipt
    yield verification.VerificationStep.CHECKPOINT, _checkpoint
    yield verification.VerificationStep.LOGGED, _logged
    if bundle.output is not None:
        yield verification.VerificationStep.OUTPUT, _output
    kept = None if isinstance(bundle.request, UnsetType) else bundle.request.text
    if not (kept is None and readings is None):
        yield verification.VerificationStep.REQUEST, partial(_request, readings)
    yield verification.VerificationStep.WORKER, _worker


def _key(bundle: ReceiptBundle, public_key: bytes) -> str | None:
    if bundle.coordinator_key == public_key.hex():
        return None
    return (
        f"the file names {bundle.coordinator_key}, the given key is {public_key.hex()}"
    )


def _signature(bundle: ReceiptBundle, public_key: bytes) -> str | None:
    message = receipts.PREFIX + bundle.receipt.encode()
    if keys.verify(public_key, bundle.signature, message):
        return None
    return "the signature is not the coordinator's"


def _receipt(bundle: ReceiptBundle, public_key: bytes) -> str | None:
    receipts.read(bundle.receipt.encode())
    return None


def _checkpoint(bundle: ReceiptBundle, public_key: bytes) -> str | None:
    checkpoint.verify(bundle.checkpoint, public_key)
    return None


def _logged(bundle: ReceiptBundle, public_key: bytes) -> str | None:
    head = checkpoint.verify(bundle.checkpoint, public_key)
    body = bundle.receipt.encode()
    leaf = merkle.leaf_hash(body)
    root = merkle.root_from_inclusion(bundle.index, head.size, leaf, bundle.path)
    if root != head.root:
        return f"the proof does not lead from receipt {bundle.index} to the log's root"
    if (size := receipts.read(body).checkpoint_size) > bundle.index:
        return (
            f"receipt {bundle.index} claims to follow a checkpoint of {size} receipts"
        )
    return None


def _output(bundle: ReceiptBundle, public_key: bytes) -> str | None:
    named = receipts.read(bundle.receipt.encode()).claims.output_hash
    found = output_hash_of((bundle.output or "").encode())
    return None if named == found else f"the receipt names {named}, this is {found}"


def _request(
    readings: Collection[bytes] | None, bundle: ReceiptBundle, public_key: bytes
) -> str | None:
    named = receipts.read(bundle.receipt.encode()).claims.request_hash
    if named is None:
        return "the receipt is of an earlier version, which names no request"
    if isinstance(bundle.request, UnsetType):
        return "the file lacks the salt of the request: export it with the request"
    salt, text = bundle.request.salt, bundle.request.text
    if text is not None and request_hash_of(salt, text.encode()) != named:
        return f"the receipt names {named}, and the request in the file is another"
    if readings is None or named in (request_hash_of(salt, each) for each in readings):
        return None
    return f"the receipt names {named}, and the given request is another"


def _worker(bundle: ReceiptBundle, public_key: bytes) -> str | None:
    claims = receipts.read(bundle.receipt.encode()).claims
    if claims.worker_receipt is None:
        if claims.verdict in _WITHOUT_RECEIPT:
            return None
        return f"there is none, but the stated verdict is: {claims.verdict.value}"
    found = verify_output_hash(
        claims.worker_receipt,
        job_id=claims.job_id,
        public_key=keys.public_key_of(claims.worker_key or "") or b"",
        output_hash=claims.output_hash,
    )
    if found is claims.verdict:
        return None
    return f"{found.value}, but the stated verdict is: {claims.verdict.value}"
