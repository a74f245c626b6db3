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

SIZE = 10
LOG = grown(SIZE)


def last(growth: ConsistencyProof, key: bytes = KEY) -> StepResult:
    """Return the last verification step; both verifiers must agree."""
    checks = verify(write(growth), key)
    assert second_holds(write(growth), key) is checks[-1].ok
    return checks[-1]


def test_proof_round_trips() -> None:
    growth = LOG.growth(3, 7)

    assert read(write(growth)) == growth


def test_growth_of_a_log_is_proved(subtests: pytest.Subtests) -> None:
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


def test_rewritten_log_is_detected() -> None:
    note = checkpoint.make(COORDINATOR, 7, bytes(32), AT)

    check = last(replace(LOG.growth(3, 7), second=note))

    assert check.step is VerificationStep.GROWN
    assert check.problem is not None
    assert "the log of 7 receipts extends the log of 3" in check.problem


@pytest.mark.parametrize("root", [bytes(32), EMPTY_ROOT])
def test_forked_log_is_detected(root: bytes) -> None:
    other = checkpoint.make(COORDINATOR, 7, root, AT)

    assert (
        last(ConsistencyProof(LOG.notes[7], other, ())).step is VerificationStep.GROWN
    )


def test_shrunk_log_is_detected() -> None:
    growth = LOG.growth(3, 7)
    turned = ConsistencyProof(growth.second, growth.first, growth.path)

    assert last(turned).step is VerificationStep.GROWN


@pytest.mark.parametrize("size", [0, 7])
def test_empty_log_has_no_proof(size: int) -> None:
    empty = checkpoint.make(COORDINATOR, 0, EMPTY_ROOT, AT)
    later = LOG.notes[size] if size else empty

    assert last(ConsistencyProof(empty, later, ())).step is VerificationStep.GROWN


@pytest.mark.parametrize("path", [(), (bytes(32),), (b"",), (b"short",) * 3])
def test_wrong_path_proves_nothing(path: tuple[bytes, ...]) -> None:
    assert last(replace(LOG.growth(3, 7), path=path)).step is VerificationStep.GROWN


def test_checkpoints_of_another_coordinator_are_rejected() -> None:
    theirs = checkpoint.make(WORKER, 3, bytes(32), AT)
    growth = LOG.growth(3, 7)

    assert last(replace(growth, first=theirs)).step is VerificationStep.EARLIER
    assert last(replace(growth, second=theirs)).step is VerificationStep.LATER
    assert last(growth, WORKER.public_key).step is VerificationStep.EARLIER


@given(st.binary(), st.binary(max_size=40))
def test_arbitrary_bytes_and_keys_only_fail(data: bytes, key: bytes) -> None:
    assert not growth_holds(data, key)
