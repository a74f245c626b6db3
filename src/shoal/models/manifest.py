"""The manifest of a model: its files, and the hash of each chunk of them.

Pure.  The SHA-256 of an encoded manifest is the model's address.  A manifest may come
from a hostile peer: ``decode`` checks its names and sizes before anything is created.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from typing import NamedTuple

import msgspec

from shoal.domain.errors import InvalidRequest, PeerError
from shoal.models.names import check_file_name

CHUNK = 1 << 20  # bytes
DIGEST = 32  # bytes of a SHA-256
FILES_MAX = 1000  # of one model
CHUNKS_MAX = 1 << 20  # of one model: a terabyte
ENCODED_MAX = CHUNKS_MAX * DIGEST + FILES_MAX * 512  # bytes
SCHEME = "sha256:"
UNKNOWN = bytes(DIGEST)  # in place of a chunk's hash


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """A file: its size in bytes, its SHA-256, and those of its chunks, joined."""

    name: str
    size: int
    sha256: bytes
    chunks: bytes


class ChunkPlace(NamedTuple):
    """Where a chunk belongs; ``file`` is an index, offset and size are in bytes."""

    file: int
    offset: int
    size: int


@dataclass(frozen=True)
class Manifest:
    """The files of a model, ordered by name, and their chunks, numbered from 0."""

    files: tuple[FileEntry, ...]

    @cached_property
    def encoded(self) -> bytes:
        """The only form in which it is sent and hashed."""
        return msgspec.msgpack.encode(self.files)

    @cached_property
    def root(self) -> bytes:
        """The SHA-256 of ``encoded``."""
        return sha256(self.encoded).digest()

    @property
    def address(self) -> str:
        """The content address of the model."""
        return SCHEME + self.root.hex()

    @cached_property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(each.size for each in self.files)

    @cached_property
    def chunks(self) -> int:
        """The number of chunks."""
        return self._first[-1]

    @cached_property
    def _first(self) -> Sequence[int]:
        """The number of each file's first chunk, and of all chunks."""
        return [0, *accumulate(chunks_of(each.size) for each in self.files)]

    def digest(self, chunk: int) -> bytes:
        """Return the SHA-256 of a chunk."""
        file, offset, _ = self.place(chunk)
        at = offset // CHUNK * DIGEST
        return self.files[file].chunks[at : at + DIGEST]

    @property
    def is_checked_late(self) -> bool:
        """Whether it lacks hashes of chunks: then the whole files are compared."""
        return any(_has_unknown(each) for each in self.files)

    def has_hash(self, chunk: int, data: bytes | memoryview) -> bool:
        """Return whether these are the bytes of a chunk, as far as that is known."""
        digest = self.digest(chunk)
        if digest == UNKNOWN:
            return len(data) == self.place(chunk).size
        return sha256(data).digest() == digest

    def place(self, chunk: int) -> ChunkPlace:
        """Return where a chunk belongs."""
        low, high = 0, len(self.files)
        while high - low > 1:  # the last file that begins at or before it, with chunks
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self._first[middle] <= chunk else (low, middle)
            )
        offset = (chunk - self._first[low]) * CHUNK
        return ChunkPlace(low, offset, min(CHUNK, self.files[low].size - offset))

    def chunks_at(self, file: int, offset: int, size: int) -> range:
        """Return the chunks that have any of some bytes of a file, which exist."""
        first, end = self._first[file], min(offset + size, self.files[file].size)
        return range(first + offset // CHUNK, first + chunks_of(end))

    def places(self) -> Iterator[tuple[int, ChunkPlace]]:
        """Yield all chunks with their places, in order."""
        for file, (first, entry) in enumerate(
            zip(self._first, self.files, strict=False)
        ):
            for number in range(chunks_of(entry.size)):
                offset = number * CHUNK
                yield (
                    first + number,
                    ChunkPlace(file, offset, min(CHUNK, entry.size - offset)),
                )


def manifest_of_files(files: Iterable[tuple[str, int, bytes]]) -> Manifest:
    """Return the manifest of files of which the names, sizes and SHA-256 are known.

    Raises PeerError unless they can be created here.
    """
    entries = (
        FileEntry(name, size, digest, UNKNOWN * chunks_of(size))
        for name, size, digest in sorted(files)
    )
    manifest = Manifest(tuple(entries))
    _check(manifest)
    return manifest


def _has_unknown(file: FileEntry) -> bool:
    ends = range(0, len(file.chunks), DIGEST)
    return UNKNOWN in file.chunks and any(
        file.chunks[at : at + DIGEST] == UNKNOWN for at in ends
    )


def chunks_of(size: int) -> int:
    """Return the number of chunks of a file; an empty one has none."""
    return -(-size // CHUNK)


def decode(data: bytes) -> Manifest:
    """Decode a manifest of a peer.

    Raises PeerError if it is not valid, or a limit is exceeded.
    """
    if len(data) > ENCODED_MAX:
        raise PeerError(f"a manifest of {len(data)} bytes exceeds {ENCODED_MAX}")
    try:
        files = msgspec.msgpack.decode(data, type=tuple[FileEntry, ...])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"not a manifest: {error}") from error
    manifest = Manifest(files)
    _check(manifest)
    if manifest.encoded != data:  # one model would have many addresses
        raise PeerError("a manifest is not encoded in its only form")
    return manifest


def parse_address(text: str) -> bytes:
    """Return the SHA-256 that an address names.  Raises InvalidRequest."""
    try:
        root = bytes.fromhex(text.removeprefix(SCHEME))
    except ValueError:
        root = b""
    if not text.startswith(SCHEME) or len(root) != DIGEST:
        raise InvalidRequest(
            f"{text[:80]!a} is not the address of a model: expected {SCHEME} and 64 "
            "hexadecimal digits",
            "address",
        )
    return root


def _check(manifest: Manifest) -> None:
    """Raise PeerError unless the files can be created here."""
    files = manifest.files
    if not 0 < len(files) <= FILES_MAX:
        raise PeerError(f"a model of {len(files)} files: expected 1 to {FILES_MAX}")
    spellings: dict[str, str] = {}
    chunks = 0
    for file in files:
        try:
            check_file_name(file.name)
        except InvalidRequest as error:
            raise PeerError(str(error)) from error
        # Case-insensitive file systems would merge them.
        other = spellings.setdefault(file.name.lower(), file.name)
        if other != file.name:
            raise PeerError(f"{file.name} differs from {other} only in case")
        if file.size < 0:
            raise PeerError(f"{file.name}: a size of {file.size} bytes")
        chunks += chunks_of(file.size)
        # Before the hashes are counted: the size is the peer's word.
        if chunks > CHUNKS_MAX:
            raise PeerError(f"a model of more than {CHUNKS_MAX * CHUNK} bytes")
        expected = chunks_of(file.size) * DIGEST
        if len(file.chunks) != expected or len(file.sha256) != DIGEST:
            raise PeerError(
                f"{file.name}: {len(file.chunks)} bytes of hashes, expected {expected}"
            )
    names = [each.name for each in files]
    if names != sorted(set(names)):
        raise PeerError("the files of a manifest are repeated, or not in order")
