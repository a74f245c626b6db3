"""What a worker of ours signs about an answer that went piece by piece.

The coordinator puts the pieces together and writes them as canonical JSON (RFC 8785):
what is signed is the hash of that, in a receipt with the five fields of the receipts'
document.
"""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import rfc8785

from shoal.domain.assembly import assemble
from shoal.domain.outcome import Outcome, Piece
from shoal.domain.receipts import SignedReceipt
from shoal.domain.vocabulary import Completed
from shoal.domain.work import JSON, Task, Work
from shoal.protocols.session import Identity
from shoal.protocols.tealenet.wire.scalars import well_formed, written

SIGNED_MAX = 16 << 20  # characters of an answer that is kept to be signed


class Signature:
    """What is kept of one answer until it is whole.

    ``job`` is what the coordinator calls the job; without one nothing is kept, and an
    answer of more than ``SIGNED_MAX`` characters is not signed.
    """

    def __init__(self, identity: Identity | None, job: str, continues: str) -> None:
        self._identity = identity if job else None
        self._job = job
        self._pieces: list[Piece] = [continues] if continues else []
        self._size = len(continues)

    def add(self, pieces: Sequence[Piece]) -> None:
        """Take note of what was sent."""
        if self._identity is None:
            return
        self._pieces += pieces
        for piece in pieces:
            self._size += len(piece) if isinstance(piece, str) else piece.size
        if self._size > SIGNED_MAX:
            self._identity = None
            self._pieces = []

    def sign(self, work: Work, done: Completed, at: float) -> SignedReceipt | None:
        """Return the receipt for the whole; None if there can be none.

        ``at`` is in seconds since the epoch.
        """
        identity = self._identity
        if identity is None:
            return None
        try:
            outcome = assemble(self._pieces, done.finish_reason, done.usage)
            output = done.output.encode() or output_of(work, outcome)
        except (ValueError, RecursionError):
            return None  # it has a number that nobody else could write again
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


def output_of(work: Work, outcome: Outcome) -> bytes:
    """Return an answer as the coordinator writes it.

    Raises ValueError for numbers that RFC 8785 cannot write.
    """
    if isinstance(work, Task):
        return well_formed(outcome.text).encode()
    text = well_formed(outcome.text)
    output: dict[str, JSON] = {"model": well_formed(work.model), "text": text}
    if not outcome.choices:
        return _sorted(output)  # texts are written as RFC 8785 does
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
    """Return a value as the coordinator has it, whose texts are well formed."""
    sent: JSON = msgspec.json.decode(written(value))
    return sent


_encode = msgspec.json.Encoder().encode
_sorted = msgspec.json.Encoder(order="sorted").encode
