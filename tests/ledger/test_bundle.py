from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.builders import (
    AT,
    COORDINATOR,
    KEY,
    OUTPUT,
    WORKER,
    Log,
    bundle_holds,
    claims,
    grown,
    second_holds,
    signed,
    unsigned,
)
from shoal.domain.errors import InvalidRequest
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.ledger import checkpoint, merkle, receipts
from shoal.ledger.bundle import ReceiptBundle, read, verify, write
from shoal.ledger.receipts import Claims
from shoal.ledger.verification import FILE_MAX, StepResult, VerificationStep

ALL = [
    VerificationStep.FORM,
    VerificationStep.KEY,
    VerificationStep.SIGNATURE,
    VerificationStep.RECEIPT,
    VerificationStep.CHECKPOINT,
    VerificationStep.LOGGED,
    VerificationStep.OUTPUT,
    VerificationStep.WORKER,
]


def of(*batch: Claims) -> ReceiptBundle:
    """Return the first receipt's bundle."""
    log = Log()
    log.add(*batch)
    return log.bundle()


def last(bundle: ReceiptBundle, key: bytes = KEY) -> StepResult:
    """Return the last step of verifying; what is wrong is wrong for both verifiers."""
    checks = verify(write(bundle), key)
    assert second_holds(write(bundle), key) is checks[-1].ok
    return checks[-1]


def forged(given: Claims, index: int = 0, **changed: Any) -> ReceiptBundle:
    """Return the bundle of a coordinator that signs whatever it likes."""
    named = changed.pop("checkpoint_size", 0)
    body = changed.pop("body", None) or receipts.body(given, named, merkle.EMPTY_ROOT)
    hash = merkle.leaf_hash(body)
    fields: dict[str, Any] = {
        "coordinator_key": KEY.hex(),
        "receipt": body.decode(),
        "signature": COORDINATOR.sign(receipts.PREFIX + body),
        "index": index,
        "path": (),
        "checkpoint": checkpoint.make(COORDINATOR, 1, hash, AT),
        "output": OUTPUT,
    }
    return ReceiptBundle(**(fields | changed))


def test_a_bundle_is_read_as_it_was_written() -> None:
    bundle = grown(5).bundle(3, None)

    assert read(write(bundle)) == bundle


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 20])
def test_every_receipt_verifies_with_nothing_but_the_key(size: int) -> None:
    log = grown(size)
    for index in range(size):
        data = write(log.bundle(index))

        assert [check.step for check in verify(data, KEY)] == ALL
        assert bundle_holds(data)
        assert second_holds(data)


def test_an_output_need_not_go_along() -> None:
    data = write(grown(3).bundle(output=None))

    steps = [check.step for check in verify(data, KEY)]

    assert steps == [step for step in ALL if step is not VerificationStep.OUTPUT]
    assert bundle_holds(data)
    assert second_holds(data)


@pytest.mark.parametrize(
    ("verdict", "receipt"),
    [
        (Verdict.VALID, signed()),
        (Verdict.MISSING, None),
        (Verdict.MALFORMED, SignedReceipt(b"\xff", b"")),
        (Verdict.MALFORMED, SignedReceipt(b"{}", b"")),
        (Verdict.WRONG_JOB, signed(job_id="other")),
        (Verdict.WRONG_WORKER, signed(COORDINATOR)),
        (Verdict.WRONG_OUTPUT, signed(output="{}")),
        (Verdict.BAD_SIGNATURE, SignedReceipt(signed().body, bytes(64))),
    ],
)
def test_what_a_worker_signed_is_judged_again(
    verdict: Verdict, receipt: SignedReceipt | None
) -> None:
    said = of(claims(verdict=verdict, worker_receipt=receipt), unsigned())

    assert last(said) == StepResult(VerificationStep.WORKER)


def test_a_coordinator_that_calls_a_bad_receipt_good_is_caught() -> None:
    bad = SignedReceipt(signed().body, bytes(64))

    check = last(of(claims(worker_receipt=bad)))

    assert check.step is VerificationStep.WORKER
    assert check.problem is not None
    assert check.problem.startswith("the signature is not the worker's, and yet")


def test_a_coordinator_that_calls_none_good_is_caught() -> None:
    assert last(of(claims(worker_receipt=None))).step is VerificationStep.WORKER
    assert last(of(claims(worker_key=None))).step is VerificationStep.WORKER


