"""Both verifiers detect each changed bit of a proof."""

from collections.abc import Iterator

import pytest

from harness.profiles import some_long
from ledger.builders import (
    KEY,
    OUTPUT,
    bundle_holds,
    grown,
    growth_holds,
    second_holds,
)
from shoal.domain.errors import InvalidRequest
from shoal.ledger import bundle, checkpoint, consistency

LOG = grown(5)


# Of each byte; in the short run one of every third, and another one in the next.
bits_of_each = pytest.mark.parametrize(
    "bits", some_long([1, 8], short=1), ids=["some bits", "all bits"]
)


def flips(data: bytes, bits: int) -> Iterator[bytes]:
    """Yield the data with ``bits`` bits of each byte changed, one at a time."""
    for at in range(0, len(data), 1 if bits == 8 else 3):
        for number in range(bits):
            bit = (at + number) % 8
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            yield bytes(changed)


@bits_of_each
@pytest.mark.parametrize(
    ("index", "output"),
    [(0, OUTPUT), (4, None)],
    ids=["signed by the worker, with its output", "of a wire without receipts"],
)
def test_every_bit_flip_in_a_bundle_is_detected(
    index: int, output: str | None, bits: int
) -> None:
    data = bundle.write(LOG.bundle(index, output))

    assert bundle_holds(data)
    assert second_holds(data)
    for changed in flips(data, bits):
        assert not bundle_holds(changed), changed
        assert not second_holds(changed), changed


@bits_of_each
def test_every_bit_flip_in_a_consistency_proof_is_detected(bits: int) -> None:
    data = consistency.write(LOG.growth(3, 5))

    assert growth_holds(data)
    assert second_holds(data)
    for changed in flips(data, bits):
        assert not growth_holds(changed), changed
        assert not second_holds(changed), changed


@bits_of_each
def test_every_bit_flip_in_a_checkpoint_is_detected(bits: int) -> None:
    note = LOG.notes[5].encode()

    assert checkpoint.verify(note.decode(), KEY).size == 5
    for changed in flips(note, bits):
        with pytest.raises((InvalidRequest, UnicodeDecodeError)):
            checkpoint.verify(changed.decode(), KEY)
