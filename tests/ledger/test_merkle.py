"""The tree against RFC 6962's recursive definitions and known answers."""

import hashlib
from collections.abc import Sequence
from functools import cache, partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.ledger.merkle import (
    EMPTY_ROOT,
    Frontier,
    NodePosition,
    consistency_path,
    frontier_positions,
    inclusion_path,
    leaf_hash,
    nodes_for_consistency,
    nodes_for_inclusion,
    root_from_inclusion,
    verify_consistency,
)

SIZES = range(1, 71)
LEAVES = tuple(str(number).encode() for number in range(70))

# The eight leaves of the tests that Certificate Transparency's programs share, with
# their roots and proofs.
KNOWN = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


class Tree:
    """A frontier with all nodes that it has returned."""

    def __init__(self, leaves: Sequence[bytes]) -> None:
        self.frontier = Frontier()
        self.nodes: dict[NodePosition, bytes] = {}
        for leaf in leaves:
            for level, position, hash in self.frontier.append(leaf):
                assert (level, position) not in self.nodes
                self.nodes[level, position] = hash

    def at(self, level: int, position: int) -> bytes:
        return self.nodes[level, position]


TREE = Tree(LEAVES)

# RFC 6962, sections 2.1, 2.1.1 and 2.1.2, verbatim.


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def split(count: int) -> int:
    k = 1
    while k * 2 < count:
        k *= 2
    return k


@cache  # the proofs of all sizes are of the same few subtrees
def mth(d: tuple[bytes, ...]) -> bytes:
    if not d:
        return sha256(b"")
    if len(d) == 1:
        return sha256(b"\x00" + d[0])
    k = split(len(d))
    return sha256(b"\x01" + mth(d[:k]) + mth(d[k:]))


def path(m: int, d: tuple[bytes, ...]) -> list[bytes]:
    if len(d) == 1:
        return []
    k = split(len(d))
    if m < k:
        return [*path(m, d[:k]), mth(d[k:])]
    return [*path(m - k, d[k:]), mth(d[:k])]


def subproof(m: int, d: tuple[bytes, ...], whole: bool) -> list[bytes]:
    if m == len(d):
        return [] if whole else [mth(d)]
    k = split(len(d))
    if m <= k:
        return [*subproof(m, d[:k], whole), mth(d[k:])]
    return [*subproof(m - k, d[k:], False), mth(d[:k])]


def test_root_matches_the_definition(subtests: pytest.Subtests) -> None:
    for size in [0, *SIZES]:
        with subtests.test(size=size):
            assert Tree(LEAVES[:size]).frontier.root() == mth(LEAVES[:size])


def test_inclusion_of_every_leaf_is_proved(subtests: pytest.Subtests) -> None:
    for size in SIZES:
        with subtests.test(size=size):
            root = mth(LEAVES[:size])
            for index in range(size):
                proof = inclusion_path(index, size, TREE.at)

                assert proof == path(index, LEAVES[:size])
                assert (
                    root_from_inclusion(index, size, leaf_hash(LEAVES[index]), proof)
                    == root
                )


def test_consistency_of_every_tree_is_proved(subtests: pytest.Subtests) -> None:
    for second in SIZES:
        with subtests.test(second=second):
            new = mth(LEAVES[:second])
            for first in range(1, second + 1):
                proof = consistency_path(first, second, TREE.at)
                old = mth(LEAVES[:first])

                assert proof == subproof(first, LEAVES[:second], True)
                assert verify_consistency(first, second, old, new, proof)


@pytest.mark.parametrize(("size", "root"), list(enumerate(ROOTS, 1)))
def test_known_roots_match(size: int, root: str) -> None:
    assert Tree(KNOWN[:size]).frontier.root().hex() == root


def test_known_proofs_match() -> None:
    tree = Tree(KNOWN)

    inclusion = [each.hex() for each in inclusion_path(5, 8, tree.at)]
    consistency = [each.hex() for each in consistency_path(6, 8, tree.at)]

    assert inclusion == [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]
    assert consistency == [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]


