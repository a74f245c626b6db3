"""An append-only Merkle tree, and proofs about it.

Source: RFC 6962, section 2.1 (the hashes of RFC 9162 are the same).  A node is
identified by its level, 0 for leaves, and its position there; it is complete when it
covers ``2**level`` leaves, and then never changes.  Every hash in a proof is the hash
of a range of leaves that a few complete nodes cover, so a store keeps only complete
nodes.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

NodePosition: TypeAlias = tuple[int, int]
"""The level and position of a complete node."""

MerkleNode: TypeAlias = tuple[int, int, bytes]
"""A complete node: level, position, hash."""

LeafRange: TypeAlias = tuple[int, int]
"""A half-open range of leaves."""

EMPTY_ROOT = hashlib.sha256(b"").digest()
HASH_SIZE = 32  # bytes


def leaf_hash(data: bytes) -> bytes:
    """Return the hash of a leaf."""
    return hashlib.sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of the parent of two nodes."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class Frontier:
    """The part of a tree that is needed to append to it.

    ``hashes`` are those of the largest complete nodes that cover the ``size`` leaves,
    from the left: one for each bit of ``size``.
    """

    def __init__(self, size: int = 0, hashes: Sequence[bytes] = ()) -> None:
        """Continue from ``size`` leaves; ValueError for a wrong number of hashes."""
        if size < 0 or len(hashes) != size.bit_count():
            raise ValueError(f"{len(hashes)} hashes for a tree of {size} leaves")
        if {*map(len, hashes)} - {HASH_SIZE}:
            raise ValueError(f"a hash has {HASH_SIZE} bytes")
        self.size = size  # leaves
        self._hashes = list(hashes)

    @property
    def hashes(self) -> tuple[bytes, ...]:
        return tuple(self._hashes)

    def copy(self) -> "Frontier":
        """Return an independent copy."""
        return Frontier(self.size, self._hashes)

    def root(self) -> bytes:
        """Return the hash of the whole tree."""
        return _folded(self._hashes)

    def append(self, leaf_data: bytes) -> list[MerkleNode]:
        """Append a leaf; return the nodes that became complete, the leaf first."""
        level, position, hash = 0, self.size, leaf_hash(leaf_data)
        nodes = [(level, position, hash)]
        while position & 1:  # a right child completes its parent
            hash = node_hash(self._hashes.pop(), hash)
            level, position = level + 1, position >> 1
            nodes.append((level, position, hash))
        self._hashes.append(hash)
        self.size += 1
        return nodes


def frontier_positions(size: int) -> list[NodePosition]:
    """Return the nodes of the frontier of a tree of ``size`` leaves."""
    return _cover(0, size)


def nodes_for_inclusion(index: int, size: int) -> list[NodePosition]:
    """Return the nodes that ``inclusion_path`` reads."""
    return [place for each in _beside(index, size) for place in _cover(*each)]


def inclusion_path(
    index: int, size: int, node: Callable[[int, int], bytes]
) -> list[bytes]:
    """Return the proof that a leaf is in the tree of the first ``size`` leaves.

    ``node`` returns the hash of a complete node, by level and position.
    """
    return [_hash_of(each, node) for each in _beside(index, size)]


def nodes_for_consistency(first: int, second: int) -> list[NodePosition]:
    """Return the nodes that ``consistency_path`` reads."""
    return [place for each in _between(first, second) for place in _cover(*each)]


def consistency_path(
    first: int, second: int, node: Callable[[int, int], bytes]
) -> list[bytes]:
    """Return the proof that the tree of ``second`` leaves begins with the ``first``."""
    return [_hash_of(each, node) for each in _between(first, second)]


def root_from_inclusion(
    index: int, size: int, leaf_hash: bytes, path: Sequence[bytes]
) -> bytes | None:
    """Return the root that a proof computes; None if the proof is malformed."""
    if not 0 <= index < size:
        return None
    ranges = _beside(index, size)
    if len(path) != len(ranges):
        return None
    hash = leaf_hash
    for (begin, _), beside in zip(ranges, path, strict=True):
        left = begin < index
        hash = node_hash(beside, hash) if left else node_hash(hash, beside)
    return hash


def verify_consistency(
    first: int,
    second: int,
    first_root: bytes,
    second_root: bytes,
    path: Sequence[bytes],
) -> bool:
    """Return whether a proof shows that the second tree begins with all of the first.

    The first tree has at least one leaf: the empty tree needs no proof.
    """
    if not 0 < first <= second:
        return False
    ranges = _between(first, second)
    if len(path) != len(ranges):
        return False
    rest = list(zip(ranges, path, strict=True))
    if rest and rest[0][0][1] == first:
        (_, begun), *rest = rest
    else:
        begun = first_root  # the first tree is a complete node of the second
    old = new = begun
    for (begin, _), beside in rest:
        if begin < first:
            old, new = node_hash(beside, old), node_hash(beside, new)
        else:
            new = node_hash(new, beside)
    return old == first_root and new == second_root


def _beside(index: int, size: int) -> list[LeafRange]:
    """Return the siblings on the path from a leaf to the root, in that order.

    RFC 6962, section 2.1.1, PATH.
    """
    assert 0 <= index < size
    ranges = []
    begin, end = 0, size
    while end - begin > 1:
        middle = _split(begin, end)
        if index < middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((begin, middle))
            begin = middle
    return ranges[::-1]


def _between(first: int, second: int) -> list[LeafRange]:
    """Return the ranges of a consistency proof, in order.

    RFC 6962, section 2.1.2, PROOF.
    """
    assert 0 < first <= second
    ranges: list[LeafRange] = []
    begin, end = 0, second
    while first != end:
        middle = _split(begin, end)
        if first <= middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((begin, middle))
            begin = middle
    if begin:
        ranges.append((begin, end))
    return ranges[::-1]


def _split(begin: int, end: int) -> int:
    """Return where a range of leaves splits: after the largest smaller power of two.

    RFC 6962, section 2.1.
    """
    return begin + (1 << (end - begin - 1).bit_length() - 1)


def _cover(begin: int, end: int) -> list[NodePosition]:
    """Return the complete nodes that cover a range of a proof, from the left.

    Such a range begins at a multiple of the size of its largest node.
    """
    places = []
    while begin < end:
        level = (end - begin).bit_length() - 1
        places.append((level, begin >> level))
        begin += 1 << level
    return places


def _hash_of(leaves: LeafRange, node: Callable[[int, int], bytes]) -> bytes:
    return _folded([node(*place) for place in _cover(*leaves)])


def _folded(hashes: Sequence[bytes]) -> bytes:
    """Return the hash over complete nodes, from the left, in descending size."""
    if not hashes:
        return EMPTY_ROOT
    found = hashes[-1]
    for left in hashes[-2::-1]:
        found = node_hash(left, found)
    return found
