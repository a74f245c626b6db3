from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.builders import (
    AT,
    COORDINATOR,
    KEY,
    WORKER,
    grown,
    growth_holds,
    second_holds,
)
from shoal.ledger import checkpoint
from shoal.ledger.consistency import ConsistencyProof, read, verify, write
from shoal.ledger.merkle import EMPTY_ROOT
from shoal.ledger.verification import StepResult, VerificationStep

SIZE = 17
LOG = grown(SIZE)


def last(growth: ConsistencyProof, key: bytes = KEY) -> StepResult:
    """Return the last step of verifying; what is wrong is wrong for both verifiers."""
    checks = verify(write(growth), key)
    assert second_holds(write(growth), key) is checks[-1].ok
    return checks[-1]


def test_a_proof_is_read_as_it_was_written() -> None:
    growth = LOG.growth(3, 7)

    assert read(write(growth)) == growth


def test_a_log_that_grew_is_proved_to_have(subtests: pytest.Subtests) -> None:
    for second in range(1, SIZE + 1):
        with subtests.test(second=second):
            for first in range(1, second + 1):
                data = write(LOG.growth(first, second))

                assert [check.step for check in verify(data, KEY)] == [
                    VerificationStep.FORM,
                    VerificationStep.EARLIER,
                    VerificationStep.LATER,
                    VerificationStep.GROWN,
                ]
                assert growth_holds(data)
                assert second_holds(data)


def test_a_log_that_was_rewritten_is_told() -> None:
    note = checkpoint.make(COORDINATOR, 7, bytes(32), AT)

    check = last(replace(LOG.growth(3, 7), second=note))

    assert check.step is VerificationStep.GROWN
    assert check.problem is not None
    assert "the log of 7 receipts begins with those 3" in check.problem


@pytest.mark.parametrize("root", [bytes(32), EMPTY_ROOT])
def test_a_log_that_forked_is_told(root: bytes) -> None:
    other = checkpoint.make(COORDINATOR, 7, root, AT)

    assert (
        last(ConsistencyProof(LOG.notes[7], other, ())).step is VerificationStep.GROWN
    )


def test_a_log_that_shrank_is_told() -> None:
    growth = LOG.growth(3, 7)
    turned = ConsistencyProof(growth.second, growth.first, growth.path)

    assert last(turned).step is VerificationStep.GROWN


@pytest.mark.parametrize("size", [0, 7])
def test_nothing_is_proved_of_an_empty_log(size: int) -> None:
    empty = checkpoint.make(COORDINATOR, 0, EMPTY_ROOT, AT)
    later = LOG.notes[size] if size else empty

    assert last(ConsistencyProof(empty, later, ())).step is VerificationStep.GROWN


@pytest.mark.parametrize("path", [(), (bytes(32),), (b"",), (b"short",) * 3])
def test_another_path_proves_nothing(path: tuple[bytes, ...]) -> None:
    assert last(replace(LOG.growth(3, 7), path=path)).step is VerificationStep.GROWN


def test_checkpoints_of_another_are_refused() -> None:
    theirs = checkpoint.make(WORKER, 3, bytes(32), AT)
    growth = LOG.growth(3, 7)

    assert last(replace(growth, first=theirs)).step is VerificationStep.EARLIER
    assert last(replace(growth, second=theirs)).step is VerificationStep.LATER
    assert last(growth, WORKER.public_key).step is VerificationStep.EARLIER


@given(st.binary(), st.binary(max_size=40))
def test_no_bytes_and_no_key_do_more_than_fail(data: bytes, key: bytes) -> None:
    assert not growth_holds(data, key)
