"""Receipts of a worker for its answers, on wires that do not define their own.

A receipt signs the hash of an answer: the coordinator assembles the pieces of the
answer and writes them as canonical JSON (RFC 8785).  It has the five fields that the
receipts' document defines.
"""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import rfc8785

from shoal.domain.answer_assembly import assemble
from shoal.domain.outcome import AnswerPiece, Outcome
from shoal.domain.receipts import SignedReceipt
from shoal.domain.vocabulary import Completed
from shoal.domain.work import JSON, Task, Work
from shoal.protocols.seam.context import Identity
from shoal.protocols.seam.json_text import encode_json, well_formed

SIGNED_MAX = 16 << 20  # characters of an answer that can be signed


class ReceiptSigner:
    """Collects one answer and signs it.

    ``job`` is the coordinator's id for the job; empty: no receipt is wanted.  An answer
    of more than ``SIGNED_MAX`` characters is not signed.
    """

    def __init__(
        self, identity: Identity | None, job: str, beginning: Sequence[AnswerPiece] = ()
    ) -> None:
        self._identity = identity if job else None
        self._job = job
        self._pieces: list[AnswerPiece] = []
        self._size = 0
        if beginning:
            self.add(beginning)

    def add(self, pieces: Sequence[AnswerPiece]) -> None:
        """Add pieces that were sent."""
        if self._identity is None:
            return
        self._pieces += pieces
        for piece in pieces:
            self._size += len(piece) if isinstance(piece, str) else piece.size
        if self._size > SIGNED_MAX:
            self._identity = None
            self._pieces = []

    def sign(self, work: Work, done: Completed, at: float) -> SignedReceipt | None:
        """Return the receipt for the answer; None if it cannot be signed.

        ``at`` is Unix time in seconds.
        """
        identity = self._identity
        if identity is None:
            return None
        try:
            outcome = assemble(self._pieces, done.finish_reason, done.usage)
            output = done.output.encode() or canonical_output(work, outcome)
        except (ValueError, RecursionError):
            return None  # a number in it has no canonical form
        time = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
        body = _encode(
            {
                "job_id": self._job,
                "provider_pubkey": identity.public_key.hex(),
                "output_hash": f"sha256:{hashlib.sha256(output).hexdigest()}",
                "completed_at": time.replace("+00:00", "Z"),
                "payment_ref": None,
            }
        )
        return SignedReceipt(body, identity.sign(body))


def canonical_output(work: Work, outcome: Outcome) -> bytes:
    """Return the canonical form of an answer, as the coordinator writes it.

    Raises ValueError for numbers that RFC 8785 cannot write.
    """
    if isinstance(work, Task):
        return well_formed(outcome.text).encode()
    text = well_formed(outcome.text)
    output: dict[str, JSON] = {"model": well_formed(work.model), "text": text}
    if not outcome.choices:
        return _sorted(output)  # for texts alone this equals RFC 8785
    output["choices"] = [
        {
            "fields": _sent(choice.fields),
            "finish_reason": choice.finish_reason,
            "logprobs": _sent(choice.logprobs),
        }
        for choice in outcome.choices
    ]
    canonical: bytes = rfc8785.dumps(output)
    return canonical


def _sent(value: object) -> JSON:
    """Return a value as the coordinator received it, with well-formed texts."""
    sent: JSON = msgspec.json.decode(encode_json(value))
    return sent


_encode = msgspec.json.Encoder().encode
_sorted = msgspec.json.Encoder(order="sorted").encode
