"""Signs receipts in batches, appends them to the log, and signs a checkpoint.

The caller stores a sealed batch, and then commits it here; a batch that could not be
stored has no effect.
"""

from collections.abc import Sequence

import msgspec

from shoal.domain.ids import JobId
from shoal.ledger import checkpoint, receipts
from shoal.ledger.checkpoint import Checkpoint
from shoal.ledger.keys import Signer
from shoal.ledger.merkle import Frontier, MerkleNode
from shoal.ledger.receipts import Claims


class SealedReceipt(msgspec.Struct, frozen=True):
    """A signed receipt; ``body`` is the leaf of the log at its index."""

    job_id: JobId
    index: int
    body: bytes
    signature: bytes


class SealedBatch(msgspec.Struct, frozen=True):
    """A batch to be stored in one commit, together with the jobs.

    ``nodes`` are the nodes of the log that became complete, ``note`` is the signed
    checkpoint, ``frontier`` the frontier of the log after the batch.
    """

    receipts: tuple[SealedReceipt, ...]
    nodes: tuple[MerkleNode, ...]
    checkpoint: Checkpoint
    note: str
    frontier: Frontier


class Notary:
    """Signs receipts, one batch at a time."""

    def __init__(
        self,
        signer: Signer,
        frontier: Frontier,
        checkpoint_size: int,
        checkpoint_root: bytes,
    ) -> None:
        """Continue a log from its last checkpoint.

        Raises ValueError if they do not match: each batch has a checkpoint, so the last
        one covers the whole log.
        """
        if (frontier.size, frontier.root()) != (checkpoint_size, checkpoint_root):
            raise ValueError(
                f"the log of {frontier.size} receipts is not the one "
                f"of the last checkpoint, of {checkpoint_size}"
            )
        self._signer = signer
        self._frontier = frontier.copy()
        self.size = checkpoint_size  # receipts in the log
        self._root = checkpoint_root

    @property
    def public_key(self) -> bytes:
        """The key that verifies receipts and checkpoints, 32 bytes."""
        return self._signer.public_key

    def seal(self, claims: Sequence[Claims], at: float) -> SealedBatch:
        """Sign and log a receipt for each claim; ``at``, Unix seconds, applies to all.

        This does not change the notary; ``commit`` does.  It may run in a thread, as
        long as no other batch is sealed at the same time.
        """
        frontier = self._frontier.copy()
        logged: list[SealedReceipt] = []
        nodes: list[MerkleNode] = []
        for each in claims:
            body = receipts.body(each, self.size, self._root)
            signature = self._signer.sign(receipts.PREFIX + body)
            logged.append(SealedReceipt(each.job_id, frontier.size, body, signature))
            nodes += frontier.append(body)
        size, root = frontier.size, frontier.root()
        note = checkpoint.make(self._signer, size, root, at)
        head = Checkpoint(size, root, at)
        return SealedBatch(tuple(logged), tuple(nodes), head, note, frontier)

    def commit(self, sealed: SealedBatch) -> None:
        """Continue from a batch that has been stored."""
        begun = sealed.checkpoint.size - len(sealed.receipts)
        assert begun == self.size, f"sealed after {begun}, expected {self.size}"
        self._frontier = sealed.frontier  # ``seal`` makes a copy of it
        self.size, self._root = sealed.checkpoint.size, sealed.checkpoint.root