def test_proof_reads_only_the_announced_nodes(subtests: pytest.Subtests) -> None:
    for size in SIZES:
        with subtests.test(size=size):
            tree = Tree(LEAVES[:size])
            few = 2 * size.bit_length()
            for other in range(1, size):
                read: list[NodePosition] = []

                noted = partial(_record_read, tree, read)
                inclusion_path(other, size, noted)
                assert read == nodes_for_inclusion(other, size)
                assert len(read) <= few

                read.clear()
                consistency_path(other, size, noted)
                assert read == nodes_for_consistency(other, size)
                assert len(read) <= few


def _record_read(
    tree: Tree, read: list[NodePosition], level: int, position: int
) -> bytes:
    read.append((level, position))
    return tree.at(level, position)


def test_tree_continues_from_its_stored_nodes(subtests: pytest.Subtests) -> None:
    for size in [0, *SIZES]:
        with subtests.test(size=size):
            hashes = [TREE.nodes[place] for place in frontier_positions(size)]

            again = Frontier(size, hashes)
            for leaf in LEAVES[size:]:
                again.append(leaf)

            assert hashes == list(Tree(LEAVES[:size]).frontier.hashes)
            assert again.root() == TREE.frontier.root()


def test_copy_grows_independently() -> None:
    frontier = Frontier()
    frontier.append(b"a")

    copy = frontier.copy()
    copy.append(b"b")

    assert (frontier.size, copy.size) == (1, 2)
    assert frontier.root() == mth((b"a",))


@pytest.mark.parametrize(
    ("size", "hashes"),
    [
        (1, []),
        (0, [bytes(32)]),
        (3, [bytes(32)]),
        (-1, []),
        (-1, [bytes(32)]),
        (1, [bytes(31)]),
    ],
)
def test_invalid_tree_is_rejected(size: int, hashes: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"hashes for a tree|a hash has 32 bytes"):
        Frontier(size, hashes)


@given(st.data(), st.integers(2, 70))
def test_wrong_inclusion_proof_gives_another_root(
    data: st.DataObject, size: int
) -> None:
    tree, root = Tree(LEAVES[:size]), mth(LEAVES[:size])
    index = data.draw(st.integers(0, size - 1))
    proof = inclusion_path(index, size, tree.at)
    leaf = leaf_hash(LEAVES[index])
    at = data.draw(st.integers(0, len(proof) - 1))
    hash = bytes([proof[at][0] ^ 1]) + proof[at][1:]

    wrong = [
        root_from_inclusion(index, size, leaf, [*proof[:at], hash, *proof[at + 1 :]]),
        root_from_inclusion(index, size, leaf, [*proof, hash]),
        root_from_inclusion(index, size, leaf, proof[:-1]),
        root_from_inclusion(index, size, leaf_hash(b"other"), proof),
        root_from_inclusion(-1, size, leaf, proof),
        root_from_inclusion(size, size, leaf, proof),
        *(
            root_from_inclusion(other, size, leaf, proof)
            for other in range(size)
            if other != index
        ),
    ]

    assert root not in wrong


@given(st.data(), st.integers(2, 70))
def test_wrong_consistency_proof_is_rejected(data: st.DataObject, second: int) -> None:
    tree, new = Tree(LEAVES[:second]), mth(LEAVES[:second])
    first = data.draw(st.integers(1, second - 1))
    old = mth(LEAVES[:first])
    proof = consistency_path(first, second, tree.at)
    at = data.draw(st.integers(0, len(proof) - 1))
    hash = bytes([proof[at][0] ^ 1]) + proof[at][1:]
    changed = [*proof[:at], hash, *proof[at + 1 :]]

    assert verify_consistency(first, second, old, new, proof)
    assert not verify_consistency(first, second, old, new, changed)
    assert not verify_consistency(first, second, old, new, proof[:-1])
    assert not verify_consistency(first, second, old, new, [*proof, hash])
    assert not verify_consistency(first, second, new, new, proof)
    assert not verify_consistency(first, second, old, old, proof)
    assert not verify_consistency(second, first, new, old, proof)


def test_empty_tree_has_no_consistency_proof() -> None:
    assert not verify_consistency(0, 1, EMPTY_ROOT, mth((b"a",)), [])
    assert not verify_consistency(0, 0, EMPTY_ROOT, EMPTY_ROOT, [])
