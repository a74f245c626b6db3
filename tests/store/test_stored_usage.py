"""The usage of an outcome, as a row of the store has it."""

from pathlib import Path

import pytest

from shoal.domain.outcome import Outcome, Usage
from shoal.store.blobs import BlobFiles
from shoal.store.codec import decode_outcome, encode_outcome
from shoal.store.packing import unpack


@pytest.mark.parametrize(
    "usage",
    [
        None,
        Usage(10, 5),
        Usage(10, 5, cached_tokens=0),
        Usage(10, 5, cached_tokens=8, reasoning_tokens=3),
    ],
)
def test_stored_usage_is_read_as_it_was(usage: Usage | None, tmp_path: Path) -> None:
    outcome = Outcome("hi", usage=usage)

    row, _ = encode_outcome(outcome, BlobFiles(tmp_path))

    assert decode_outcome(row) == outcome


def test_a_row_has_only_the_counts_that_are_known(tmp_path: Path) -> None:
    row, _ = encode_outcome(Outcome("hi", usage=Usage(10, 5)), BlobFiles(tmp_path))

    assert b'"usage":{"prompt_tokens":10,"completion_tokens":5}' in unpack(row)
