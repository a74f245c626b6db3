"""Manifests of contents in memory."""

from collections.abc import Mapping
from hashlib import sha256

from shoal.models.manifest import CHUNK, FileEntry, Manifest


def manifest_of(contents: Mapping[str, bytes]) -> Manifest:
    """Return the manifest of files with these contents."""
    return Manifest(tuple(entry(name, contents[name]) for name in sorted(contents)))


def entry(name: str, content: bytes) -> FileEntry:
    """Return the entry of a file."""
    chunks = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]
    hashes = b"".join(sha256(each).digest() for each in chunks)
    return FileEntry(name, len(content), sha256(content).digest(), hashes)


def chunk_of(contents: Mapping[str, bytes], manifest: Manifest, chunk: int) -> bytes:
    """Return the bytes of a chunk."""
    file, offset, size = manifest.place(chunk)
    return contents[manifest.files[file].name][offset : offset + size]
