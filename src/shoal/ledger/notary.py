"""Signing what happened: receipts, their place in the log, a checkpoint for the batch.

A batch is sealed, then stored by whoever asked, and only then the notary goes on from
it: if it could not be stored, it never was.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.domain.ids import JobId
from shoal.ledger import checkpoint, receipts
from shoal.ledger.checkpoint import Checkpoint
from shoal.ledger.keys import Signer
from shoal.ledger.merkle import Frontier, MerkleNode
from shoal.ledger.receipts import Claims


@dataclass(frozen=True, slots=True)
class SealedReceipt:
    """A signed receipt, and which leaf of the log its ``body`` is."""

    job_id: JobId
    index: int
    body: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class SealedBatch:
    """A batch to be stored as a whole: with the jobs, in one commit.

    ``nodes`` are those of the log that became complete, ``note`` is the checkpoint as
    signed, ``frontier`` what the log goes on from.
    """

    receipts: tuple[SealedReceipt, ...]
    nodes: tuple[MerkleNode, ...]
    checkpoint: Checkpoint
    note: str
    frontier: Frontier


class Notary:
    """The one that signs receipts, one batch after the other."""

    def __init__(
        self,
        signer: Signer,
        frontier: Frontier,
        checkpoint_size: int,
        checkpoint_root: bytes,
    ) -> None:
        """Go on from a log and its last checkpoint.

        Raises ValueError if they are not of the same log: there is a checkpoint for
        each batch, so that it always covers the whole.
        """
        if (frontier.size, frontier.root()) != (checkpoint_size, checkpoint_root):
            raise ValueError(
                f"the log of {frontier.size} receipts is not the one "
                f"of the last checkpoint, of {checkpoint_size}"
            )
        self._signer = signer
        self._frontier = frontier.copy()
        self._size = checkpoint_size
        self._root = checkpoint_root

    @property
    def public_key(self) -> bytes:
        """What receipts and checkpoints are verified with, 32 bytes."""
        return self._signer.public_key

    @property
    def size(self) -> int:
        """How many receipts are in the log."""
        return self._size

    def seal(self, claims: Sequence[Claims], at: float) -> SealedBatch:
        """Sign a receipt for each, and log them; ``at``, Unix seconds, is for all.

        This changes nothing here: ``commit`` does.  It may run in a thread, as long as
        no other batch is sealed meanwhile.
        """
        frontier = self._frontier.copy()
        logged: list[SealedReceipt] = []
        nodes: list[MerkleNode] = []
        for each in claims:
            body = receipts.body(each, self._size, self._root)
            signature = self._signer.sign(receipts.PREFIX + body)
            logged.append(SealedReceipt(each.job_id, frontier.size, body, signature))
            nodes += frontier.append(body)
        size, root = frontier.size, frontier.root()
        note = checkpoint.make(self._signer, size, root, at)
        head = Checkpoint(size, root, at)
        return SealedBatch(tuple(logged), tuple(nodes), head, note, frontier)

    def commit(self, sealed: SealedBatch) -> None:
        """Go on from a batch that has been stored."""
        begun = sealed.checkpoint.size - len(sealed.receipts)
        assert begun == self._size, f"sealed after {begun}, expected {self._size}"
        self._frontier = sealed.frontier.copy()
        self._size, self._root = sealed.checkpoint.size, sealed.checkpoint.root
