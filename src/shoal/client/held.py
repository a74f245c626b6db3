"""How much memory the open calls of a client take."""

from shoal.client.asked import Asked
from shoal.client.blobs import Blob

HELD_MAX = 256 << 20  # bytes of all open calls: beyond it, whoever submits waits


class Held:
    """Counts the bytes of open calls, a blob that several have in common once."""

    def __init__(self) -> None:
        self._size = 0
        self._blobs: dict[bytes, tuple[Blob, int]] = {}

    def add(self, asked: Asked, *, force: bool = False) -> bool:
        """Count a call if there is room for it; for a single one there always is.

        From then on it shares blobs that are the same as others'.
        """
        size = asked.size
        if asked.blobs:
            size += self._new(asked)
        if self._size + size > HELD_MAX and self._size and not force:
            return False
        self._size += size
        if asked.blobs:
            asked.blobs = tuple(self._kept(blob) for blob in asked.blobs)
        return True

    def remove(self, asked: Asked) -> None:
        """Count a call no longer."""
        self._size -= asked.size
        for blob in asked.blobs:
            kept, users = self._blobs.pop(blob.digest)
            if users > 1:
                self._blobs[blob.digest] = kept, users - 1
            else:
                self._size -= kept.size

    def _new(self, asked: Asked) -> int:
        """Return how many bytes of a call's blobs no other call has."""
        sizes = {each.digest: each.size for each in asked.blobs}
        return sum(sizes[digest] for digest in sizes.keys() - self._blobs.keys())

    def _kept(self, blob: Blob) -> Blob:
        kept, users = self._blobs.get(blob.digest, (blob, 0))
        self._blobs[blob.digest] = kept, users + 1
        return kept
