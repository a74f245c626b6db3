"""Both verifiers detect each changed bit of a proof."""

from collections.abc import Iterator

import pytest

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


def flips(data: bytes) -> Iterator[bytes]:
    """Yield the data with each of its bits changed, one at a time."""
    for at in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            yield bytes(changed)


@pytest.mark.parametrize(
    ("index", "output"),
    [(0, OUTPUT), (4, None)],
    ids=["signed by the worker, with its output", "of a wire without receipts"],
)
def test_every_bit_flip_in_a_bundle_is_detected(index: int, output: str | None) -> None:
    data = bundle.write(LOG.bundle(index, output))

    assert bundle_holds(data)
    assert second_holds(data)
    for changed in flips(data):
        assert not bundle_holds(changed), changed
        assert not second_holds(changed), changed


def test_every_bit_flip_in_a_consistency_proof_is_detected() -> None:
    data = consistency.write(LOG.growth(3, 5))

    assert growth_holds(data)
    assert second_holds(data)
    for changed in flips(data):
        assert not growth_holds(changed), changed
        assert not second_holds(changed), changed


def test_every_bit_flip_in_a_checkpoint_is_detected() -> None:
    note = LOG.notes[5].encode()

    assert checkpoint.verify(note.decode(), KEY).size == 5
    for changed in flips(note):
        with pytest.raises((InvalidRequest, UnicodeDecodeError)):
            checkpoint.verify(changed.decode(), KEY)