def test_a_coordinator_that_calls_a_good_receipt_bad_is_caught() -> None:
    data = write(of(claims(verdict=Verdict.BAD_SIGNATURE)))

    assert verify(data, KEY)[-1].step is VerificationStep.WORKER
    assert not bundle_holds(data)


def test_another_coordinators_bundle_is_refused() -> None:
    check = last(grown(2).bundle(), WORKER.public_key)

    assert check == StepResult(
        VerificationStep.KEY,
        f"it is about {KEY.hex()}, the key given is {WORKER.public_key.hex()}",
    )


def test_the_key_in_the_file_does_not_vouch_for_it() -> None:
    log = Log(WORKER)
    log.add(claims())
    bundle = replace(log.bundle(), coordinator_key=KEY.hex())

    assert last(bundle).step is VerificationStep.SIGNATURE


def test_a_signature_for_something_else_is_refused() -> None:
    body = receipts.body(claims(), 0, merkle.EMPTY_ROOT)

    assert last(forged(claims(), signature=COORDINATOR.sign(body))).step is (
        VerificationStep.SIGNATURE
    )


def test_a_signed_receipt_that_is_none_is_refused() -> None:
    body = b'{"type":"shoal/other"}'

    assert last(forged(claims(), body=body)).step is VerificationStep.RECEIPT


def test_a_checkpoint_of_another_is_refused() -> None:
    log = grown(2)
    note = checkpoint.make(WORKER, 2, bytes(32), AT)

    assert (
        last(replace(log.bundle(), checkpoint=note)).step is VerificationStep.CHECKPOINT
    )


def test_a_receipt_beyond_the_log_is_refused() -> None:
    log = grown(3)
    older = replace(log.bundle(2), checkpoint=log.notes[2])

    assert last(older).step is VerificationStep.LOGGED


@pytest.mark.parametrize("index", [-1, 0, 2, 3, 2**53 - 1])
def test_a_receipt_at_another_place_is_refused(index: int) -> None:
    assert (
        last(replace(grown(3).bundle(1), index=index)).step is VerificationStep.LOGGED
    )


def test_a_receipt_before_the_checkpoint_it_names_is_refused() -> None:
    check = last(forged(claims(), checkpoint_size=1))

    assert check == StepResult(
        VerificationStep.LOGGED, "leaf 0 cannot come after a checkpoint of 1 receipts"
    )


def test_another_output_is_refused() -> None:
    assert last(replace(grown(2).bundle(), output="{}")).step is VerificationStep.OUTPUT
    assert last(replace(grown(2).bundle(), output="")).step is VerificationStep.OUTPUT


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null\n",
        b"{}\n",
        b"\xff",
        b"[" * 100_000,
        write(grown(2).bundle())[:-1],
        write(grown(2).bundle()) + b"\n",
        b" " + write(grown(2).bundle()),
        write(grown(2).bundle()).replace(b'"index":0', b'"index":0.0'),
        write(grown(2).bundle()).replace(b'"index":0', b'"index":-0'),
        write(grown(2).bundle()).replace(b'"index":0', b'"index":0,"more":1'),
        write(grown(2).bundle()).replace(b'"version":1', b'"version":2'),
        write(grown(2).bundle()).replace(b"shoal/bundle", b"shoal/growth"),
        write(grown(2).bundle()).replace(b"/", b"\\/"),
    ],
    ids=lambda data: repr(data[:30]),
)
def test_what_is_not_in_the_one_form_is_refused(data: bytes) -> None:
    (check,) = verify(data, KEY)

    assert check.step is VerificationStep.FORM
    assert check.problem is not None
    assert check.problem.startswith("the file cannot be read: ")


def test_a_file_beyond_the_limit_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=f"at most {FILE_MAX}"):
        read(b" " * (FILE_MAX + 1))


@given(st.binary(), st.binary(max_size=40))
def test_no_bytes_and_no_key_do_more_than_fail(data: bytes, key: bytes) -> None:
    assert not bundle_holds(data, key)


@pytest.mark.parametrize("key", [b"", b"short", bytes(33), bytes([1]) + bytes(31)])
def test_a_key_that_is_none_verifies_nothing(key: bytes) -> None:
    bundle = replace(grown(2).bundle(), coordinator_key=key.hex())

    assert not bundle_holds(write(bundle), key)
