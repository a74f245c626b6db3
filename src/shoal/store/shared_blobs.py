"""Large values in a store of contents that other machines can read."""

import hashlib
from contextlib import suppress

from shoal.domain.errors import NotFound, StoreError
from shoal.store.blobs import BlobFiles, BlobIndex, blob_not_found, check_blob
from shoal.store.contents import ContentStore, write_contents


class SharedBlobs:
    """Values in a store of contents, and copies of those used last in a folder.

    Args:
        contents: named by the hexadecimal digits of their digests.
        near: the copies, which may be deleted while no coordinator runs.
        size_max: total bytes of all values, including the pinned.
    """

    def __init__(self, contents: ContentStore, near: BlobFiles, size_max: int) -> None:
        self._contents = contents
        self._near = near
        self._index = BlobIndex(size_max)

    def open(self) -> None:
        self._near.open()
        for name, size in self._contents.open().items():
            self._index.add(bytes.fromhex(name), size, "")

    def has(self, digest: bytes) -> bool:
        return self._index.has(digest)

    def is_near(self, digest: bytes) -> bool:
        return self._near.has(digest)

    def read(self, digest: bytes) -> memoryview:
        if not self.has(digest):
            raise blob_not_found(digest)
        with suppress(NotFound):
            return self._near.read(digest)
        name = digest.hex()
        if not self._contents.has(name):
            raise blob_not_found(digest)
        with self._contents.read(name) as file:
            data = file.read()
        if hashlib.sha256(data).digest() != digest:  # No secret: of a value.
            raise StoreError(f"the value {name} is damaged")
        self._copy(data)
        return memoryview(data)

    def keep(
        self, data: bytes | memoryview, expected: bytes | None = None, owner: str = ""
    ) -> bytes:
        digest = check_blob(data, expected)
        if not self.has(digest):
            write_contents(self._contents, digest.hex(), [data])
            for each in self._index.enter(digest, len(data), owner):
                self._contents.remove(each.hex())
            self._copy(data)
        return digest

    def pin(self, digest: bytes) -> None:
        self._index.pin(digest)

    def unpin(self, digest: bytes) -> None:
        self._index.unpin(digest)

    def _copy(self, data: bytes | memoryview) -> None:
        with suppress(StoreError):  # as on a full disk: it is read from afar again
            self._near.keep(data)
